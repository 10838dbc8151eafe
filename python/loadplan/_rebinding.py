"""Puts back what a loader rebinds while it is traced.

A pass runs the loader on tensors that hold nothing; an attribute that it sets on the way
(`layer.loaded = True`, `param.data = ...`, a parameter that is replaced) must not stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._curious import is_trace
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
        for name, tensor in {**targets.outer(), **self._named}.items():
            holds_targets = is_traceable_wrapper_subclass(tensor)
            attributes = tensor.__dict__
            self._mappings.append((name, attributes, dict(attributes), holds_targets))

    def _snapshot_module(self, name: str, module: nn.Module) -> None:
        for slot in _SLOTS:
            held = module.__dict__[slot]
            self._mappings.append((name, held, dict(held), slot != "_modules"))
        self._mappings.append((name, module.__dict__, dict(module.__dict__), False))

    def attribute_of(self, storage: int) -> str:
        """The module's attribute that showed the memory before the pass, or ""."""
        for where, mapping, held, _ in self._mappings:
            if not isinstance(mapping, dict):
                continue
            for key, value in held.items():
                if isinstance(value, Tensor) and storage_of(value) == storage:
                    return f"{where}.{key}" if where else str(key)
        return ""

    def put_back(self, tracer: Any) -> None:
        """Undoes what the pass rebound, and notes it in `rebound`.

        A trace tensor that was put somewhere to stay makes its name a fallback: the loader then
        puts the real one there.  Call inside the pass.
        """
        rebound: list[str] = []
        for where, mapping, held, is_target in self._mappings:
            changed = _changed_keys(mapping, held)
            for key in changed:
                name = f"{where}.{key}" if where else str(key)
                rebound.append(name)
                value = mapping.get(key)
                # Also a real tensor that was traced into, or stands in a target's place.  What
                # shows a target's own memory shows what an update writes there.
                if is_trace(value) or (
                    isinstance(value, Tensor)
                    and (is_target or (tracer.is_symbolic(value) and not self._is_alias(value)))
                ):
                    tracer.refuse(value, f"{name} = ...", "")
                if is_target and key in held and not is_trace(value):
                    self._moved.append(name)
            for key in changed:
                if key in held:
                    mapping[key] = held[key]
                else:
                    del mapping[key]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, tensor in self._named.items():
                if _same_place(tensor, self._aliases[name]):
                    continue
                rebound.append(f"{name}.data")
                # Torch lets a live tensor become a trace tensor without asking any kernel.
                if is_trace(tensor):
                    tracer.refuse(tensor, f"{name}.data = ...", "")
                else:
                    self._moved.append(name)
                tensor.data = self._aliases[name]
        self.rebound = tuple(rebound)

    def _is_alias(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage != 0 and any(storage == storage_of(t) for t in self._aliases.values())

    def refuse_rebound_targets(self) -> None:
        if self._moved:
            raise RuntimeError(
                f"the loader replaces the memory of target `{self._moved[0]}` instead of copying "
                "into it, which a load plan cannot follow; use `copy_`"
            )


def _changed_keys(mapping: Mapping[Any, Any], held: Mapping[Any, Any]) -> list[Any]:
    # A model has some thousand of these, nearly all as they were.
    if mapping.keys() == held.keys() and all(map(is_, mapping.values(), held.values())):
        return []
    changed = [
        key
        for key, value in mapping.items()
        if key not in _SLOTS and held.get(key, mapping) is not value
    ]
    return changed + [key for key in held if key not in mapping]


def storage_of(tensor: Tensor) -> int:
    """Which storage it lies in; 0 where it has none of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            return 0
        return int(tensor.untyped_storage()._cdata)


def _same_place(tensor: Tensor, alias: Tensor) -> bool:
    return tensor.layout is not torch.strided or bool(
        tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.dtype == alias.dtype
    )
