"""Reload sessions: what an engine calls around an update."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._direct import HookError
from ._fallback_call import call_loader
from ._modes import make_mode
from ._sessions import Session, session_of
from ._steps import fail, landed, run_hooks, step
from ._streams import record_event
from .plan import LoadPlan, reload_mode
from .targets import Model, as_targets

_DictItems: type = type({}.items())


@dataclass(frozen=True)
class Coverage:
    """Bytes of a target that were written, and all that it has."""

    nbytes: int
    total_nbytes: int


@dataclass(frozen=True)
class UndefinedBytes:
    """Bytes of a target that a failed update has written, or may have.

    ``ranges`` hold all of them, half-open, in bytes of the storage: the first few, gaps of strided
    regions included.
    """

    nbytes: int
    total_nbytes: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Receipt:
    """What an update did: names in order of arrival, bytes written, seconds since its start.

    ``coverage`` tells for every target how many of its bytes were written.
    """

    names: tuple[str, ...]
    nbytes: int
    seconds: float
    coverage: Mapping[str, Coverage]
    # Layerwise: the most that was staged, and held on the host for want of room, at one time.
    peak_staging_nbytes: int = 0
    peak_held_nbytes: int = 0


@dataclass(frozen=True)
class ReloadState:
    """``state`` is idle, active or failed, ``since`` when (seconds since 1970).

    ``landed`` are the names of the current or failed update that have landed; ``undefined``, by
    target, the bytes that failed updates may have left half written; ``error`` is what failed the
    last update, also where the old bytes of an atomic one are back.
    """

    state: str
    since: float
    landed: tuple[str, ...]
    undefined: Mapping[str, UndefinedBytes]
    error: str


def start_reload(
    model: Model,
    *,
    mode: str | None = None,
    atomic: bool = False,
    required: Iterable[str] = (),
    defer_processing: bool = False,
    max_staging_bytes: int | None = None,
) -> None:
    """Opens an update of ``model``.

    ``mode`` is ``"direct"``, or what the environment says in ``LOADPLAN_RELOAD_MODE``.
    ``"layerwise"`` is for layers whose kernel format is not their load format; call
    `record_metadata_for_reloading` before post-processing.  ``defer_processing`` processes all
    layers at the end; ``max_staging_bytes`` bounds what is staged at one time.

    ``required``: patterns of target names; the update is refused when one of them is not covered
    by bytes: before the first write where the plan shows it, after the call of the loader where
    only that does.  A pattern that names no target is an error of the first call with the plan.

    ``atomic``: every byte that the update overwrites is kept until `finish_reload`.  Whatever
    fails, and on `abort_reload`, the old bytes come back and the model is idle.  Up to
    ``LOADPLAN_ATOMIC_MEMORY`` bytes (default: a quarter of the machine's memory) are kept in host
    memory, those after them in an unnamed file in the directory for temporary files.
    """
    if isinstance(required, str):
        raise TypeError(f"`required` is the string {required!r}; expected a list of patterns")
    targets = as_targets(model)
    session = session_of(model, create=True)
    memory = _undo_memory()
    with step(session, "start_reload"):
        chosen = make_mode(
            reload_mode(mode),
            session.mode,
            defer_processing=defer_processing,
            max_staging_bytes=max_staging_bytes,
        )
        patterns = [*targets.required, *required]
        session.start(model, chosen, patterns, atomic, memory, tempfile.gettempdir())
        try:
            if atomic:
                session.keep_places(targets)
                session.handle.before_hook(*chosen.kept(targets))
            chosen.start(targets, session.handle)
        except HookError as error:
            fail(session, error)
        except BaseException:
            # The mode refuses these targets.
            if session.state == "active":
                session.handle.abort()
            raise


def _undo_memory() -> int:
    value = os.environ.get("LOADPLAN_ATOMIC_MEMORY", "")
    if not value:
        return -1
    if not value.isdigit():
        raise ValueError(f"LOADPLAN_ATOMIC_MEMORY is {value!r}; expected a number of bytes")
    return int(value)


def load_planned(
    model: Model, plan: LoadPlan, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> torch.cuda.Event | None:
    """Lands checkpoint tensors as ``plan`` says; may be called again, bucket by bucket.

    Each tensor is used before the next one is asked for, so that a sender may reuse its memory.
    Targets on a GPU are written on its current stream; the event that is returned fires when the
    device has read everything, for senders that reuse memory on other streams or from the host.

    Of a list, a tuple or a dict the names that go through the loader come first: what only the
    loader can say fails before other names have landed.

    The first call refuses, with the reload still active and nothing written, a target that has
    moved or changed, a changed premise or placement, an uncovered ``required`` target
    (RuntimeError).  A name that is undeclared, comes twice or has another shape or dtype writes
    nothing and fails the reload (ValueError).
    """
    session = session_of(model)
    call = "load_planned"
    pairs: Iterable[tuple[str, Tensor]]
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    with step(session, call):
        session.begin(plan)
    mode, handle, targets = session.mode, session.handle, session.targets
    # Other collections may make each tensor as it is asked for, all in one memory.
    if isinstance(pairs, (list, tuple, _DictItems)) and not mode.per_name:
        _load_together(session, plan, pairs, call)
    else:
        deliver = handle.deliver
        for item in pairs:
            name, tensor = checked_item(item)
            # Not around the sender, which may wait for another thread.
            with step(session, call):
                deliver(name, tensor)
                if mode.per_name:
                    run_hooks(session, lambda: mode.landed(targets, handle))
    with step(session, call):
        landed(session)
    return record_event(session)


def _load_together(
    session: Session, plan: LoadPlan, pairs: Iterable[tuple[str, Tensor]], call: str
) -> None:
    names: list[str] = []
    tensors: list[Tensor] = []
    try:
        for name, tensor in pairs:
            names.append(name)
            tensors.append(tensor)
    except (TypeError, ValueError):
        for item in pairs:
            checked_item(item)
        raise
    if not all(issubclass(kind, Tensor) for kind in set(map(type, tensors))):
        for item in zip(names, tensors, strict=True):
            checked_item(item)
    positions = plan._positions(names)
    if positions is None:
        for item in zip(names, tensors, strict=True):
            checked_item(item)
    with step(session, call):
        handle = session.handle
        if plan.has_fallbacks:
            falling = [i for i, name in enumerate(names) if name in plan._fallbacks]
            if falling:
                handle.deliver_fallbacks([names[i] for i in falling], [tensors[i] for i in falling])
            if handle.fallback_call_ready():
                call_loader(session)
        if positions is None:
            handle.deliver_planned(names, tensors)  # says which name is none of the plan's
        else:
            handle.deliver_positions(positions, tensors)


def checked_item(item: Any) -> tuple[str, Tensor]:
    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise TypeError(
            f"the weights give {type(item).__name__}; expected pairs of a name and a tensor"
        ) from None
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` came with {type(tensor).__name__}; expected pairs of a name and a tensor"
        )
    return name, tensor


def finish_reload(model: Model, *, partial: Iterable[str] | None = None) -> Receipt:
    """Ends the update: checks that it is complete, sets the constants, returns a receipt.

    RuntimeError, with the reload still active, when something planned did not arrive.  ``partial``
    lists the names of a selective update: all that arrived and no others; it sets the constants,
    too.
    """
    if isinstance(partial, str):
        raise TypeError(f"`partial` is the string {partial!r}; expected a list of names")
    listed = None if partial is None else list(partial)
    session = session_of(model)
    with step(session, "finish_reload"):
        mode, handle, targets = session.mode, session.handle, session.targets
        if session.known is not None and session.state == "active":
            session.begin_known()
        handle.prepare_finish(listed, *mode.lists(targets, aliases=False))
        if handle.needs_fallback_call():
            call_loader(session)
        run_hooks(session, lambda: mode.complete(targets, handle, partial is not None))
        handle.complete()
        run_hooks(session, lambda: mode.finish(targets))
        positions, nbytes, seconds, covered, numbers, staged, held = handle.finish()
        names = session.begun._names_at(positions.tolist()) if session.begun is not None else ()
        session.finished()
    coverage = map(Coverage, numbers[::2], numbers[1::2])
    by_target = dict(zip(covered, coverage, strict=True))
    return Receipt(names, nbytes, seconds, by_target, staged, held)


def abort_reload(model: Model) -> None:
    """Gives the update up.

    Before its first write, and where it is atomic, the model is idle again and holds its old
    bytes; else it has failed.  RuntimeError where no reload is active.
    """
    session = session_of(model)
    with step(session, "abort_reload"):
        session.handle.abort()
        session.settle()


def state(model: Model) -> ReloadState:
    """Where the reload of ``model`` stands."""
    status, since, error, landed, names, numbers, ranges = session_of(model).handle.report()
    undefined = {}
    items = iter(ranges)
    for name, nbytes, total in zip(names, numbers[::2], numbers[1::2], strict=True):
        spans = tuple((next(items), next(items)) for _ in range(next(items)))
        undefined[name] = UndefinedBytes(nbytes, total, spans)
    return ReloadState(status, since, tuple(landed), undefined, error)
