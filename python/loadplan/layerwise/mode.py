"""Layerwise mode: the load format of a layer exists only while its bytes arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..targets import Targets
from .hooks import is_deferred, process_of
from .kernel import (
    Kernel,
    ShapeChanged,
    copy_results,
    kernel_tensors,
    put_load_format,
    results,
    storages_of,
    versions,
)
from .plain import ChangedInPlace, Repeated, merged
from .record import ACTIVE, SLOT, LayerRecord, Recorded, materialise

logger = logging.getLogger("loadplan")


@dataclass
class Layer:
    """One layer during a reload."""

    name: str
    module: nn.Module
    record: LayerRecord
    kernel: Kernel
    has_kernel: bool
    process: Callable[[], Any] | None
    deferred: bool
    # Names and load format of what is staged.
    staged: dict[str, Recorded] = field(default_factory=dict)
    is_real: bool = False
    is_done: bool = False  # processed in this reload
    is_left: bool = False  # got nothing


@dataclass
class Active:
    """The reload in progress; lies on the model, which it refers to."""

    layers: list[Layer] = field(default_factory=list)
    # By target name: the tensor on meta that stands for it in plans.
    metas: dict[str, Tensor] = field(default_factory=dict)
    # By `Recorded`, by id: the parameter on meta; one object for all layers that tie it.
    on_meta: dict[int, Tensor] = field(default_factory=dict)
    shared_storages: set[int] = field(default_factory=set)
    # By `Recorded`, by id: what stands for it where nothing was loaded and nothing was there.
    left: dict[int, Tensor] = field(default_factory=dict)
    partial: bool = False


class Layerwise:
    """See docs/layerwise.md."""

    per_name = True

    def __init__(
        self, *, defer_processing: bool = False, max_staging_bytes: int | None = None
    ) -> None:
        self.defer_processing = defer_processing
        self.max_staging_bytes = max_staging_bytes

    def kept(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        """Every kernel tensor, those in plain attributes included."""
        names, tensors = [], []
        for path, module in _module(targets).named_modules():
            for name, tensor in kernel_tensors(Kernel.of(module), path):
                names.append(name)
                tensors.append(tensor)
        return names, tensors

    def start(self, targets: Targets, handle: Any) -> None:
        """Puts the load format on meta in place.  Layers where it is already are left alone."""
        model = _module(targets)
        active = vars(model).setdefault(ACTIVE, Active())
        known = {id(layer.module) for layer in active.layers}
        fresh = [layer for layer in _layers(targets, model) if id(layer.module) not in known]
        if not fresh and not active.layers:
            del vars(model)[ACTIVE]
            raise RuntimeError(
                "nothing is recorded of this model's load format; call "
                "record_metadata_for_reloading(model) before post-processing"
            )
        active.layers += fresh
        _note_shared(active)
        for layer in fresh:
            _put_metas(layer, active)
        active.metas = dict(_staged_names(active, model))
        self._set_staging(active, model, handle)

    def _set_staging(self, active: Active, model: nn.Module, handle: Any) -> None:
        indices = {id(layer.module): index for index, layer in enumerate(active.layers)}
        names: list[str] = []
        layers: list[int] = []
        devices: list[str] = []
        initials: list[Tensor] = []
        for path, module in model.named_modules(remove_duplicate=False):
            index = indices.get(id(module))
            if index is None:
                continue
            # Staged ones, and buffers that are written where they are, before processing.
            for name, recorded in active.layers[index].record.tensors().items():
                names.append(f"{path}.{name}" if path else name)
                layers.append(index)
                devices.append(str(recorded.device))
                initials.append(recorded.initial)
        deferred = [
            i
            for i, layer in enumerate(active.layers)
            if layer.deferred and layer.process is not None
        ]
        bound = -1 if self.max_staging_bytes is None else self.max_staging_bytes
        handle.set_staging(names, layers, devices, initials, deferred, self.defer_processing, bound)

    def lists(self, targets: Targets, *, aliases: bool = True) -> tuple[list[str], list[Tensor]]:
        """The targets as a plan sees them: on meta where they are staged, whatever stands there."""
        active = _active(targets)
        if active is None:
            return targets.lists(aliases=aliases)
        kernel_only = {
            f"{layer.name}.{name}" if layer.name else name
            for layer in active.layers
            for name in (*layer.kernel.parameters, *layer.kernel.buffers)
            if name not in layer.record.tensors() and name not in layer.record.opaque
        }
        names, tensors = [], []
        for name, tensor in zip(*targets.lists(aliases=aliases), strict=True):
            if name not in active.metas and name not in kernel_only:
                names.append(name)
                tensors.append(tensor)
        return names + list(active.metas), tensors + list(active.metas.values())

    def landed(self, targets: Targets, handle: Any) -> None:
        """Processes the layers that are complete."""
        self._take(targets, handle, finishing=False)

    def _take(self, targets: Targets, handle: Any, finishing: bool) -> None:
        active = _active(targets)
        while active is not None:
            group, indices, names, tensors = handle.take_ready_layers(finishing)
            if group < 0:
                return
            layers = [active.layers[i] for i in indices]
            if any(layer.deferred for layer in layers):
                _settle(active, handle, but=layers)
            _make_real(layers, names, tensors, active)
            del tensors
            for layer in sorted(layers, key=lambda layer: layer.deferred):
                _process(layer, active, handle)
            handle.layers_done(group)

    def calling(self, targets: Targets, handle: Any) -> None:
        """Before a call of the loader: makes real what it may write, and nothing else reachable."""
        active = _active(targets)
        if active is None:
            return
        for _, indices, names, tensors in handle.open_layers_for_call():
            _make_real([active.layers[i] for i in indices], names, tensors, active)
        for layer in active.layers:
            if layer.is_done:
                _put_metas(layer, active)

    def called(self, targets: Targets, handle: Any, met: list[str]) -> None:
        active = _active(targets)
        if active is None:
            return
        for layer in active.layers:
            if layer.is_done and layer.has_kernel:
                layer.kernel.put_on(layer.module)
        handle.layers_called(met)

    def complete(self, targets: Targets, handle: Any, partial: bool) -> None:
        """Every byte is there: processes what had to wait, puts the kernel format in place."""
        active = _active(targets)
        if active is None:
            return
        active.partial = partial
        self._take(targets, handle, finishing=True)
        _settle(active, handle)
        for layer in sorted(active.layers, key=lambda layer: not layer.name):
            if layer.is_done or not layer.deferred:
                continue
            if layer.has_kernel and layer.process is not None and _any_done(active):
                layer.kernel.put_on(layer.module)
                _process(layer, active, handle)
            else:
                _leave(layer, active, handle)
        _tell_zeroed(active, handle)

    def finish(self, targets: Targets) -> None:
        vars(_module(targets)).pop(ACTIVE, None)

    def left(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        return [], []

    def abort(self, targets: Targets, outcome: str) -> None:
        """Puts the kernel tensors back; what was staged is lost."""
        if not isinstance(targets.targets, nn.Module):
            return
        active = vars(_module(targets)).pop(ACTIVE, None)
        for layer in active.layers if active is not None else ():
            if layer.has_kernel:
                layer.kernel.put_on(layer.module)
            else:
                _put_metas(layer, active)


def _module(targets: Targets) -> nn.Module:
    if not isinstance(targets.targets, nn.Module):
        raise TypeError(
            "mode='layerwise' needs a module, whose layers it takes apart; the targets are "
            f"{type(targets.targets).__name__}"
        )
    return targets.targets


def _active(targets: Targets) -> Active | None:
    found = vars(_module(targets)).get(ACTIVE)
    return found if isinstance(found, Active) else None


def _layers(targets: Targets, model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        record = vars(module).get(SLOT)
        if record is None:
            continue
        kernel = Kernel.of(module)
        kept = kernel.kept_buffers(record)
        yield Layer(
            name=name,
            module=module,
            record=record,
            kernel=kernel,
            has_kernel=kernel.has_memory(),
            process=process_of(targets, module),
            # The model's own hook comes last of all.
            deferred=is_deferred(targets, module) or (module is model and not record.tensors()),
            staged={k: v for k, v in record.tensors().items() if k not in kept},
        )


def _note_shared(active: Active) -> None:
    seen: set[int] = set()
    for layer in active.layers:
        mine = storages_of(layer.kernel)
        active.shared_storages |= mine & seen
        seen |= mine


def _staged_names(active: Active, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    by_module = {id(layer.module): layer for layer in active.layers}
    for path, module in model.named_modules(remove_duplicate=False):
        layer = by_module.get(id(module))
        for name, recorded in layer.staged.items() if layer is not None else ():
            yield (f"{path}.{name}" if path else name), recorded.meta


def _put_metas(layer: Layer, active: Active) -> None:
    for recorded in layer.staged.values():
        if id(recorded) not in active.on_meta:
            made = recorded.make(recorded.meta.detach(), layer.module)
            active.on_meta[id(recorded)] = made
    put_load_format(layer.module, layer.record, layer.kernel, active.on_meta)


def _make_real(
    layers: list[Layer], names: list[str], tensors: list[Tensor], active: Active
) -> None:
    """Puts staged tensors on their layers.  A parameter of two layers is one object on both."""
    real = dict(zip(names, tensors, strict=True))
    made: dict[int, Tensor] = {}
    for layer in layers:
        if layer.is_real:
            continue
        for name, recorded in layer.staged.items():
            if id(recorded) not in made:
                full = f"{layer.name}.{name}" if layer.name else name
                made[id(recorded)] = recorded.make(real[full], layer.module)
        put_load_format(layer.module, layer.record, layer.kernel, made)
        layer.is_real = True


def _process(layer: Layer, active: Active, handle: Any) -> None:
    """Post-processing of a layer whose tensors are real, and its results into the kept ones."""
    try:
        if layer.has_kernel:
            # Also processing itself may write some of them.
            items = list(kernel_tensors(layer.kernel, layer.name))
            handle.layers_overwrite([name for name, _ in items], [tensor for _, tensor in items])
        # A tensor that processing transforms is, before it, what it was at first.
        plain = vars(layer.module)
        for name, then in layer.record.plain.items():
            if name in layer.kernel.plain:
                plain[name] = merged(layer.kernel.plain[name][1], then)
        before = versions(layer.module, layer.kernel)
        written = _run_process(layer)
        if layer.has_kernel:
            copies = results(layer.module, layer.kernel, before, written)
            copy_results(copies, active.shared_storages)
            layer.kernel.put_on(layer.module)
    except BaseException as error:
        words = (
            str(error)
            if isinstance(error, (ShapeChanged, ChangedInPlace))
            else f"{type(error).__name__}: {error}"
        )
        what = f"layer `{layer.name}` ({type(layer.module).__name__})"
        try:
            handle.fail(f"post-processing of {what} failed: {words}")
        except RuntimeError as failure:
            if isinstance(error, Exception):
                raise failure from error
        raise
    layer.is_done = True


def _run_process(layer: Layer) -> set[int]:
    """Returns the storages of plain attributes that it wrote in place."""
    if layer.process is None:
        return set()
    with torch.no_grad():
        repeated = Repeated(layer.record.memories)
        try:
            with _default_device(layer.record.default_device):
                layer.process()
            return repeated.end()
        except BaseException:
            repeated.put_back()
            raise


def _default_device(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device == torch.get_default_device() else device


def _any_done(active: Active) -> bool:
    return any(layer.is_done for layer in active.layers)


def _settle(active: Active, handle: Any, but: list[Layer] | None = None) -> None:
    """Before deferred layers: all others have their kernel tensors, also those that got nothing.

    ``but``: layers that are processed together with a deferred one.
    """
    those = {id(layer) for layer in but or ()}
    rest = [
        layer
        for layer in active.layers
        if not (layer.is_done or layer.deferred or id(layer) in those)
    ]
    for layer in rest:
        if layer.staged and not layer.is_left:
            _leave(layer, active, handle)
    # Layers without tensors to load derive theirs from others.
    for layer in rest:
        if layer.staged or layer.is_left:
            continue
        if layer.process is not None and _any_done(active):
            layer.kernel.put_on(layer.module)
            _process(layer, active, handle)
        else:
            _leave(layer, active, handle)


def _leave(layer: Layer, active: Active, handle: Any) -> None:
    """A layer that got nothing."""
    layer.is_left = True
    if layer.has_kernel:
        layer.kernel.put_on(layer.module)
        has_parameters = any(name in layer.record.parameters for name in layer.staged)
        if has_parameters and not active.partial:
            logger.warning(
                "layer `%s` (%s): nothing was loaded; its kernel tensors stay as they were",
                layer.name,
                type(layer.module).__name__,
            )
        return
    for recorded in layer.staged.values():
        if id(recorded) not in active.left:
            active.left[id(recorded)] = recorded.make(materialise(recorded), layer.module)
    put_load_format(layer.module, layer.record, layer.kernel, active.left)
    _process(layer, active, handle)


def _tell_zeroed(active: Active, handle: Any) -> None:
    """What no name wrote and nothing was known of: padding, or a parameter that did not come."""
    told = active.layers[0].record.told
    names, sizes = handle.zeroed_bytes()
    texts = [f"`{n}` ({size} bytes)" for n, size in zip(names, sizes, strict=True) if n not in told]
    told.update(names)
    if texts:
        logger.warning(
            "bytes that no name writes, and that were not recorded because they are many, are zero "
            "in load format: %s",
            ", ".join(texts),
        )
