"""Proof on the live model: the loader and the plan leave the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TypeAlias

import torch
from torch import Tensor

from ._modes import in_kernel_format
from ._places import Places
from ._rebinding import Bindings, storage_of
from ._sessions import session_of
from .plan import LoadPlan, reload_mode
from .reload import abort_reload, finish_reload, load_planned, start_reload
from .targets import Model, Targets, as_targets

Pairs: TypeAlias = Iterable[tuple[str, Tensor]]
Weights: TypeAlias = Mapping[str, Tensor] | Pairs | Callable[[], Pairs]

# Ranges of one storage that are listed; the rest is counted.
_MAX_RANGES = 8


@dataclass(frozen=True)
class Difference:
    """Bytes of a storage that the plan leaves otherwise than the loader.

    ``targets`` are the names that show the storage; ``ranges`` are half-open, in bytes of the
    storage, the first few of them; ``nbytes`` counts all bytes that differ.
    """

    targets: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    nbytes: int


def verify(model: Model, plan: LoadPlan, weights: Weights) -> tuple[Difference, ...]:
    """Runs the loader, then the plan, over the same weights, and lists what differs.

    In place, since loaders close over live parameters: pause the engine.  The bytes of before are
    put back, and so are attributes of modules, also where the loader or the plan raises.  Old and
    eager bytes lie in temporary files, so that memory is needed for two copies of the largest
    storage, not of the model.

    ``weights`` is used twice: a mapping, a list of pairs, or a function that gives pairs.  The
    loader gets each contiguous, on the device for which it was declared.

    Raises what the loader or the update raises, RuntimeError for a model that is not idle.
    """
    targets = as_targets(model)
    if reload_mode() != "direct" or in_kernel_format(targets):
        raise RuntimeError(
            "`verify` runs the loader on the live tensors, which are not in load format in mode "
            "layerwise; compare with a fresh model that is loaded and processed"
        )
    if session_of(model).state != "idle":
        raise RuntimeError("`verify` needs an idle model; finish or abort the reload first")
    pairs = _repeatable(weights)
    storages, places, bindings = _storages(targets, plan), Places(targets), Bindings(targets)
    with tempfile.TemporaryFile() as before, tempfile.TemporaryFile() as eager:
        _save(storages, before)
        try:
            _load_eagerly(targets, _as_declared(targets, plan, pairs()))
            places.keep(targets)  # a loader that moves a tensor goes on: the plan finds it in place
            places.put_back()
            bindings.restore()
            _save(storages, eager)
            _put_back(storages, before)
            start_reload(model)
            load_planned(model, plan, pairs())
            finish_reload(model)
            return tuple(_differences(storages, eager))
        finally:
            session = session_of(model)
            if session.state == "active":
                abort_reload(model)
            places.put_back()
            bindings.restore()
            _put_back(storages, before)
            # Every byte is as before: nothing is left of a session that failed.
            if session.state != "idle":
                session.forget()


def _repeatable(weights: Weights) -> Callable[[], Pairs]:
    if callable(weights):
        return weights
    if isinstance(weights, Mapping):
        return lambda: iter(weights.items())
    if isinstance(weights, Iterator):
        raise TypeError(
            "`weights` is an iterator, which can be used once; `verify` loads twice: give a "
            "mapping, a list of pairs, or a function that returns pairs"
        )
    return lambda: iter(weights)


def _load_eagerly(targets: Targets, pairs: Pairs) -> None:
    if targets.restore is not None:
        for layer in targets.layers():
            targets.restore(layer)
    targets.load_weights(pairs)
    if targets.process is not None:
        for layer in targets.layers():
            targets.process(layer)


def _as_declared(targets: Targets, plan: LoadPlan, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
    """Each tensor anew, since loaders may write into it: contiguous, and where it was declared.

    That is what a plan takes an eager call to get, whatever strides an update sends.
    """
    default = next((t.device for t in targets.named().values()), None)
    device_of = {meta.name: meta.device or default for meta in plan._metas}
    for name, tensor in pairs:
        device = device_of.get(name, default)
        given = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        yield name, given.copy_(tensor.detach())


def _storages(targets: Targets, plan: LoadPlan) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each storage once, as bytes, with the names that show it."""
    names: dict[int, list[str]] = {}
    views: dict[int, Tensor] = {}
    for name, tensor in targets.named().items():
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            storage = tensor.detach().untyped_storage()
            if storage.device.type == "meta":
                raise RuntimeError(f"`{name}` is on meta and has no bytes to compare")
            names.setdefault(storage._cdata, []).append(name)
            if storage._cdata not in views:
                views[storage._cdata] = _bytes_of(storage)
    for name, mirror in zip(*plan._handle.mirrors(), strict=True):
        names.setdefault(storage_of(mirror), []).append(name)
        views.setdefault(storage_of(mirror), mirror)
    # Of these a loader may change what no plan knows, where all its names go through it.
    for path, layer in targets.named_layers().items() if targets.is_module() else ():
        for key, value in vars(layer).items():
            storage_id = storage_of(value) if isinstance(value, Tensor) else 0
            if storage_id and storage_id not in views and value.device.type != "meta":
                names[storage_id] = [f"{path}.{key}" if path else key]
                views[storage_id] = _bytes_of(value.untyped_storage())
    return [(tuple(names[key]), view) for key, view in views.items()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _save(storages: list[tuple[tuple[str, ...], Tensor]], file: IO[bytes]) -> None:
    file.seek(0)
    for _, view in storages:
        file.write(view.cpu().numpy().data)


def _read(file: IO[bytes], nbytes: int) -> Tensor:
    buffer = bytearray(file.read(nbytes))
    return (
        torch.frombuffer(buffer, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    )


def _put_back(storages: list[tuple[tuple[str, ...], Tensor]], file: IO[bytes]) -> None:
    file.seek(0)
    for _, view in storages:
        view.copy_(_read(file, view.numel()))


def _differences(
    storages: list[tuple[tuple[str, ...], Tensor]], eager: IO[bytes]
) -> Iterator[Difference]:
    eager.seek(0)
    for names, view in storages:
        differs = _read(eager, view.numel()) != view.cpu()
        nbytes = int(differs.sum())
        if nbytes:
            yield Difference(names, _ranges(differs), nbytes)


def _ranges(differs: Tensor) -> tuple[tuple[int, int], ...]:
    edges = torch.diff(differs.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8))
    starts = (edges == 1).nonzero().flatten()[:_MAX_RANGES].tolist()
    stops = (edges == -1).nonzero().flatten()[:_MAX_RANGES].tolist()
    return tuple(zip(starts, [*stops, differs.numel()][: len(starts)], strict=True))
