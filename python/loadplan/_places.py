"""Where the targets of an update lay, so that what a loader or a hook moved can be put back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

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
        for tensor in named.values():
            if tensor is not None and is_traceable_wrapper_subclass(tensor):
                self._slots.append((tensor.__dict__, dict(tensor.__dict__)))
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
            if not is_same_place(tensor, alias):
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
        """Brings bytes that lie in new memory (`param.data = w`) back to the old place.

        Not where a target over the same bytes has stayed, or has gone elsewhere: the old place
        holds the values of both.  The layouts tell of what is left in new memory.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            moved = moved_targets(targets.named(), self._aliases)
            copy_to_old_places(moved.values())
            for tensor, old in moved.values():
                tensor.data = old


def moved_targets(
    now: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of targets that lie in other memory than `before`, those whose bytes fit into the old place.

    By name: the tensor as it is now, and one that shows the old place.
    """
    over: dict[int, dict[str, _Move]] = {}
    for name, tensor in now.items():
        old = before.get(name)
        if old is not None and isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            over.setdefault(_storage(old), {})[name] = _Move(tensor, old)
    return {
        name: (move.tensor, move.old)
        for moves in over.values()
        for name, move in moves.items()
        if move.can_return(moves.values())
    }


def copy_to_old_places(moved: Iterable[tuple[Tensor, Tensor]]) -> None:
    # One tensor may have two names.
    once = {
        (id(tensor), _storage(old), _span(old)): (tensor.detach(), old) for tensor, old in moved
    }
    places = {storage for _, storage, _ in once}
    # Two targets that have changed places: each is read before the other is written.
    values = [value.clone() if _storage(value) in places else value for value, _ in once.values()]
    for value, (_, old) in zip(values, once.values(), strict=True):
        old.copy_(value)


class _Move(NamedTuple):
    """A target, and what it showed before."""

    tensor: Tensor
    old: Tensor

    def is_away(self) -> bool:
        return _storage(self.tensor) != _storage(self.old)

    def can_return(self, moves: Collection[_Move]) -> bool:
        """``moves``: of all targets over the same old storage, this one among them."""
        if not self.is_away() or not self._has_kind_of_old():
            return False
        return all(
            other.tensor is self.tensor or not self._shared_with(other) or self._is_tied_to(other)
            for other in moves
        )

    def _has_kind_of_old(self) -> bool:
        return self.tensor.shape == self.old.shape and self.tensor.dtype == self.old.dtype

    def _shared_with(self, other: _Move) -> bool:
        ours, theirs = _span(self.old), _span(other.old)
        return max(ours[0], theirs[0]) < min(ours[1], theirs[1])

    def _is_tied_to(self, other: _Move) -> bool:
        """Whether both show the same bytes of the new memory as of the old."""
        return (
            _storage(other.tensor) == _storage(self.tensor)
            and other._has_kind_of_old()
            and _span(other.tensor)[0] - _span(self.tensor)[0]
            == _span(other.old)[0] - _span(self.old)[0]
            and self.tensor.stride() == self.old.stride()
            and other.tensor.stride() == other.old.stride()
        )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor shows lie between these."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = sum((n - 1) * step for n, step in steps) + 1 if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + int(extent) * tensor.itemsize


def is_same_place(tensor: Tensor, alias: Tensor) -> bool:
    """Whether both show the same bytes of the same memory in the same way."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(
            tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
            and tensor.storage_offset() == alias.storage_offset()
            and tensor.shape == alias.shape
            and tensor.stride() == alias.stride()
            and tensor.dtype == alias.dtype
        )
