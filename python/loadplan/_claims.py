"""What a trace tensor says when a loader asks for its device, or for its memory.

And what no operator shows of a real one: that it is given other memory (``t.data = ...``).

A loader that branches on ``w.is_cuda`` must take the branch of the eager call: while a pass runs,
trace tensors name the device that they stand for (Note [Claimed devices] in
``backend/trace_tensor.h``).  Torch reads ``data_ptr`` without asking any kernel, so that a refusal
that the loader catches would be lost: it is noted here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ._curious import _note, is_trace

_device_of = torch._C.TensorBase.device.__get__
_is_cpu = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
_is_cuda = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined]

_lock = threading.Lock()
_users: dict[str, int] = {}
_tracer: Any = None  # any one: the storage of a trace tensor knows its device


def _device(tensor: Tensor) -> torch.device:
    device: torch.device = _device_of(tensor)
    if device.type == "privateuseone" and _tracer is not None:
        device = _tracer.claimed_device(tensor)
    return device


def _get_device(tensor: Tensor) -> int:
    if not is_trace(tensor):
        return torch._C.TensorBase.get_device(tensor)
    device = _device(tensor)
    return -1 if device.type == "cpu" else device.index or 0


def _data_ptr(tensor: Tensor) -> int:
    if is_trace(tensor):
        from ._passes import _loader_line, _tracers

        tracer = getattr(_tracers, "current", None)
        if tracer is not None:
            tracer.refuse(tensor, "Tensor.data_ptr", _loader_line())
    try:
        return torch._C.TensorBase.data_ptr(tensor)
    except RuntimeError:
        _note_reach(tensor)
        raise


def _note_reach(tensor: Tensor) -> None:
    """What the loader does once it has caught the error is nothing that an eager call does."""
    from ._passes import EVERY_NAME, _loader_line, _tracers

    mark_fallback = getattr(getattr(_tracers, "current", None), "mark_fallback", None)
    if mark_fallback is not None and not is_trace(tensor):
        where = _loader_line()
        at = f" at {where}" if where else ""
        mark_fallback(EVERY_NAME, f"the loader reaches memory{at} through a raw pointer")


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not is_trace(tensor):
        return torch._C.TensorBase.type(tensor, *args, **kwargs)
    on_cpu = torch._C.TensorBase.type(torch.empty(0, dtype=tensor.dtype))
    device = _device(tensor).type
    return on_cpu if device == "cpu" else on_cpu.replace("torch.", f"torch.{device}.", 1)


def _is_pinned(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    return not is_trace(tensor) and torch._C.TensorBase.is_pinned(tensor, *args, **kwargs)


_get_data = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


def _data_setter(tensor: Tensor, value: Any) -> None:
    _note("note_reshape", tensor, "Tensor.data")
    _set_data(tensor, value)


_stock_is_shared: Any = Tensor.is_shared


def _is_shared(tensor: Tensor) -> bool:
    if is_trace(tensor):
        return _device(tensor).type == "cuda"
    from ._passes import EVERY_NAME, _tracers

    tracer = getattr(_tracers, "current", None)
    if tracer is not None and tracer.is_symbolic(tensor):
        # torch would look at its memory where no error may be raised, and end the process.
        tracer.mark_fallback(EVERY_NAME, "the loader asks whether memory it has written is shared")
        return False
    return bool(_stock_is_shared(tensor))


_NAMES: dict[str, Any] = {
    "device": property(_device),
    "is_cpu": property(lambda t: _device(t).type == "cpu" if is_trace(t) else _is_cpu(t)),
    "is_cuda": property(lambda t: _device(t).type == "cuda" if is_trace(t) else _is_cuda(t)),
    "get_device": _get_device,
    "data": property(_get_data, _data_setter),
    "data_ptr": _data_ptr,
    "type": _type,
    "is_pinned": _is_pinned,
    "is_shared": _is_shared,
}
# Of those names, what the class itself has and does not inherit.
_OWN = {name: vars(Tensor)[name] for name in _NAMES if name in vars(Tensor)}


@contextmanager
def _replacing(names: Iterable[str]) -> Iterator[None]:
    """While it lasts, in every thread, `Tensor` has our own of these names."""
    with _lock:
        for name in names:
            _users[name] = _users.get(name, 0) + 1
            setattr(Tensor, name, _NAMES[name])
    try:
        yield
    finally:
        with _lock:
            for name in names:
                _users[name] -= 1
                if _users[name]:
                    continue
                if name in _OWN:
                    setattr(Tensor, name, _OWN[name])
                else:
                    delattr(Tensor, name)


@contextmanager
def claiming_devices(tracer: Any) -> Iterator[None]:
    """While it lasts, in every thread; other tensors answer as ever."""
    global _tracer
    with _replacing(_NAMES):
        _tracer = tracer
        try:
            yield
        finally:
            if _users["device"] == 1:
                _tracer = None


def noting_moves() -> AbstractContextManager[None]:
    """Only what is given other memory is noted: for a pass by hand, whose tensors say `trace`."""
    return _replacing(["data"])
