"""The one call of the loader that an update makes whose plan has fallbacks."""

from __future__ import annotations

from ._library import classes
from ._passes import join_threads
from ._places import Places
from ._sessions import Session


def call_loader(session: Session) -> None:
    """Calls the loader with the fallback names, which have all arrived.

    It is watched: what it touches must be apart from what the plan writes.
    """
    targets, mode, handle = session.targets, session.mode, session.handle
    assert session.begun is not None
    mode.calling(targets, handle)
    watch = classes.CallWatch(session.begun._handle, *targets.lists())
    places = Places(targets)
    names, tensors = handle.take_fallback_call(watch)
    violation = ""
    # From here on the session waits for the end of the call: whatever raises tells it.
    try:
        try:
            watch.begin()
            with join_threads(watch):
                targets.load_weights(zip(names, tensors, strict=True))
            places.keep(targets)
        finally:
            violation = watch.end()
        if violation:
            raise RuntimeError(violation)
        mode.called(targets, handle, watch.met())
    except BaseException as error:
        places.put_back()
        try:
            handle.fallback_call_done(
                f"{type(error).__name__}: {error}", watch, *mode.lists(targets)
            )
        except RuntimeError as failure:
            if isinstance(error, Exception):
                raise failure from error
        raise
    try:
        handle.fallback_call_done("", watch, *mode.lists(targets))
    except RuntimeError:
        places.put_back()
        raise
