"""One pass by hand: what a curious person does with trace tensors, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor

from . import _curious
from ._claims import noting_moves
from ._passes import join_threads, make_tracer
from ._rebinding import Bindings
from .metadata import Source, metadata
from .plan import OVERLAPS, Entry, LoadPlan
from .targets import Model, Targets, as_targets


class Trace:
    """A context.  Inside it `tensor` gives trace tensors; after it `kind` and `reason` answer.

    It repeats nothing and does not mind tensors that outlive it.
    """

    def __init__(self, targets: Model | Mapping[str, Tensor], metas: Source) -> None:
        self._metas = metadata(metas)
        self._index = {meta.name: index for index, meta in enumerate(self._metas)}
        self._targets: Targets = as_targets(targets)
        self._tracer: Any = None
        self._tensors: dict[str, Tensor] = {}
        self._plan: LoadPlan | None = None

    def __enter__(self) -> Trace:
        if self._tracer is not None:
            raise RuntimeError("this trace has been used; make another one")
        self._tracer = make_tracer(self._targets, self._metas)
        self._bindings = Bindings(self._targets)
        self._tracer.begin_pass()
        _curious.install()
        sources, tensors = self._tracer.take_pass_tensors()
        self._tensors = {
            self._metas[source].name: tensor
            for source, tensor in zip(sources, tensors, strict=True)
        }
        self._contexts = ExitStack()
        self._contexts.enter_context(join_threads(self._tracer))
        self._contexts.enter_context(noting_moves())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.close()
        self._tensors = {}
        try:
            self._bindings.put_back(self._tracer)
        except BaseException:
            self._tracer.abandon_pass()
            raise
        if error is not None:
            self._tracer.abandon_pass()
            return
        verdict, message = self._tracer.end_pass("")
        if message:
            raise RuntimeError(message)
        self._bindings.refuse_rebound_targets()
        handle = self._tracer.build_plan(OVERLAPS.index("fallback"))
        self._plan = LoadPlan(handle, self._metas, None, None, 0.0)

    def tensor(self, name: str) -> Tensor:
        """The trace tensor of a declared name."""
        self._check(name)
        if name not in self._tensors:
            raise RuntimeError(f"`{name}` has a trace tensor only inside the context")
        return self._tensors[name]

    @property
    def records(self) -> tuple[str, ...]:
        """One line for each copy so far: ``target `p` <- `w` [4, 4] float32``."""
        return tuple(self._tracer.copies()) if self._tracer is not None else ()

    @property
    def plan(self) -> LoadPlan:
        """What the pass comes to, after it."""
        if self._plan is None:
            raise RuntimeError("the trace has no result: its context has not ended, or it raised")
        return self._plan

    def kind(self, name: str) -> str:
        """direct, derived, fallback or unneeded."""
        return self._entry(name).kind

    def reason(self, name: str) -> str:
        """Why the name has its kind; empty where that is plain."""
        return self._entry(name).reason

    def _entry(self, name: str) -> Entry:
        self._check(name)
        return self.plan.entries[name]

    def _check(self, name: str) -> None:
        if name not in self._index:
            raise KeyError(f"`{name}` was not declared for this trace")


def trace(targets: Model | Mapping[str, Tensor], metas: Source) -> Trace:
    """A context for one pass: ``with loadplan.trace(targets, metas) as t: ... t.tensor(name)``."""
    return Trace(targets, metas)
