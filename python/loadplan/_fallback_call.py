"""The one call of the loader that an update makes whose plan has fallbacks."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import classes
from ._passes import join_threads
from ._sessions import Session


def call_loader(session: Session) -> None:
    """The one call of the loader in an update whose plan has fallbacks, with those names.

    It is watched: what it touches must be apart from what the plan writes.
    """
    targets = session.targets
    assert session.known is not None
    mode, handle = session.mode, session.handle
    mode.calling(targets, handle)
    watch = classes.CallWatch(session.known._handle, *targets.lists())
    names, tensors = handle.take_eager_call()
    places = {name: _alias(tensor) for name, tensor in targets.named().items()}
    violation = ""
    try:
        watch.begin()
        try:
            with join_threads(watch):
                targets.load_weights(zip(names, tensors, strict=True))
        finally:
            violation = watch.end()
        if violation:
            raise RuntimeError(violation)
    except BaseException as error:
        try:
            handle.eager_done(f"{type(error).__name__}: {error}", *mode.lists(targets))
        except RuntimeError as failure:
            if isinstance(error, Exception):
                raise failure from error
        raise
    _keep_places(targets.named(), places)
    mode.called(targets, handle, watch.met())
    handle.eager_done("", *mode.lists(targets))


def _alias(tensor: Tensor) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _keep_places(now: dict[str, Tensor], places: dict[str, Tensor]) -> None:
    """Brings bytes that the loader left in new memory (`param.data = w`) back to the old place.

    A parameter that replaced another one stays, over the old memory.
    """
    for name, old in places.items():
        tensor = now.get(name)
        if tensor is None:
            continue
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            moved = tensor.untyped_storage()._cdata != old.untyped_storage()._cdata
            if not moved or tensor.shape != old.shape or tensor.dtype != old.dtype:
                continue
            old.copy_(tensor.detach())
            tensor.data = old
