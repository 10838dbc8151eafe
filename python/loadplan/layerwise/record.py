"""What a layer's tensors are in load format, kept while they are in kernel format.

Kept on the layer itself, without a reference to it: a record never outlives its model.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .plain import Memory, all_bytes, copied, inner

# Where a record lies on its layer.
SLOT = "_loadplan_layer"
# Where the reload in progress lies on its model.
ACTIVE = "_loadplan_reload"

SLOTS = ("_parameters", "_buffers", "_modules", SLOT, ACTIVE)

# A tensor of so many bytes is kept whole; of a larger one only a value that all elements share.
_KEPT_NBYTES = 16 << 10
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Recorded:
    """One tensor in load format.

    ``meta`` has its layout and no attributes; recorded tensors that shared bytes share a storage.
    ``initial`` is what it holds where nothing was loaded: one element for all, or all elements;
    empty where that is not known.
    """

    meta: Tensor
    cls: type
    attributes: dict[str, Any]
    requires_grad: bool
    device: torch.device
    initial: Tensor

    def make(self, data: Tensor, layer: nn.Module) -> Tensor:
        """The tensor over ``data``, with class and attributes, for ``layer``."""
        made = data
        if self.cls is not Tensor:
            made = torch.Tensor._make_subclass(self.cls, data, self.requires_grad)
        made.__dict__.update({key: _bind(v, layer) for key, v in self.attributes.items()})
        return made


@dataclass
class LayerRecord:
    """The load format of one layer.  A parameter or buffer that is None stays None."""

    parameters: dict[str, Recorded | None] = field(default_factory=dict)
    buffers: dict[str, Recorded | None] = field(default_factory=dict)
    non_persistent: set[str] = field(default_factory=set)
    # Buffers that show bytes of a parameter, of this layer or of another.
    views: set[str] = field(default_factory=set)
    # Names that were quantised or sparse from the start: left as they are.
    opaque: set[str] = field(default_factory=set)
    # Plain attributes that are or hold tensors: which, and what these held.
    plain: dict[str, Any] = field(default_factory=dict)
    memories: list[Memory] = field(default_factory=list)
    default_device: torch.device = torch.device("cpu")
    # On the first layer of a model: targets whose zeroed bytes have been told.
    told: set[str] = field(default_factory=set)

    def tensors(self) -> dict[str, Recorded]:
        both = {**self.parameters, **self.buffers}
        return {name: recorded for name, recorded in both.items() if recorded is not None}


@dataclass(frozen=True)
class _OwnMethod:
    """Stands for a bound method of the layer whose record this is."""

    name: str


class _OwnLayer:
    """Stands for the layer whose record this is."""


def _unbind(value: Any, layer: nn.Module) -> Any:
    if value is layer:
        return _OwnLayer()
    if isinstance(value, types.MethodType) and value.__self__ is layer:
        return _OwnMethod(value.__name__)
    return value


def _bind(value: Any, layer: nn.Module) -> Any:
    if isinstance(value, _OwnLayer):
        return layer
    return getattr(layer, value.name) if isinstance(value, _OwnMethod) else value


def record_metadata_for_reloading(model: nn.Module) -> None:
    """Records every layer's load format: call it before post-processing, once for a model.

    Parameters and buffers: class, attributes (``weight_loader``), shape, strides, dtype, device
    and, where it takes little room, what they hold when nothing was loaded.  A second call replaces
    the record: after post-processing it takes the kernel format for the load format.
    """
    owners = [(layer, *_own(layer)) for layer in model.modules()]
    found = [
        tensor
        for _, parameters, buffers in owners
        for tensor in (*parameters.values(), *buffers.values())
        if tensor is not None and _is_plain(tensor)
    ]
    metas = _metas(found)
    of_parameters = {
        metas[id(tensor)].untyped_storage()._cdata
        for _, parameters, _ in owners
        for tensor in parameters.values()
        if id(tensor) in metas
    }
    plain = _plain_attributes(owners)
    made: dict[int, Recorded] = {}
    for layer, parameters, buffers in owners:
        record = LayerRecord(
            non_persistent=set(layer._non_persistent_buffers_set),
            plain=plain[id(layer)][0],
            memories=plain[id(layer)][1],
            default_device=torch.get_default_device(),
        )
        for ours, theirs in ((record.parameters, parameters), (record.buffers, buffers)):
            for name, tensor in theirs.items():
                if tensor is None:
                    ours[name] = None
                elif _is_plain(tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _recorded(tensor, metas[id(tensor)], layer)
                    ours[name] = made[id(tensor)]
                    if metas[id(tensor)].untyped_storage()._cdata in of_parameters:
                        record.views.add(name)
                else:
                    record.opaque.add(name)
        record.views -= parameters.keys()
        layer.__dict__[SLOT] = record


def _plain_attributes(
    owners: list[tuple[nn.Module, dict[str, Tensor | None], dict[str, Tensor | None]]],
) -> dict[int, tuple[dict[str, Any], list[Memory]]]:
    """By layer, by id: those that are or hold tensors, and their memory."""
    # What parameters and buffers show is theirs: a loader writes it.
    loaded = {
        key
        for _, *slots in owners
        for slot in slots
        for tensor in slot.values()
        for _, part in inner(tensor)
        if (key := _storage_of(part)) is not None
    }
    found: dict[int, dict[str, Any]] = {}
    of_layers: Counter[int] = Counter()
    shown: dict[int, dict[int, tuple[str, list[Tensor]]]] = {}
    for layer, *_ in owners:
        values = found[id(layer)] = {}
        mine = shown[id(layer)] = {}
        for name, value in vars(layer).items():
            keys = {path: _storage_of(tensor) for path, tensor in inner(value)}
            if name in SLOTS or not keys:
                continue
            if not isinstance(value, Tensor) and not loaded.isdisjoint(keys.values()):
                continue  # it would keep what was loaded
            values[name] = copied(value)
            for path, tensor in inner(value):
                key = keys[path]
                if key is not None and key not in loaded:
                    mine.setdefault(key, (name + path, []))[1].append(tensor)
        of_layers.update(mine.keys())
    return {
        layer: (
            found[layer],
            [_memory(*item, of_layers[key] > 1) for key, item in shown[layer].items()],
        )
        for layer in found
    }


def _storage_of(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_meta or is_lazy(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def _memory(name: str, tensors: list[Tensor], is_shared: bool) -> Memory:
    raw = all_bytes(tensors[0])
    itemsize = tensors[0].itemsize
    # Words of integers, so that no bit of a NaN is lost.
    flat = raw.view(
        _INTS[itemsize] if itemsize in _INTS and not raw.numel() % itemsize else raw.dtype
    )
    if is_shared:
        return Memory(name, tensors, flat, flat.new_empty(0), "that other layers have as well")
    initial = _initial(flat)
    unknown = "" if initial.numel() else f"of {raw.numel()} bytes, too many to keep"
    return Memory(name, tensors, flat, initial, unknown)


def _own(layer: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    return dict(layer._parameters), dict(layer._buffers)


def _is_plain(tensor: Tensor) -> bool:
    """Others (quantised wrappers, sparse) have no bytes that a loader could write one by one."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not is_lazy(tensor)
    )


