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
from ._places import copy_to_old_places, is_same_place, moved_targets
from .targets import Targets

_SLOTS = ("_parameters", "_buffers", "_modules")
_DEPTH = 3  # of lists and dicts in one another that are looked at
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Bindings:
    """A snapshot of the names that a loader may rebind: targets, and attributes of modules."""

    def __init__(self, targets: Targets, refused: set[str] | None = None) -> None:
        """``refused``: attributes that earlier passes gave trace tensors; this one adds to them."""
        self._refused = set() if refused is None else refused
        self.rebound: tuple[str, ...] = ()
        self._targets = targets
        self._moved: list[str] = []
        self._replaced: list[tuple[str, Tensor, Tensor]] = []
        self._differing = ""  # an attribute that holds another number of tensors
        self._named = targets.named()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._aliases = {name: tensor.detach() for name, tensor in self._named.items()}
        # Dicts and lists that are attributes: (name, it, what it held)
        self._containers: list[tuple[str, Any, Any]] = []
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
        for key in module.__dict__.keys() - _OF_EVERY_MODULE:
            self._note_containers(f"{name}.{key}" if name else key, module.__dict__[key], _DEPTH)

    def _note_containers(self, name: str, value: Any, depth: int) -> None:
        if depth == 0 or not isinstance(value, (dict, list)):
            return
        self._containers.append((name, value, value.copy()))
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, (dict, list)):
                self._note_containers(f"{name}[{key!r}]", inner, depth - 1)

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

        What stands in a target's place is copied into the target, where it fits.  A trace tensor
        that was put somewhere else to stay makes its name a fallback: the loader then puts the
        real one there.  Call inside the pass.
        """
        rebound: list[str] = []
        changes = [
            (where, mapping, held, is_target, _changed_keys(mapping, held))
            for where, mapping, held, is_target in self._mappings
        ]
        changes = [change for change in changes if change[-1]]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            away = [
                name
                for name, tensor in self._named.items()
                if not _same_place(tensor, self._aliases[name])
            ]
            if changes or away:
                self._look_at_targets(tracer)
            for where, mapping, held, is_target, changed in changes:
                for key in changed:
                    name = f"{where}.{key}" if where else str(key)
                    rebound.append(name)
                    if not is_target:
                        self._look_at_attribute(tracer, name, mapping.get(key), held.get(key))
                _put_back_keys(mapping, held, changed)
            self._put_back_slots()
            for name, container, held in self._containers:
                rebound += _empty_of_trace(tracer, name, container, held)
            self._containers.clear()  # what an earlier pass put there lives no longer by this
            for name in away:
                rebound.append(f"{name}.data")
                self._named[name].data = self._aliases[name]
        self.rebound = tuple(rebound)

    def restore(self) -> None:
        """Puts back what is bound otherwise now, outside of a pass."""
        for _, mapping, held, _ in self._mappings:
            _put_back_keys(mapping, held, _changed_keys(mapping, held))
        self._put_back_slots()
        for _, container, held in self._containers:
            if isinstance(container, list):
                container[:] = held
            else:
                _put_back_keys(container, held, _changed_keys(container, held))

    def _put_back_slots(self) -> None:
        """`del modules[0]` of a ModuleList binds a new dict of modules."""
        for _, mapping, held, _ in self._mappings:
            if isinstance(mapping, dict) and "_modules" in held:
                for slot in _SLOTS:
                    mapping[slot] = held[slot]

    def _shown_elsewhere(self, now: Mapping[str, Tensor]) -> set[str]:
        """Targets whose memory of before shows in what is no target and does not move with them."""
        storages: dict[int, list[Tensor]] = {}
        for _, mapping, held, is_target in self._mappings:
            if not is_target and isinstance(mapping, dict):
                for tensor in _tensors_in([v for k, v in held.items() if k not in _SLOTS]):
                    storages.setdefault(storage_of(tensor), []).append(tensor)
        return {
            name
            for name, old in self._aliases.items()
            if name in now and not _same_place(now[name], old) and storage_of(old)
            for tensor in storages.get(storage_of(old), ())
            if tensor is not now[name]
        }

    def _look_at_targets(self, tracer: Any) -> None:
        """Before anything is put back: what lies under the names of targets, old ones and new."""
        now = {k: t for k, t in self._targets.named().items() if isinstance(t, Tensor)}
        shown = self._shown_elsewhere(now)
        followed = moved_targets(now, self._aliases)
        self._moved += sorted(shown)
        copy_to_old_places(move for name, move in followed.items() if name not in shown)
        for name, tensor in now.items():
            old = self._aliases.get(name)
            if name in shown or name in followed:
                continue
            if old is not None and _same_place(tensor, old):
                continue
            is_data = tensor is self._named.get(name)
            # Also a real tensor that was traced into, or stands in a target's place.
            if is_trace(tensor) or old is not None or tracer.is_symbolic(tensor):
                tracer.refuse(tensor, f"{name}.data = ..." if is_data else f"{name} = ...", "")
            if old is not None and not is_trace(tensor):
                self._moved.append(name)
        self._moved += [name for name in self._aliases if name not in now]

    def _look_at_attribute(self, tracer: Any, name: str, value: Any, held: Any) -> None:
        new, old = _tensors_in(value), _tensors_in(held)
        for tensor in new:
            # What shows a target's own memory shows what an update writes there.
            if is_trace(tensor) or (tracer.is_symbolic(tensor) and not self._is_alias(tensor)):
                tracer.refuse(tensor, f"{name} = ...", "")
                self._refused.add(name)
        if name in self._refused or not old:
            return
        if len(new) != len(old):
            self._differing = name
        else:
            self._replaced += [(name, *pair) for pair in zip(new, old, strict=True)]

    def _is_alias(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage != 0 and any(storage == storage_of(t) for t in self._aliases.values())

    def differing_attribute(self) -> str:
        """An attribute that shows another real tensor now, with other bytes, or "".

        Not one that showed a trace tensor in an earlier pass: names that have been given up since
        give it its bytes.  Call after the pass: targets may be read again.
        """
        for name, value, held in self._replaced:
            if name in self._refused:
                continue
            shows_target = self._is_alias(value)
            if not (_same_place if shows_target else _same_bytes)(value, held):
                return name
        return "" if self._differing in self._refused else self._differing

    def refuse_rebound_targets(self) -> None:
        if self._moved:
            raise RuntimeError(
                f"the loader replaces the memory of target `{self._moved[0]}` by what has another "
                "shape or dtype, shares its memory or does without it, or while something else "
                "shows the old memory, which a load plan cannot follow; copy into the target"
            )


def _tensors_in(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """Itself, or those in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or not isinstance(value, (list, tuple, dict)):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [tensor for item in inner for tensor in _tensors_in(item, depth - 1)]


