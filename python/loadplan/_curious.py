"""What people do with a tensor: `print(w)`, `copy.deepcopy(w)`, `w.numpy()`.

Torch answers the first two through the data pointer, which a trace tensor does not have, and
refuses the others without saying whose value was wanted.  The functions are wrapped once, at the
first trace; for every other tensor they do what they did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._stand_ins import standing_in

# They read values, and reach no operator.
_READERS = ("__array__", "__dlpack__", "__dlpack_device__", "numpy", "tolist")
# What they give shows the memory itself.
_EXPOSING = ("__array__", "__dlpack__", "numpy")

# Of torch, whatever a pass makes `Tensor.device` say.
_device_of = torch._C.TensorBase.device.__get__

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    deepcopy: Callable[[Tensor, dict[int, Any]], Tensor] = Tensor.__deepcopy__
    to_str: Callable[..., str] = torch._tensor_str._str

    def deepcopy_of(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if not is_trace(self):
            copied = deepcopy(self, memo)
            if copied is not self:
                _note("note_birth", copied)
            return copied
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = self.clone().requires_grad_(self.requires_grad)
        copy: Tensor = memo[id(self)]
        return copy

    def str_of(self: Any, *, tensor_contents: Any = None) -> str:
        if not is_trace(self):
            return str(to_str(self, tensor_contents=tensor_contents))
        return f"tensor(..., device='trace', size={tuple(self.shape)}, dtype={self.dtype})"

    Tensor.__deepcopy__ = deepcopy_of  # type: ignore[method-assign]
    torch._tensor_str._str = str_of
    for name in _READERS:
        setattr(Tensor, name, _naming(name, getattr(Tensor, name)))


def _naming(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """``read`` with an error that names a trace tensor; of the class that torch raised."""

    @functools.wraps(read)
    def reader(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = _readable_copy(self)
        if copy is not None:
            return _read_only(read(copy, *args, **kwargs))
        if name in _EXPOSING and not is_trace(self):
            _note("note_exposure", self, f"Tensor.{name}")
        try:
            return read(self, *args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if not _is_symbolic(self) or "needs the value of" in str(error):
                raise
            stand_in = _refuse(self, f"Tensor.{name}")
            if stand_in is not None:
                return standing_in(read(stand_in, *args, **kwargs))
            raise type(error)(
                f"`Tensor.{name}` needs the value of {_what(self)}, which holds no data while it "
                "is traced"
            ) from error

    return reader


def _current_tracer() -> Any:
    """Of the pass of this thread, or the watch of its fallback call; else None."""
    from ._passes import _tracers

    return getattr(_tracers, "current", None)


def _note(what: str, *of: Any) -> None:
    """Tells the pass of this thread, if there is one."""
    note = getattr(_current_tracer(), what, None)
    if note is not None:
        note(*of)


def _readable_copy(tensor: Tensor) -> Tensor | None:
    """In a pass: what the loader reads in ``tensor``, where it is no matter of torch alone.

    The read is noted, as what steers the trace: a plan is refused once the bytes have changed.
    """
    current = _current_tracer()
    if current is None or type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
        return None
    copy: Tensor | None = current.readable_copy(tensor)
    return copy


def _is_symbolic(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` does not hold what a loader would read there."""
    if is_trace(tensor):
        return True
    is_symbolic = getattr(_current_tracer(), "is_symbolic", None)
    return is_symbolic is not None and bool(is_symbolic(tensor))


def _read_only(value: Any) -> Any:
    flags = getattr(value, "flags", None)
    if flags is not None:
        flags.writeable = False
    return value


def _refuse(tensor: Tensor, read: str) -> Tensor | None:
    """Makes the names behind ``tensor`` fallbacks, in whatever thread of the pass this is.

    In a pass that explores there is a real tensor to read instead.
    """
    from ._passes import _loader_line

    tracer = _current_tracer()
    if tracer is None:
        return None
    stand_in: Tensor | None = tracer.stand_in(tensor, read, _loader_line())
    if stand_in is None:
        tracer.refuse(tensor, read, _loader_line())
    return stand_in


def _what(tensor: Tensor) -> str:
    """What the library calls it: "checkpoint tensor `model.w`"."""
    try:
        torch._C.TensorBase.data_ptr(tensor)  # not the loader's own question
    except RuntimeError as error:
        return str(error).split(" holds ", 1)[0]
    return "a trace tensor"


def is_trace(value: object) -> bool:
    return isinstance(value, Tensor) and _device_of(value).type == "privateuseone"