def _recorded(tensor: Tensor, meta: Tensor, layer: nn.Module) -> Recorded:
    return Recorded(
        meta=meta,
        cls=type(tensor),
        attributes={key: _unbind(value, layer) for key, value in vars(tensor).items()},
        requires_grad=tensor.requires_grad,
        device=torch.get_default_device() if tensor.is_meta else tensor.device,
        initial=_initial(tensor),
    )


def _metas(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """For each tensor one on meta with its layout; those that share bytes share a storage."""
    spans: dict[int, list[tuple[Any, Any, Tensor]]] = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            extent = sum((n - 1) * step for n, step in steps) + 1 if tensor.numel() else 0
            start = tensor.storage_offset() * tensor.itemsize
            key = tensor.untyped_storage()._cdata
            spans.setdefault(key, []).append((start, start + extent * tensor.itemsize, tensor))
        metas: dict[int, Tensor] = {}
        for shown in spans.values():
            shown.sort(key=lambda span: span[:2])
            first = 0
            for i in range(1, len(shown) + 1):
                stop = max(span[1] for span in shown[first:i])
                if i == len(shown) or shown[i][0] >= stop:
                    _add_metas(metas, shown[first:i], stop)
                    first = i
    return metas


def _add_metas(metas: dict[int, Tensor], shown: list[tuple[int, int, Tensor]], stop: int) -> None:
    base = shown[0][0]
    if any((start - base) % tensor.itemsize for start, _, tensor in shown):
        base -= base % 16
    storage = torch.empty(stop - base, dtype=torch.uint8, device="meta").untyped_storage()
    for start, _, tensor in shown:
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        offset = (start - base) // tensor.itemsize
        metas[id(tensor)] = meta.set_(storage, offset, tensor.shape, tensor.stride())


def _initial(tensor: Tensor) -> Tensor:
    unknown = torch.empty(0, dtype=tensor.dtype)
    if tensor.is_meta or not tensor.numel():
        return unknown
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if plain.numel() * plain.itemsize <= _KEPT_NBYTES:
            return plain.clone(memory_format=torch.contiguous_format)
        if plain.itemsize not in _INTS:
            return unknown
        bits = plain.view(_INTS[plain.itemsize])
        first = bits[(0,) * bits.dim()]
        # A row first: what is loaded or random ends here.
        row = bits[(0,) * (bits.dim() - 1)][:64]
        for part in (row, bits):
            if not torch.equal(part, first.expand_as(part)):
                return unknown
        return plain[(0,) * plain.dim()].clone().reshape(1)


def materialise(recorded: Recorded) -> Tensor:
    """Memory for a tensor that nothing is loaded into."""
    with torch.no_grad():
        storage = recorded.meta.untyped_storage()
        flat = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=recorded.device)
        real = torch.empty(0, dtype=recorded.meta.dtype, device=recorded.device)
        meta = recorded.meta
        real.set_(flat.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride())
        if recorded.initial.numel() == 1:
            real.fill_(recorded.initial.reshape(()))
        elif recorded.initial.numel():
            real.copy_(recorded.initial.reshape(real.shape))
    return real
