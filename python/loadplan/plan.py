"""Load plans: made once by tracing a loader, used for every update."""

from __future__ import annotations

import os
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ._library import DTYPE_OF
from ._mirrors import Attributes
from ._modes import BEGIN_LAYERWISE, in_kernel_format
from ._passes import make_tracer, run_passes, trace_fallback_call
from ._sessions import Session, session_of
from .metadata import ParamMeta, Source, StrPath, metadata
from .targets import Model, Targets, as_targets

Box: TypeAlias = tuple[tuple[int, int], ...]

KINDS = ("direct", "derived", "fallback", "unneeded")
OVERLAPS = ("fallback", "last_wins", "error")
MODES = ("direct", "layerwise")


@dataclass(frozen=True)
class Write:
    """A planned copy: bytes of the checkpoint tensor (``source_*``) to bytes of a live storage.

    Offsets and strides count bytes; ``target`` is the first name of the storage.  ``casts`` are
    the dtypes that an element goes through, empty for a copy of bytes.
    """

    target: str
    shape: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    target_itemsize: int
    source_offset: int
    source_strides: tuple[int, ...]
    source_itemsize: int
    casts: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What a plan does with one checkpoint tensor.

    ``reads`` are the exact boxes that this rank needs, ``nbytes`` their size, ``inputs`` the
    boxes of all names that a derived name is computed from together with it.
    """

    name: str
    kind: str
    reason: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reads: tuple[Box, ...]
    writes: tuple[Write, ...]
    inputs: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlap:
    """Two names that write the same bytes of a target."""

    first: str
    second: str
    target: str
    nbytes: int


@dataclass(frozen=True)
class Uncovered:
    """Bytes of a target that the plan does not write."""

    nbytes: int
    total_nbytes: int


class LoadPlan:
    """Which bytes of which checkpoint tensor land where in live memory.  Made by `plan_loads`."""

    def __init__(
        self,
        handle: Any,
        metas: Sequence[ParamMeta],
        placement: Any,
        session: Session | None,
        trace_seconds: float,
        rebound: tuple[str, ...] = (),
    ) -> None:
        self._handle = handle
        self._metas = metas
        names: list[str] = getattr(metas, "names", None) or [meta.name for meta in metas]
        self._names = names
        self._index: dict[str, int] = dict(zip(names, range(len(names)), strict=True))
        self._placement = placement
        # Weakly: the session knows its last plan, and both go with the model.
        self._session = weakref.ref(session) if session is not None else lambda: None
        self._rebound = rebound
        self._attributes = Attributes(session, handle)
        self._entries = _Entries(handle, metas, self._index)
        kinds, fallback = self._entries._kinds, KINDS.index("fallback")
        self._fallbacks = frozenset(
            [name for name, kind in zip(names, kinds, strict=True) if kind == fallback]
            if fallback in kinds
            else ()
        )
        self.trace_seconds = trace_seconds

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By declared name, in declared order."""
        return self._entries

    @property
    def uncovered(self) -> dict[str, Uncovered]:
        """Targets with bytes that no name and no constant writes."""
        return {
            name: Uncovered(nbytes, total)
            for name, nbytes, total in zip(*self._handle.uncovered(), strict=True)
        }

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Names that write the same bytes, two by two, whatever `plan_loads` made of them."""
        numbers, targets = self._handle.overlaps()
        return tuple(
            Overlap(self._metas[first].name, self._metas[second].name, target, nbytes)
            for first, second, nbytes, target in zip(
                numbers[::3], numbers[1::3], numbers[2::3], targets, strict=True
            )
        )

    @property
    def has_fallbacks(self) -> bool:
        """Whether updates make one ``load_weights`` call, with the fallback names."""
        return bool(self._fallbacks)

    def get_boxes(self, name: str) -> tuple[Box, ...] | None:
        """The parts of the checkpoint tensor to send, in elements; None: this rank needs nothing.

        One box, the whole tensor, where `get_dest` is None, which says something else: there the
        name is needed.  KeyError: it was not declared.
        """
        boxes = self._handle.boxes(self._position(name))
        return None if boxes is None else _boxes(boxes)

    def get_dest(self, name: str) -> list[tuple[Box, Tensor]] | None:
        """Pairs for which ``dest.copy_(full[box].reshape(dest.shape))`` is what the loader does.

        A destination has the checkpoint's dtype: raw bytes may be received into it.  Empty: this
        rank needs nothing, and `get_boxes` is None.  None: give the whole tensor to
        `load_planned`.  Write only between `start_reload` and `finish_reload`, and call
        `delivered` when a name is written.  KeyError: it was not declared.
        """
        dest = self._handle.dest(self._position(name))
        if dest is None:
            return None
        session = self._session()
        if dest[1] and session is not None:
            session.gave_destinations(self)
        return list(zip(_boxes(dest[0]), dest[1], strict=True))

    def delivered(self, name: str) -> None:
        """Reports that an engine has written ``name`` through `get_dest`, in an active reload.

        ValueError, which fails the reload, for a name that came before or has no destination.
        """
        self._position(name)
        session = self._session()
        if session is None:
            raise RuntimeError(
                f"`{name}` was reported as delivered, but the model of this plan no longer exists"
            )
        from ._steps import step

        with step(session, "delivered"):
            session.begin(self)
            session.handle.report_delivered(name)

    def report(self) -> str:
        """Counts, bytes and reasons, for people."""
        lines = [self._handle.report().rstrip("\n")]
        if self.has_fallbacks:
            lines.append(
                "an update collects the fallback names and makes one load_weights call with them"
            )
        if self._rebound:
            shown = ", ".join(self._rebound[:10])
            more = f" and {len(self._rebound) - 10} more" if len(self._rebound) > 10 else ""
            lines.append(
                f"the loader set these while it was traced; they were put back: {shown}{more}"
            )
        return "\n".join(lines)

    def save(self, path: StrPath, *, tag: str | None = None) -> None:
        """Writes the plan to a file, from which `load_plan` binds it to a model laid out alike.

        ``tag`` says what the tensors do not show and the plan depends on: which rank this is, the
        engine's version, its configuration.  Only the same tag loads the file.  Default: the rank
        in the default process group of torch.distributed; empty where there is none, and then
        nothing tells the files of two ranks apart.

        Raises RuntimeError where a file cannot say all that the plan rests on: its loader read a
        tensor that is no target; ValueError for a placement token that is no plain value.
        """
        from .plan_files import save_plan

        save_plan(self, path, tag)

    def _positions(self, names: Iterable[str]) -> Tensor | None:
        """Where ``names`` stand among the declared ones; None where one of them does not."""
        try:
            found = array("q", map(self._index.__getitem__, names))
        except (KeyError, TypeError):
            return None
        return torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0).long()

    def _names_at(self, positions: Iterable[int]) -> tuple[str, ...]:
        return tuple(map(self._names.__getitem__, positions))

    def __repr__(self) -> str:
        return f"<loadplan.LoadPlan of {len(self._metas)} names>"

    def _position(self, name: str) -> int:
        try:
            return self._index[name]
        except KeyError:
            raise KeyError(f"`{name}` was not declared when the plan was made") from None


class _Entries(Mapping[str, Entry]):
    def __init__(self, handle: Any, metas: Sequence[ParamMeta], index: dict[str, int]) -> None:
        self._handle = handle
        self._metas = metas
        self._index = index
        self._kinds: list[int] = handle.kinds()
        self._cache: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        entry = self._cache.get(name)
        if entry is None:
            if name not in self._index:
                raise KeyError(f"`{name}` was not declared when the plan was made")
            entry = self._cache[name] = self._fetch(self._index[name])
        return entry

    def _fetch(self, index: int) -> Entry:
        reason, nbytes, reads, numbers, targets, inputs = self._handle.entry(index)
        meta = self._metas[index]
        return Entry(
            name=meta.name,
            kind=KINDS[self._kinds[index]],
            reason=reason,
            shape=tuple(meta.shape),
            dtype=meta.dtype,
            nbytes=nbytes,
            reads=_boxes(reads),
            writes=_writes(numbers, targets),
            inputs={self._metas[i].name: _boxes(self._handle.entry(i)[2]) for i in inputs},
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index


def box_at(numbers: list[int], at: int) -> tuple[Box, int]:
    """The box that begins at ``at``, and where the next item does."""
    stop = at + 1 + 2 * numbers[at]
    return tuple(zip(numbers[at + 1 : stop : 2], numbers[at + 2 : stop : 2], strict=True)), stop


def _boxes(numbers: list[int]) -> tuple[Box, ...]:
    boxes = []
    at = 0
    while at < len(numbers):
        box, at = box_at(numbers, at)
        boxes.append(box)
    return tuple(boxes)


def _writes(numbers: list[int], targets: list[str]) -> tuple[Write, ...]:
    at = 0

    def take(count: int) -> tuple[int, ...]:
        nonlocal at
        at += count
        return tuple(numbers[at - count : at])

    writes = []
    for target in targets:
        (rank,) = take(1)
        shape = take(rank)
        (target_offset,), target_strides, (target_itemsize,) = take(1), take(rank), take(1)
        (source_offset,), source_strides, (source_itemsize,) = take(1), take(rank), take(1)
        casts = tuple(DTYPE_OF[code] for code in take(*take(1)))
        writes.append(
            Write(
                target,
                shape,
                target_offset,
                target_strides,
                target_itemsize,
                source_offset,
                source_strides,
                source_itemsize,
                casts,
            )
        )
    return tuple(writes)


def reload_mode(mode: str | None = None) -> str:
    """The mode of a reload: as given, else LOADPLAN_RELOAD_MODE, else direct."""
    chosen = mode or os.environ.get("LOADPLAN_RELOAD_MODE") or "direct"
    if chosen not in MODES:
        raise ValueError(f"the reload mode is {chosen!r}; expected one of {', '.join(MODES)}")
    return chosen


def check_plannable(model: Model) -> None:
    """Refuses, from configuration alone, a model that no plan supports; names the module."""
    targets = as_targets(model)
    _ = targets.load_weights
    reload_mode()
    if targets.placement is not None or not isinstance(targets.targets, nn.Module):
        return
    for name, module in targets.targets.named_modules():
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if getattr(parallel, "enable_eplb", False) and not hasattr(targets.targets, "placement"):
            raise RuntimeError(
                f"`{name}` rebalances its experts, and nothing tells where they lie; give "
                "`Targets(model, placement=...)`"
            )


def placement_of(targets: Targets) -> Any:
    """The token of where experts lie now; None where nothing gives one."""
    placement = targets.placement or getattr(targets.targets, "placement", None)
    return placement() if callable(placement) else None


def plan_loads(model: Model, metas: Source, overlaps: str = "fallback") -> LoadPlan:
    """Traces ``load_weights`` of the model once over the declared checkpoint tensors.

    Nothing is loaded and no live byte changes.  A module is planned between `start_reload` and
    `finish_reload` (`abort_reload` where nothing is to be loaded yet); bare `Targets` without a
    ``restore`` hook at any time.  ``metas``: what `metadata` takes.

    ``overlaps`` says what becomes of names that write the same byte: they go through the loader
    (``fallback``), the last one declared wins (``last_wins``), or planning fails (``error``).

    Raises ValueError for a name declared twice, RuntimeError where the loader fails or does what
    no plan can follow.
    """
    if overlaps not in OVERLAPS:
        raise ValueError(f"overlaps is {overlaps!r}; expected one of {', '.join(OVERLAPS)}")
    check_plannable(model)
    session = session_of(model, create=True)
    session.enter("plan_loads")
    try:
        plan = _plan(model, session, metas, overlaps)
    except RuntimeError as error:
        # A loader that meets kernel tensors fails by their shapes, which says little.
        if session.mode.per_name or not in_kernel_format(as_targets(model)):
            raise
        raise RuntimeError(f"{error}; {BEGIN_LAYERWISE}") from error
    finally:
        session.leave()
    session.know(plan)
    return plan


def _plan(model: Model, session: Session, metas: Source, overlaps: str) -> LoadPlan:
    targets = as_targets(model)
    if isinstance(model, nn.Module) or targets.restore is not None:
        session.handle.check_plan()
    declared = metadata(metas)
    start = time.perf_counter()
    tracer = make_tracer(targets, declared)
    names = [meta.name for meta in declared]
    rebound = run_passes(tracer, targets, names)
    handle = tracer.build_plan(OVERLAPS.index(overlaps))
    # Names that join the fallbacks take part in the next trace of their call.
    fallbacks = handle.num_fallbacks()
    while 0 < fallbacks < len(names):
        trace_fallback_call(tracer, targets, names, handle)
        again = tracer.build_plan(OVERLAPS.index(overlaps))
        joined = again.num_fallbacks() - fallbacks
        # Fewer: everything fell back because a call with some names only does less than the
        # loader does, which a call with all of them no longer shows.
        if joined >= 0:
            handle = again
        if joined <= 0:
            break
        fallbacks += joined
    seconds = time.perf_counter() - start
    return LoadPlan(handle, declared, placement_of(targets), session, seconds, rebound)
