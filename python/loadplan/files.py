"""Bytes that arrive in files and in buckets."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._library import CODE_OF
from ._sessions import session_of
from ._steps import landed, run_hooks, step
from ._streams import record_event
from .metadata import StrPath, existing_paths
from .plan import LoadPlan
from .targets import Model

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class FileStats:
    """What a load has done so far, or did.  Bytes, seconds since its start.

    ``needed_nbytes`` is what the plan needs of the names in these files; ``planned_nbytes`` what
    will be read for it, gaps within a tensor included where reading them costs less than stepping
    over them; ``read_nbytes`` what has been asked of the files, counted where they are read, with
    gaps between tensors that are read along; of files that are mapped both count what is copied.
    ``in_place_nbytes`` went from the file to their final place with no staging between.
    """

    names_done: int
    names: int
    needed_nbytes: int
    planned_nbytes: int
    read_nbytes: int
    in_place_nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of what has been asked of the files; 0 before any time has passed."""
        return self.read_nbytes / self.seconds if self.seconds > 0 else 0.0


Progress: TypeAlias = Callable[[FileStats], object]


def load_files(
    model: Model,
    plan: LoadPlan,
    paths: StrPath | Iterable[StrPath],
    *,
    progress: Progress | bool | None = None,
    undeclared: str = "error",
    threads: int | None = None,
    direct: bool | None = None,
    max_staging_bytes: int = 256 << 20,
    gap_bytes: int | None = None,
) -> FileStats:
    """Lands what ``plan`` needs out of safetensors files, reading no more than that.

    ``paths``: files, folders or indices, as ``metadata`` takes them.  Names that the plan declares
    and these files lack are for another call; ``finish_reload`` asks for them.  A name in the files
    that the plan does not declare is an error, or left alone with ``undeclared="skip"``.

    ``progress`` is called about ten times a second and at the end; by default there is a bar where
    standard error is a terminal (and rich is installed), with ``False`` there is none.
    ``direct`` reads past the page cache, everything or nothing; by default what is long and no
    whole tensor, of files that are not in it.  ``max_staging_bytes`` bounds what is held between
    file and place, a whole tensor at a time.  ``gap_bytes``: bytes between two ranges that are
    rather read than stepped over; by default a matter of cost, and files in the page cache are
    mapped where they can be kept from changing (docs/transfer.md).

    A file that is missing, or no safetensors file, leaves the reload as it was.  A bad arrival, a
    file that is cut short or changes meanwhile and a read that fails end it; the error names the
    file and the tensor, of which nothing is written (docs/transfer.md has what remains).
    """
    if undeclared not in ("error", "skip"):
        raise ValueError(f"undeclared={undeclared!r}; expected 'error' or 'skip'")
    session = session_of(model)
    files = existing_paths(paths)
    gap = -1 if gap_bytes is None else gap_bytes
    past_cache = -1 if direct is None else int(direct)
    options = [threads or 0, past_cache, max_staging_bytes, gap, int(undeclared == "skip")]
    with step(session, "load_files"):
        session.begin(plan)
        mode, handle, targets = session.mode, session.handle, session.targets
        load = handle.load_files(plan._handle, files, options)
        try:
            with _watching(progress) as report:
                while not load.step(POLL_SECONDS):
                    report(_stats(load))
                    run_hooks(session, lambda: mode.landed(targets, handle))
                report(_stats(load))
        except BaseException as error:
            load.cancel(f"{type(error).__name__}: {error}")
            raise
        landed(session)
    return _stats(load)


def _stats(load: Any) -> FileStats:
    (done, names, needed, planned, read, in_place), seconds = load.stats()
    return FileStats(done, names, needed, planned, read, in_place, seconds)


@contextlib.contextmanager
def _watching(progress: Progress | bool | None) -> Iterator[Progress]:
    if callable(progress):
        yield progress
    elif progress is False or not (progress or sys.stderr.isatty()):
        yield lambda stats: None
    elif importlib.util.find_spec("rich") is None:
        yield lambda stats: None
    else:
        with _Bar() as bar:
            yield bar


class _Bar:
    """Names, GiB/s and the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("load_files"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[names]} names"),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[speed]:.2f} GiB/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=None, names="0", speed=0.0)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, stats: FileStats) -> None:
        self._bar.update(
            self._task,
            total=max(stats.planned_nbytes, stats.read_nbytes),
            completed=stats.read_nbytes,
            names=f"{stats.names_done}/{stats.names}",
            speed=stats.bytes_per_second / 2**30,
        )


class BucketItem(NamedTuple):
    """A tensor in a bucket: ``offset`` is that of its first byte; it need not be aligned."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    offset: int


def load_bucket(
    model: Model,
    plan: LoadPlan,
    buffer: Tensor,
    metas: Iterable[BucketItem | tuple[str, Sequence[int], torch.dtype, int]]
    | Mapping[str, tuple[Sequence[int], torch.dtype, int]],
) -> torch.cuda.Event | None:
    """Lands the tensors of a bucket: one flat contiguous ``buffer`` on the host or a GPU.

    ``metas`` says where they lie: ``(name, shape, dtype, offset in bytes)`` each, or
    ``{name: (shape, dtype, offset)}``.  Bytes go from the buffer to their places, once.  Every item
    is checked before a byte is written: ValueError, which fails the reload, for one that reaches
    over the buffer's end, comes twice or was declared otherwise.  The buffer may be used again when
    the call returns; one on a GPU on the same stream, or when the event that is returned has fired.
    """
    session = session_of(model)
    items = metas.items() if isinstance(metas, Mapping) else metas
    rows = [_item((row[0], *row[1]) if isinstance(metas, Mapping) else row) for row in items]
    if not isinstance(buffer, Tensor):
        raise TypeError(f"the buffer is {type(buffer).__name__}; expected a tensor")
    with step(session, "load_bucket"):
        session.begin(plan)
        session.handle.load_bucket(
            buffer,
            [row.name for row in rows],
            [int(extent) for row in rows for extent in row.shape],
            [len(row.shape) for row in rows],
            [CODE_OF[row.dtype] for row in rows],
            [int(row.offset) for row in rows],
        )
        landed(session)
    return record_event(session)


def _item(row: Any) -> BucketItem:
    try:
        item = BucketItem(*row)
        if isinstance(item.name, str) and item.dtype in CODE_OF:
            array("q", [*item.shape, item.offset])  # what the library counts in
            return item._replace(shape=tuple(item.shape), offset=int(item.offset))
    except (TypeError, OverflowError):
        pass
    raise TypeError(f"{row!r} describes no tensor; expected (name, shape, dtype, offset in bytes)")
