"""The loop over the passes of a trace.  The library decides; this runs the loader."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import threading
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import typing_extensions
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from . import _curious
from ._claims import claiming_devices
from ._library import CODE_OF, classes
from ._rebinding import Bindings
from ._stand_ins import standing_in_for_items
from .metadata import ParamMeta
from .targets import Targets, with_memory

DONE, REPEAT, REFUSE = range(3)
EVERY_NAME = -1

# The library's own words, see MakeTraceTensor.
_READ_POINTER = re.compile("checkpoint tensor `(.*)` holds no data while it is traced")

# Of memory that holds no bytes yet, whoever wants them.
_ANY_POINTER = re.compile("cannot be read through a (raw|data) pointer")

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
# Nobody's own code: torch, this package, and what wraps functions of torch (`@deprecated`).
_NOT_THE_LOADERS = (_TORCH, _OURS, typing_extensions.__file__)


def make_tracer(targets: Targets, metas: list[ParamMeta]) -> Any:
    for meta in metas:
        if meta.dtype not in CODE_OF:
            raise ValueError(
                f"`{meta.name}` is declared as {meta.dtype!r}, which is no torch dtype"
            )
        try:
            array("q", meta.shape)  # what the library counts in
        except (TypeError, OverflowError):
            raise ValueError(
                f"`{meta.name}` is declared with the shape {meta.shape!r}; expected whole numbers"
            ) from None
    names, tensors = targets.lists()
    return classes.Tracer(
        [meta.name for meta in metas],
        [extent for meta in metas for extent in meta.shape],
        [len(meta.shape) for meta in metas],
        [CODE_OF[meta.dtype] for meta in metas],
        ["" if meta.device is None else str(meta.device) for meta in metas],
        names,
        tensors,
    )


def run_passes(tracer: Any, targets: Targets, names: list[str]) -> tuple[str, ...]:
    """All passes that the library needs.  Returns what the loader rebound, put back."""
    refused: set[str] = set()
    rebound = complete_pass(tracer, targets, names, refused)
    while explore(tracer, targets, names):
        rebound = complete_pass(tracer, targets, names, refused)
    return rebound


def complete_pass(
    tracer: Any, targets: Targets, names: list[str], refused: set[str]
) -> tuple[str, ...]:
    """Passes until one is complete, without the names that only real bytes could answer for."""
    diagnose = False
    while True:
        one = _Pass(tracer, targets, names, refused)
        one.run(diagnose)
        verdict, message = tracer.end_pass(one.error)
        if verdict == DONE:
            one.bindings.refuse_rebound_targets()
            if attribute := one.bindings.differing_attribute():
                tracer.mark_fallback(
                    EVERY_NAME, f"the loader gives `{attribute}` another tensor, with other bytes"
                )
            one.cause = None  # its frames hold tensors of the pass; the loader keeps none by that
            refuse_kept_tensors(tracer, names)
            return one.bindings.rebound
        if verdict == REFUSE:
            # Torch refuses some reads before any kernel of ours: look for the tensor once more.
            if not one.error or diagnose:
                if one.error and tracer.fall_back_as_a_whole(one.error):
                    return one.bindings.rebound
                if _ANY_POINTER.search(one.error):
                    tracer.mark_fallback(EVERY_NAME, one.error)
                    return one.bindings.rebound
                one.refuse(message)
            diagnose = True
        else:
            diagnose = False


def explore(tracer: Any, targets: Targets, names: list[str]) -> bool:
    """Passes with all names, where some were left out of the last one: values are made up.

    True: they show tensors that the complete pass did not know; it has to be made anew.
    """
    while tracer.wants_exploring():
        one = _Pass(tracer, targets, names)
        with standing_in_for_items():
            one.run(begin=tracer.begin_exploring)
        begins_anew = tracer.end_exploring(one.error)
        if not one.error:
            refuse_kept_tensors(tracer, names)
        if begins_anew:
            return True
    return False


def trace_fallback_call(tracer: Any, targets: Targets, names: list[str], plan: Any) -> None:
    """Traces the loader with the fallback names of ``plan``, maybe none.

    What it does then is what the call of an update does beside the plan.
    """
    for round in range(tracer.num_rounds()):
        one = _Pass(tracer, targets, names)
        with standing_in_for_items():
            one.run(begin=functools.partial(tracer.begin_fallback_pass, plan, round))
        tracer.end_fallback_pass(one.error)


def refuse_kept_tensors(tracer: Any, names: list[str]) -> None:
    """An error where the model kept a trace tensor: what it would do with it is not in the plan."""
    if not tracer.has_live_tensors():
        return
    gc.collect()
    if not tracer.has_live_tensors():
        return
    kept = [names[source] for source in tracer.live_names()]
    what = f"the tensor of `{kept[0]}`" if kept else "a tensor computed from checkpoint tensors"
    raise RuntimeError(
        f"the loader kept {what} after load_weights returned, where a plan cannot follow it; "
        "copy it into a target, or drop it"
    )


class _Pass:
    """One call of the loader on trace tensors."""

    def __init__(
        self, tracer: Any, targets: Targets, names: list[str], refused: set[str] | None = None
    ) -> None:
        self.tracer = tracer
        self.targets = targets
        self.names = names
        self.error = ""
        self.cause: BaseException | None = None
        self.current = -1
        self.bindings = Bindings(targets, refused)

    def run(self, diagnose: bool = False, begin: Callable[[], None] | None = None) -> None:
        load_weights = self.targets.load_weights
        _curious.install()
        (begin or self.tracer.begin_pass)()
        try:
            self.load(load_weights, diagnose)
            self.bindings.put_back(self.tracer)
            self.name_mirrors()
        except BaseException:
            try:
                self.bindings.put_back(self.tracer)
            finally:
                self.tracer.abandon_pass()
            raise

    def load(self, load_weights: Callable[[Any], Any], diagnose: bool) -> None:
        try:
            with join_threads(self.tracer), claiming_devices(self.tracer):
                if diagnose:
                    with _Diagnosis(self.tracer):
                        load_weights(self.weights())
                else:
                    load_weights(self.weights())
        except Exception as error:
            self.cause = error
            self.error = describe(error)
            self.give_up_read_pointer(error)
            if self.current >= 0:
                self.tracer.set_current(self.current)

    def name_mirrors(self) -> None:
        """Tells which of the tensors that the loader wrote, and that are no targets, were there.

        What only a cycle of objects keeps is gone afterwards, and is none.
        """
        if not self.error and self.tracer.mirrors():
            gc.collect()
        for mirror in self.tracer.mirrors():
            name = self.bindings.attribute_of(mirror)
            if name:
                self.tracer.name_mirror(mirror, name)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        sources, tensors = self.tracer.take_pass_tensors()
        # Dropped one by one, so that only what the loader keeps is alive after the pass.
        tensors.reverse()
        for source in sources:
            self.current = source
            yield self.names[source], tensors.pop()

    def give_up_read_pointer(self, error: BaseException) -> None:
        """The name whose memory torch was asked for (`pickle.dumps(w)`) goes through the loader."""
        found = _READ_POINTER.search(str(error))
        if found is None or found[1] not in self.names:
            return
        where = where_of(error)
        reason = "its memory is read through a raw pointer" + (f" at {where}" if where else "")
        self.tracer.mark_fallback(self.names.index(found[1]), reason)

    def refuse(self, message: str) -> NoReturn:
        raise RuntimeError(message) from self.cause


def describe(error: BaseException) -> str:
    """`KeyError: 'x' at model.py:12`, one line."""
    text = next(iter(str(error).splitlines()), "")
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    where = where_of(error)
    return f"{words} at {where}" if where else words


def where_of(error: BaseException) -> str:
    """The innermost line of the loader's own code that the error passed."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_NOT_THE_LOADERS):
            where = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return where


