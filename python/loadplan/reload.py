"""Reload sessions: what an engine calls around an update."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
) -> None:
    """Opens an update of ``model``.

    ``required``: patterns of target names; the first write is refused when one of them is not
    covered by bytes.  Only ``mode="direct"`` without ``atomic`` is available yet.
    """
    chosen = make_mode(reload_mode(mode))
    if atomic:
        raise NotImplementedError("atomic=True is not available yet; start without it")
    if isinstance(required, str):
        raise TypeError(f"`required` is the string {required!r}; expected a list of patterns")
    targets = as_targets(model)
    session = session_of(model, create=True)
    session.handle.start([*targets.required, *required])
    session.mode = chosen
    chosen.start(targets)


def load_planned(model: Model, plan: LoadPlan, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Lands checkpoint tensors as ``plan`` says; may be called again, bucket by bucket.

    Each tensor is used before the next one is asked for, so that a sender may reuse its memory.
    """
    session = session_of(model)
    session.begin(plan)
    if isinstance(weights, Collection):
        names: list[str] = []
        tensors: list[Tensor] = []
        for name, tensor in weights:
            _check_item(name, tensor)
            names.append(name)
            tensors.append(tensor)
        session.handle.deliver_all(names, tensors)
    else:
        deliver = session.handle.deliver
        for name, tensor in weights:
            _check_item(name, tensor)
            deliver(name, tensor)
    if session.handle.eager_ready():
        call_loader(session)
    session.mode.landed(session.targets)


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
    names, tensors = targets.lists()
    session.handle.prepare_finish(None if partial is None else list(partial), names, tensors)
    if session.handle.needs_eager_call():
        call_loader(session)
    done = Receipt(*_receipt(session))
    session.mode.finish(targets)
    return done


def _receipt(session: Session) -> tuple[tuple[str, ...], int, float]:
    names, nbytes, seconds = session.handle.finish()
    return tuple(names), nbytes, seconds


def abort_reload(model: Model) -> None:
    """Gives the update up.  Before its first write the model is idle again, after it failed."""
    session = session_of(model)
    session.handle.abort()
    session.mode.abort(session.targets)


def state(model: Model) -> ReloadState:
    """Where the reload of ``model`` stands."""
    status, since, landed, undefined, error = session_of(model).handle.report()
    return ReloadState(status, since, tuple(landed), tuple(undefined), error)
