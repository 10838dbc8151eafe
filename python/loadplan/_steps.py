"""What every way of landing bytes does around its own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ._direct import HookError
from ._fallback_call import call_loader
from ._sessions import Session


class step:
    """A step of the public function ``call``.  An error may end the reload: then its mode ends.

    Other threads wait for the step's end.  No generator: there is one for each name.
    """

    __slots__ = ("_call", "_session")

    def __init__(self, session: Session, call: str) -> None:
        self._session = session
        self._call = call

    def __enter__(self) -> None:
        self._session.enter(self._call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._session.settle()
        finally:
            self._session.leave()


def fail(session: Session, error: BaseException) -> NoReturn:
    """What a mode raised fails the session, unless the library has failed it before."""
    cause = error.__cause__ if isinstance(error, HookError) else error
    if session.state == "active":
        text = str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"
        try:
            session.hook_failed(text, session.targets)
        except RuntimeError as failure:
            if isinstance(cause, Exception):
                raise failure from error
    # An interrupt stays one.
    raise error if cause is None or isinstance(cause, Exception) else cause


def run_hooks(session: Session, hooks: Callable[[], None]) -> None:
    try:
        hooks()
    except BaseException as error:
        fail(session, error)


def landed(session: Session) -> None:
    """Names have come by another way than `load_planned`: what waited for them last follows."""
    if session.handle.fallback_call_ready():
        call_loader(session)
    run_hooks(session, lambda: session.mode.landed(session.targets, session.handle))
