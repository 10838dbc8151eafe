"""Plans in files: saved by one process, loaded by others."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import torch

from ._library import DTYPE_OF, classes
from ._modes import BEGIN_LAYERWISE, in_kernel_format
from ._sessions import session_of
from .metadata import ParamMeta, Source, StrPath, metadata, path_text
from .plan import LoadPlan, check_plannable, placement_of
from .targets import Model, as_targets


@dataclass(frozen=True)
class FileInfo:
    """What a plan was saved with, and how many operators, constants and premises it holds.

    ``held`` is a checksum of these three, ``digest`` one of all that the plan does.
    """

    loadplan: str
    torch: str
    tag: str
    placement: Any
    num_premises: int
    num_constants: int
    num_operators: int
    held: int
    digest: int


def default_tag() -> str:
    """Which rank this process is: equal layouts on all ranks tell no plan from another."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ""
    return f"rank {distributed.get_rank()} of {distributed.get_world_size()}"


def _torch_version() -> str:
    """Without the part that names the build, such as ``+cu130``."""
    return str(torch.__version__).split("+")[0]


def save_plan(plan: LoadPlan, path: StrPath, tag: str | None) -> None:
    about = [_torch_version(), default_tag() if tag is None else tag, _literal(plan._placement)]
    plan._handle.save(path_text(path), about, list(plan._rebound), plan.trace_seconds)


def _literal(token: Any) -> str:
    """The token as Python writes it: no code runs when it is read."""
    text = repr(token)
    try:
        same = ast.literal_eval(text) == token
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError(
            f"the placement token {text} cannot be put into a file; let `placement` return "
            "strings, numbers, or tuples of them"
        )
    return text


def _value(path: StrPath, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"`{path}`: the placement token in it is no plain value") from None


def load_plan(
    path: StrPath, model: Model, *, metas: Source | None = None, tag: str | None = None
) -> LoadPlan:
    """A plan that `LoadPlan.save` wrote, for ``model``: no loader runs, nothing is written.

    The model must be laid out as the one for which the plan was made: target names, shapes,
    strides, dtypes, kinds of devices, which of them share a storage.  Refused with the first
    difference in words are also another version of loadplan, another torch where the plan runs
    operators again, another ``tag``, another placement token and, where ``metas`` are given, other
    metadata.  Values that the loader read (an expert map) are compared when an update begins.

    The plan of a layerwise reload is loaded after ``start_reload(model, mode="layerwise")``; any
    other at any time.  ``tag``: as in `LoadPlan.save`.

    Raises RuntimeError for a difference, ValueError for a file that is damaged or no plan file,
    OSError for one that cannot be read.
    """
    check_plannable(model)
    targets = as_targets(model)
    if targets.restore is not None:
        session_of(model).handle.check_plan()
    session = session_of(model, create=True)
    with open(path, "rb"):  # an OSError of the usual kind
        pass
    file = classes.PlanFile(path_text(path))
    (_, _, _, literal), rebound, seconds, _ = file.about()
    about = [_torch_version(), default_tag() if tag is None else tag]
    try:
        handle = file.bind(*session.mode.lists(targets), *about)
    except RuntimeError as error:
        if session.mode.per_name and session.state == "active" or not in_kernel_format(targets):
            raise
        raise RuntimeError(f"{error}; {BEGIN_LAYERWISE}") from error
    saved, now = _value(path, literal), placement_of(targets)
    if saved != now:
        raise RuntimeError(
            f"`{path}`: the plan was made for the placement {saved!r}, and now it is {now!r}; "
            "plan again"
        )
    declared = _Metas(handle)
    if metas is not None:
        _compare(path, declared, metadata(metas))
    plan = LoadPlan(handle, declared, saved, session, seconds, tuple(rebound))
    session.know(plan)
    return plan


def open_plan(path: StrPath) -> tuple[LoadPlan, FileInfo]:
    """A plan out of a file without a model: for looking at, not for loading."""
    with open(path, "rb"):
        pass
    file = classes.PlanFile(path_text(path))
    (version, torch_version, tag, literal), rebound, seconds, counts = file.about()
    handle = file.plan()
    placement = _value(path, literal)
    premises, constants, operators, held = counts
    info = FileInfo(
        version,
        torch_version,
        tag,
        placement,
        num_premises=premises,
        num_constants=constants,
        num_operators=operators,
        held=held,
        digest=file.digest(),
    )
    return LoadPlan(handle, _Metas(handle), placement, None, seconds, tuple(rebound)), info


class _Metas(Sequence[ParamMeta]):
    """The declared tensors of a plan, made one by one when somebody asks."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.names: list[str] = handle.names()
        self._known: tuple[list[int], list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> ParamMeta: ...
    @overload
    def __getitem__(self, index: slice) -> list[ParamMeta]: ...
    def __getitem__(self, index: int | slice) -> ParamMeta | list[ParamMeta]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._known is None:
            dims, ranks, dtypes = self._handle.metas()
            self._known = dims, list(accumulate(ranks, initial=0)), dtypes
        dims, starts, dtypes = self._known
        index = range(len(self))[index]
        shape = tuple(dims[starts[index] : starts[index + 1]])
        return ParamMeta(self.names[index], shape, DTYPE_OF[dtypes[index]])


def _compare(path: StrPath, planned: Sequence[ParamMeta], metas: Sequence[ParamMeta]) -> None:
    for was, now in zip(planned, metas, strict=False):
        if was[:3] != (now.name, tuple(now.shape), now.dtype):
            raise RuntimeError(
                f"`{path}`: the plan was made for `{was.name}` of shape {list(was.shape)} and "
                f"{was.dtype}, and here `{now.name}` of shape {list(now.shape)} and {now.dtype} "
                "is declared in its place; plan again"
            )
    if len(planned) != len(metas):
        more, place = (planned, "only in the plan") if len(planned) > len(metas) else (metas, "new")
        first = more[min(len(planned), len(metas))].name
        raise RuntimeError(
            f"`{path}`: the plan was made for {len(planned)} names and {len(metas)} are declared; "
            f"`{first}` is {place}; plan again"
        )
