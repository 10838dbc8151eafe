"""Where the targets of an update lay, so that what a loader or a hook moved can be put back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .targets import Targets


class LayerPlaces:
    """The tensors of one layer, or of a mapping: which they are, their memory and geometry."""

    def __init__(self, layer: nn.Module | Mapping[str, Tensor]) -> None:
        self._layer = layer
        named: dict[str, Any]
        if isinstance(layer, nn.Module):
            self._slots: list[tuple[Any, dict[str, Any]]] = [
                (layer._parameters, dict(layer._parameters)),
                (layer._buffers, dict(layer._buffers)),
            ]
            self._non_persistent = set(layer._non_persistent_buffers_set)
            named = {**layer._parameters, **layer._buffers}
        else:
            named = dict(layer)
            self._slots = [(layer, named)] if isinstance(layer, MutableMapping) else []
        # A tensor that wraps others has no memory of its own.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._aliases = [
                (tensor, tensor.detach())
                for tensor in named.values()
                if tensor is not None and not is_traceable_wrapper_subclass(tensor)
            ]

    def put_back(self) -> None:
        """The same tensors stand under the same names, with their old memory and geometry."""
        for slot, held in self._slots:
            if slot.keys() != held.keys() or any(slot[k] is not v for k, v in held.items()):
                slot.clear()
                slot.update(held)
        if isinstance(self._layer, nn.Module):
            self._layer._non_persistent_buffers_set = set(self._non_persistent)
        for tensor, alias in self._aliases:
            if not _is_same(tensor, alias):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    tensor.data = alias


class Places:
    """Those of all targets.  Leads to the model: keep it there, or no longer than a call."""

    def __init__(self, targets: Targets) -> None:
        self._layers = [LayerPlaces(layer) for layer in targets.layers()]
        self._aliases = {
            name: tensor
            for name, tensor in zip(*targets.lists(), strict=True)
            if not is_traceable_wrapper_subclass(tensor)
        }

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copied model has an update of its own

    def put_back(self) -> None:
        for layer in self._layers:
            layer.put_back()

    def keep(self, targets: Targets) -> None:
        """Brings bytes that lie in new memory (`param.data = w`) back to the old place."""
        for name, tensor in targets.named().items():
            old = self._aliases.get(name)
            if old is None:
                continue
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                moved = tensor.untyped_storage()._cdata != old.untyped_storage()._cdata
                if not moved or tensor.shape != old.shape or tensor.dtype != old.dtype:
                    continue
                old.copy_(tensor.detach())
                tensor.data = old


def _is_same(tensor: Tensor, alias: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(
            tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
            and tensor.storage_offset() == alias.storage_offset()
            and tensor.shape == alias.shape
            and tensor.stride() == alias.stride()
            and tensor.dtype == alias.dtype
        )