def _loader_line() -> str:
    """The innermost line of the loader's own code in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_THE_LOADERS, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _inner_tensors(wrapper: Tensor) -> list[Tensor]:
    """The tensors that hold the bytes of one that wraps others."""
    return [inner for _, inner in with_memory("", wrapper) if inner is not wrapper]


def _answer_questions() -> None:
    """Lets the library ask where the loader is, and what a tensor wraps."""
    key = "CompositeExplicitAutograd"
    if torch._C._dispatch_has_kernel_for_dispatch_key("loadplan::loader_line", key):
        return  # a second copy of the package
    _registered.impl("loader_line", _loader_line, key)  # type: ignore[no-untyped-call]
    _registered.impl("inner_tensors", _inner_tensors, key)  # type: ignore[no-untyped-call]


_registered = torch.library.Library("loadplan", "IMPL")  # type: ignore[no-untyped-call]
_answer_questions()


class _Diagnosis(TorchFunctionMode):
    """Finds the trace tensors in a torch function that raises, and records the refusal."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            found = [t for t in _tensors((args, kwargs)) if _curious.is_trace(t)]
            if found and not _fails_on_real_data(func, args, kwargs or {}):
                for tensor in found:
                    self.tracer.refuse(tensor, _name(func), _loader_line())
            raise


def _name(func: Any) -> str:
    name = resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)
    owner = getattr(func, "__self__", None)
    if name in ("getset_descriptor.__set__", "property.__set__", "__set__") and owner is not None:
        name = f"{getattr(owner, '__name__', '')}.__set__"
    return str(name).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _fails_on_real_data(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the loader would fail with real tensors too: then nothing is wrong with the trace."""

    def stand_in(value: Any) -> Any:
        if isinstance(value, Tensor):
            span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            # Memory that nobody touches costs nothing, whatever its size.
            flat = torch.zeros(max(span, 0) if value.numel() else 0, dtype=value.dtype)
            # A leaf that requires grad, or a view of one, must not be written in place.
            return flat.as_strided(value.shape, value.stride()).requires_grad_(_shows_a_leaf(value))
        if isinstance(value, (list, tuple)):
            return type(value)([stand_in(item) for item in value])
        if isinstance(value, dict):
            return {key: stand_in(item) for key, item in value.items()}
        return value

    try:
        with torch._C.DisableTorchFunction():
            func(*stand_in(args), **stand_in(kwargs))
    except Exception:
        return True
    return False


def _shows_a_leaf(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return tensor.requires_grad and base is not None and base.is_leaf


# Threads take part in the pass of the thread that starts them; others see nothing of it.
_tracers = threading.local()
_start = threading.Thread.start
_joins = 0
_joins_lock = threading.Lock()


def _start_joined(thread: threading.Thread) -> None:
    tracer = getattr(_tracers, "current", None)
    if tracer is not None:
        run = thread.run

        def run_joined() -> None:
            _tracers.current = tracer
            tracer.join_thread()
            run()

        thread.run = run_joined  # type: ignore[method-assign]
    _start(thread)


@contextmanager
def join_threads(tracer: Any) -> Iterator[None]:
    """While it lasts, threads that this thread starts take part in the pass."""
    global _joins
    with _joins_lock:
        _joins += 1
        threading.Thread.start = _start_joined  # type: ignore[assignment, method-assign]
    before = getattr(_tracers, "current", None)
    _tracers.current = tracer
    try:
        yield
    finally:
        _tracers.current = before
        with _joins_lock:
            _joins -= 1
            if _joins == 0:
                threading.Thread.start = _start  # type: ignore[method-assign]