def _empty_of_trace(tracer: Any, name: str, container: Any, held: Any) -> list[str]:
    """Puts back entries of a dict or list that hold trace tensors; others are the loader's."""
    is_list = isinstance(container, list)
    if len(container) == len(held) and (
        all(map(is_, container, held)) if is_list else not _changed_keys(container, held)
    ):
        return []
    entries = list(enumerate(container) if is_list else container.items())
    traced = [(key, value) for key, value in entries if is_trace(value)]
    for key, value in traced:
        tracer.refuse(value, f"{name}[{key!r}] = ...", "")
        if not is_list and key in held:
            container[key] = held[key]
        elif not is_list:
            del container[key]
    if is_list and traced:
        container[:] = held
    return [f"{name}[{key!r}]" for key, _ in traced]


def _put_back_keys(mapping: Any, held: Mapping[Any, Any], changed: list[Any]) -> None:
    for key in changed:
        if key in held:
            mapping[key] = held[key]
        elif key in mapping:  # attributes of a target may be listed twice
            del mapping[key]


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
    return tensor.layout is not torch.strided or is_same_place(tensor, alias)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """In the same layout, too."""
    if storage_of(one) == 0 or storage_of(other) == 0:
        return False
    if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        bytes_of = [
            tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).view(torch.uint8)
            for tensor in (one, other)
        ]
        return torch.equal(*bytes_of)
