"""What every way of landing bytes does around its own work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ._direct import HookError
from ._fallback_call import call_loader
from ._sessions import Session


@contextmanager
def settling(session: Session) -> Iterator[None]:
    """An error may end the reload: then its mode ends as well."""
    try:
        yield
    except BaseException:
        session.settle()
        raise


def fail(session: Session, error: BaseException) -> NoReturn:
    """What a mode raised fails the session, unless the library has failed it before."""
    if session.state == "active":
        text = str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"
        try:
            session.handle.hook_failed(text, *session.targets.lists())
        except RuntimeError as failure:
            if isinstance(error, Exception):
                raise failure from error
    raise error


def run_hooks(session: Session, step: Callable[[], None]) -> None:
    with settling(session):
        try:
            step()
        except BaseException as error:
            fail(session, error)


def landed(session: Session) -> None:
    """Names have come by another way than `load_planned`: what waited for them last follows."""
    with settling(session):
        if session.handle.fallback_call_ready():
            call_loader(session)
    run_hooks(session, lambda: session.mode.landed(session.targets, session.handle))
