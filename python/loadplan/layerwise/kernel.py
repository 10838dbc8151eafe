"""A layer's tensors in kernel format: kept during a reload, filled from what processing makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .plain import all_bytes, copied, inner
from .record import SLOTS, LayerRecord, Recorded


@dataclass
class Kernel:
    """What stands on a layer between reloads.

    ``plain``: attributes that are or hold tensors, and copies of what containers held.
    """

    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    non_persistent: set[str]
    plain: dict[str, tuple[Any, Any]]

    @classmethod
    def of(cls, layer: nn.Module) -> Kernel:
        return cls(
            dict(layer._parameters),
            dict(layer._buffers),
            set(layer._non_persistent_buffers_set),
            {
                name: (value, copied(value))
                for name, value in vars(layer).items()
                if name not in SLOTS and any(inner(value))
            },
        )

    def has_memory(self) -> bool:
        """False for a model that was made on meta and never loaded."""
        found = (*self.parameters.values(), *self.buffers.values())
        return not any(tensor.is_meta for tensor in found if tensor is not None)

    def put_on(self, layer: nn.Module) -> None:
        _replace(layer._parameters, self.parameters)
        _replace(layer._buffers, self.buffers)
        _replace_set(layer, self.non_persistent)
        for name, (value, held) in self.plain.items():
            _refill(value, held)
            vars(layer)[name] = value

    def kept_buffers(self, record: LayerRecord) -> set[str]:
        """Buffers that stay where they are: still in load format, no view of a parameter."""
        kept = set()
        for name, tensor in self.buffers.items():
            recorded = record.buffers.get(name)
            if tensor is None or recorded is None:
                if name in record.buffers and tensor is None and recorded is None:
                    kept.add(name)
            elif name not in record.views and _same_layout(tensor, recorded):
                kept.add(name)
        return kept


def _replace(mapping: dict[str, Any], by: dict[str, Tensor | None]) -> None:
    mapping.clear()
    mapping.update(by)


def _replace_set(layer: nn.Module, names: set[str]) -> None:
    layer._non_persistent_buffers_set.clear()
    layer._non_persistent_buffers_set.update(names)


def _same_layout(tensor: Tensor, recorded: Recorded) -> bool:
    meta = recorded.meta
    return bool(
        not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_meta
        and tensor.shape == meta.shape
        and tensor.dtype == meta.dtype
        and tensor.stride() == meta.stride()
    )


def in_load_format(kernel: Kernel, record: LayerRecord) -> bool:
    """Whether the tensors on a layer are laid out as they were recorded."""
    for now, then in ((kernel.parameters, record.parameters), (kernel.buffers, record.buffers)):
        if now.keys() - record.opaque != then.keys():
            return False
        for name, recorded in then.items():
            tensor = now[name]
            if tensor is None or recorded is None:
                if tensor is not None or recorded is not None:
                    return False
            elif not tensor.is_meta and not _same_layout(tensor, recorded):
                return False
    return True


def put_load_format(
    layer: nn.Module, record: LayerRecord, kernel: Kernel, made: dict[int, Tensor]
) -> None:
    """``made``: the tensor for each `Recorded`, by id; one that is missing keeps its buffer."""
    parameters = {
        name: None if recorded is None else made[id(recorded)]
        for name, recorded in record.parameters.items()
    }
    kept = kernel.kept_buffers(record)
    buffers: dict[str, Tensor | None] = {}
    for name, recorded in record.buffers.items():
        if name in kept:
            buffers[name] = kernel.buffers[name]
        else:
            buffers[name] = None if recorded is None else made[id(recorded)]
    parameters.update({k: v for k, v in kernel.parameters.items() if k in record.opaque})
    buffers.update({k: v for k, v in kernel.buffers.items() if k in record.opaque})
    _replace(layer._parameters, parameters)
    _replace(layer._buffers, buffers)
    _replace_set(layer, record.non_persistent)
    for name in (*parameters, *buffers):
        vars(layer).pop(name, None)


def _refill(value: Any, held: Any) -> None:
    """Puts back what a container held."""
    if type(value) is list:
        value[:] = [_refilled(*pair) for pair in zip_longest(value[: len(held)], held)]
    elif type(value) is dict:
        kept = {key: _refilled(value.get(key), item) for key, item in held.items()}
        value.clear()
        value.update(kept)


def _refilled(value: Any, held: Any) -> Any:
    if type(value) is type(held) and type(held) in (list, dict):
        _refill(value, held)
        return value
    return held


class ShapeChanged(RuntimeError):
    """Processing made something that does not fit the kept kernel tensors."""


@dataclass
class _Copy:
    to: Tensor
    source: Tensor


def results(
    layer: nn.Module, kernel: Kernel, before: dict[str, Versions], written: set[int]
) -> list[_Copy]:
    """What processing left on ``layer``, paired with the kept tensors; nothing is written.

    ``before``: plain attributes as they were before processing.  ``written``: storages that it
    wrote, also where no version says so (`tensor.data`).  Raises ShapeChanged, naming both
    sides, where something does not fit.
    """
    copies: list[_Copy] = []
    for name, kept in {**kernel.parameters, **kernel.buffers}.items():
        result = _result_of(layer, name)
        if kept is None and result is None:
            continue
        if kept is None or result is None:
            have, lack = ("processing", "reload") if kept is None else ("kept", "processing")
            raise ShapeChanged(f"`{name}`: {have} has a tensor where {lack} has none")
        copies += _pairs(name, kept, result)
    for name in (*layer._parameters, *layer._buffers):
        if name not in kernel.parameters and name not in kernel.buffers:
            if name in kernel.plain:
                continue
            raise ShapeChanged(f"processing made `{name}`, which the kept kernel tensors have not")
    for name, (_, held) in kernel.plain.items():
        result = _result_of(layer, name)
        if _versions(result) != before.get(name) or written & _storages(result):
            copies += _pairs(name, held, result)
    return copies


def _result_of(layer: nn.Module, name: str) -> Any:
    for mapping in (vars(layer), layer._parameters, layer._buffers):
        if name in mapping:
            return mapping[name]
    return None


# Each tensor of an attribute and how often it was written.
Versions: TypeAlias = "list[tuple[str, int, int]]"


def versions(layer: nn.Module, kernel: Kernel) -> dict[str, Versions]:
    """Of the plain attributes, before processing."""
    return {name: _versions(vars(layer).get(name)) for name in kernel.plain}


def _versions(value: Any) -> Versions:
    return [(path, id(tensor), tensor._version) for path, tensor in inner(value)]


def _pairs(name: str, kept: Any, result: Any) -> Iterator[_Copy]:
    ours, theirs = dict(inner(kept)), dict(inner(result))
    if ours.keys() != theirs.keys():
        raise ShapeChanged(
            f"`{name}`: processing made {type(result).__name__} with tensors {sorted(theirs)}, the "
            f"kept one is {type(kept).__name__} with {sorted(ours)}"
        )
    for path, to in ours.items():
        source = theirs[path]
        if to.shape != source.shape or to.dtype != source.dtype:
            raise ShapeChanged(
                f"`{name}{path}`: processing made {list(source.shape)} {source.dtype}, the kept "
                f"kernel tensor is {list(to.shape)} {to.dtype}; a kernel tensor cannot change its "
                "shape or dtype in a reload"
            )
        yield _Copy(to, source)


def copy_results(copies: list[_Copy], shared: set[int]) -> None:
    """``shared``: kept storages that other layers show too."""
    seen: set[tuple[int, int]] = set()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for copy in copies:
            to, source = copy.to.detach(), copy.source.detach()
            whose = to.untyped_storage()._cdata
            key = (whose, source.untyped_storage()._cdata)
            if key[0] == key[1]:
                if not _same_place(to, source):
                    to.copy_(source.clone())
            elif whose not in shared and _same_storage_layout(to, source):
                if key not in seen:
                    all_bytes(to).copy_(all_bytes(source))
                    seen.add(key)
            else:
                _copy_elements(to, source)


def _same_place(a: Tensor, b: Tensor) -> bool:
    return bool(a.storage_offset() == b.storage_offset() and a.stride() == b.stride())


def _same_storage_layout(a: Tensor, b: Tensor) -> bool:
    """Then gaps and padding, too, are as processing left them."""
    return _same_place(a, b) and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


def _copy_elements(to: Tensor, source: Tensor) -> None:
    """Also where the kept tensor repeats itself (``expand``)."""
    for dim, (size, stride) in enumerate(zip(to.shape, to.stride(), strict=True)):
        if size > 1 and stride == 0:
            first = source.narrow(dim, 0, 1)
            if source.stride(dim) != 0 and not torch.equal(source, first.expand_as(source)):
                raise ShapeChanged(
                    f"the kept kernel tensor repeats dimension {dim} and what processing made does "
                    "not"
                )
            to, source = to.narrow(dim, 0, 1), first
    to.copy_(source)


def kernel_tensors(kernel: Kernel, path: str) -> Iterator[tuple[str, Tensor]]:
    """Everything of a layer that has memory, by names that begin with that of the layer."""
    held = {name: copy for name, (_, copy) in kernel.plain.items()}
    for name, value in (*kernel.parameters.items(), *kernel.buffers.items(), *held.items()):
        for part, tensor in inner(value):
            yield f"{path}.{name}{part}" if path else f"{name}{part}", tensor.detach()


def storages_of(kernel: Kernel) -> set[int]:
    plain = (held for _, held in kernel.plain.values())
    found = (*kernel.parameters.values(), *kernel.buffers.values(), *plain)
    return set().union(*map(_storages, found))


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for _, tensor in inner(value)}
