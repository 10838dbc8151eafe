"""Where the targets of an update lay, so that what a loader or a hook moved can be put back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .targets import Targets


class Places:
    """Aliases of all targets: their memory and geometry, without the objects of the model."""

    def __init__(self, targets: Targets) -> None:
        # A tensor that wraps others has no memory of its own.
        self._aliases = {
            name: tensor
            for name, tensor in zip(*targets.lists(), strict=True)
            if not is_traceable_wrapper_subclass(tensor)
        }

    def put_back(self, targets: Targets) -> None:
        """Every target has its old memory and geometry again; a replaced parameter stays one."""
        for name, tensor in targets.named().items():
            alias = self._aliases.get(name)
            if alias is not None and not _is_same(tensor, alias):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    tensor.data = alias

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
