"""Reload sessions: what an engine calls around an update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ._fallback_call import call_loader
from ._modes import make_mode
from ._sessions import Session, session_of
from .plan import LoadPlan, reload_mode
from .targets import Model, as_targets


@dataclass(frozen=True)
class Receipt:
    """What an update did: names in order of arrival, bytes written, seconds since its start."""

    names: tuple[str, ...]
    nbytes: int
    seconds: float
    # Layerwise: the most that was staged, and held on the host for want of room, at one time.
    peak_staging_nbytes: int = 0
    peak_held_nbytes: int = 0


@dataclass(frozen=True)
class ReloadState:
    """``state`` is idle, active or failed, ``since`` when (seconds since 1970).

    ``landed`` are the names of the current or failed update that have landed; ``undefined`` the
    targets that a failed update may have left half written; ``error`` is what failed it.
    """

    state: str
    since: float
    landed: tuple[str, ...]
    undefined: tuple[str, ...]
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

    ``mode="layerwise"`` is for layers whose kernel format is not their load format; call
    `record_metadata_for_reloading` before post-processing.  ``defer_processing`` processes all
    layers at the end; ``max_staging_bytes`` bounds what is staged at one time.

    ``required``: patterns of target names; the first write is refused when one of them is not
    covered by bytes.
    """
    chosen = make_mode(
        reload_mode(mode), defer_processing=defer_processing, max_staging_bytes=max_staging_bytes
    )
    if atomic:
        raise NotImplementedError("atomic=True is not available yet; start without it")
    if isinstance(required, str):
        raise TypeError(f"`required` is the string {required!r}; expected a list of patterns")
    targets = as_targets(model)
    session = session_of(model, create=True)
    session.handle.start([*targets.required, *required])
    session.mode = chosen
    try:
        chosen.start(targets, session.handle)
    except BaseException:
        session.handle.abort()
        raise


def load_planned(model: Model, plan: LoadPlan, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Lands checkpoint tensors as ``plan`` says; may be called again, bucket by bucket.

    Each tensor is used before the next one is asked for, so that a sender may reuse its memory.
    """
    session = session_of(model)
    session.begin(plan)
    mode, handle, targets = session.mode, session.handle, session.targets
    with putting_back(session):
        if isinstance(weights, Collection) and not mode.per_name:
            names: list[str] = []
            tensors: list[Tensor] = []
            for name, tensor in weights:
                _check_item(name, tensor)
                names.append(name)
                tensors.append(tensor)
            handle.deliver_all(names, tensors)
        else:
            for name, tensor in weights:
                _check_item(name, tensor)
                handle.deliver(name, tensor)
                if mode.per_name:
                    mode.landed(targets, handle)
        if handle.eager_ready():
            call_loader(session)
        mode.landed(targets, handle)


@contextmanager
def putting_back(session: Session) -> Iterator[None]:
    """Whatever fails the session leaves the kernel tensors on the model."""
    try:
        yield
    except BaseException:
        if session.state == "failed":
            session.mode.abort(session.targets)
        raise


def _check_item(name: object, tensor: object) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` came with {type(tensor).__name__}; expected pairs of a name and a tensor"
        )


def finish_reload(model: Model, *, partial: Iterable[str] | None = None) -> Receipt:
    """Ends the update: checks that it is complete, sets the constants, returns a receipt.

    Raises, with the reload still active, when something planned did not arrive.  ``partial`` lists
    the names of a selective update.
    """
    session = session_of(model)
    targets = session.targets
    if session.known is not None and session.state == "active":
        session.begin_known()
    mode, handle = session.mode, session.handle
    with putting_back(session):
        names, tensors = mode.lists(targets)
        handle.prepare_finish(None if partial is None else list(partial), names, tensors)
        if handle.needs_eager_call():
            call_loader(session)
        mode.complete(targets, handle, partial is not None)
        done = _receipt(session)
    mode.finish(targets)
    return done


def _receipt(session: Session) -> Receipt:
    names, nbytes, seconds, staged, held = session.handle.finish()
    return Receipt(tuple(names), nbytes, seconds, staged, held)


def abort_reload(model: Model) -> None:
    """Gives the update up.  Before its first write the model is idle again, after it failed."""
    session = session_of(model)
    session.handle.abort()
    session.mode.abort(session.targets)


def state(model: Model) -> ReloadState:
    """Where the reload of ``model`` stands."""
    status, since, landed, undefined, error = session_of(model).handle.report()
    return ReloadState(status, since, tuple(landed), tuple(undefined), error)
