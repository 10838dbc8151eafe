"""Puts back what a loader rebinds while it is traced.

A pass runs the loader on tensors that hold nothing; an attribute that it sets on the way
(`layer.loaded = True`, `param.data = ...`, a parameter that is replaced) must not stay.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from .targets import Targets

_SLOTS = ("_parameters", "_buffers", "_modules")


class Bindings:
    """A snapshot of the names that a loader may rebind: targets, and attributes of modules."""

    def __init__(self, targets: Targets) -> None:
        self.rebound: tuple[str, ...] = ()
        self._moved: list[str] = []
        self._named = targets.named()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._aliases = {name: tensor.detach() for name, tensor in self._named.items()}
        # (where, mapping, what it held, whether a change is one of targets)
        self._mappings: list[tuple[str, Any, dict[str, Any], bool]] = []
        root = targets.targets
        if isinstance(root, Mapping):
            self._mappings.append(("", root, dict(root), True))
        else:
            for name, module in root.named_modules():
                self._snapshot_module(name, module)
        for name, tensor in self._named.items():
            self._mappings.append((name, tensor.__dict__, dict(tensor.__dict__), False))

    def _snapshot_module(self, name: str, module: nn.Module) -> None:
        for slot in _SLOTS:
            held = module.__dict__[slot]
            self._mappings.append((name, held, dict(held), slot != "_modules"))
        own = {key: value for key, value in module.__dict__.items() if key not in _SLOTS}
        self._mappings.append((name, module.__dict__, own, False))

    def put_back(self) -> None:
        """Undoes what the pass rebound, and notes it in `rebound`."""
        rebound: list[str] = []
        for where, mapping, held, is_target in self._mappings:
            changed = [
                key
                for key, value in mapping.items()
                if key not in _SLOTS and held.get(key, mapping) is not value
            ] + [key for key in held if key not in mapping]
            if not changed:
                continue
            names = [f"{where}.{key}" if where else str(key) for key in changed]
            rebound += names
            if is_target:
                self._moved += [
                    name for name, key in zip(names, changed, strict=True) if key in held
                ]
            if isinstance(mapping, MutableMapping):
                for key in changed:
                    if key in held:
                        mapping[key] = held[key]
                    else:
                        del mapping[key]
        for name, tensor in self._named.items():
            if _same_place(tensor, self._aliases[name]):
                continue
            rebound.append(f"{name}.data")
            self._moved.append(name)
            with torch._C.DisableTorchFunctionSubclass():
                tensor.data = self._aliases[name]
        self.rebound = tuple(rebound)

    def refuse_rebound_targets(self) -> None:
        if self._moved:
            raise RuntimeError(
                f"the loader replaces the memory of target `{self._moved[0]}` instead of copying "
                "into it, which a load plan cannot follow; use `copy_`"
            )


def _same_place(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return (
            tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
            and tensor.storage_offset() == alias.storage_offset()
            and tensor.shape == alias.shape
            and tensor.stride() == alias.stride()
            and tensor.dtype == alias.dtype
        )
