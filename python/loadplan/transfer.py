"""Weights from the ranks that hold them to the ranks that need them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ._library import classes
from ._sessions import Session, session_of
from ._steps import landed, step
from .metadata import StrPath, existing_paths
from .plan import LoadPlan
from .shards import Piece, Shards
from .targets import Model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group: TypeAlias = "ProcessGroup | str"

AnyShards: TypeAlias = "Shards | Mapping[str, Iterable[Piece]]"

MIB = 1 << 20


def load_shards(model: Model, plan: LoadPlan, shards: AnyShards, *, missing: str = "error") -> None:
    """Lands tensors whose shards are all in this process, in an active reload.

    What is wrong with the shards (a gap, an overlap with two values, another shape or dtype than
    declared) is found before the first write, and fails the reload.  So is a name that the plan
    needs and that has no shards; with ``missing="skip"`` it is left to other calls, and
    `finish_reload` asks for it unless ``partial`` leaves it out.  Errors number the ranks as
    ``shards`` do; this model is the one after the last of them.
    """
    all_held = _all_held(missing)
    session = session_of(model)
    with step(session, "load_shards"):
        session.begin(plan)
        session.handle.load_shards(plan._handle, _shards_of(shards)._up_to_date(), all_held)
        landed(session)


@dataclass(frozen=True)
class ExchangeReceipt:
    """What one rank moved in an update, in bytes.

    ``in_place`` is the part of ``received`` that went to its final place without a copy,
    ``copied`` what this rank held itself.
    """

    sent: int
    received: int
    in_place: int
    copied: int
    num_messages: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of one update between all ranks.

    ``links[sender][receiver]``; its diagonal is copied, not sent.  ``broadcast`` is what whole
    tensors to every receiver would be.  No schedule has a busiest sender or receiver of less than
    the bounds.
    """

    links: tuple[tuple[int, ...], ...]
    copied: int
    broadcast: int
    busiest_sender_bound: int
    busiest_receiver_bound: int

    @property
    def sent(self) -> tuple[int, ...]:
        """By each rank, to others."""
        return tuple(sum(row) - row[rank] for rank, row in enumerate(self.links))

    @property
    def received(self) -> tuple[int, ...]:
        """By each rank, from others."""
        columns = zip(*self.links, strict=True)
        return tuple(sum(column) - column[rank] for rank, column in enumerate(columns))

    @property
    def total(self) -> int:
        """What crosses between ranks."""
        return sum(self.sent)


class ShardSchedule:
    """Who sends what to whom, the same on every rank.  Made by `schedule_shards`."""

    def __init__(
        self,
        group: Group,
        shards: AnyShards | None,
        plan: LoadPlan | None,
        timeout: float,
        max_bytes_in_flight: int,
        bucket_nbytes: int,
        missing: str,
    ) -> None:
        self._handle: Any = classes.ShardExchange(boxed(group))
        self._lock = threading.Lock()  # of an update
        with _telling(self._handle, None):
            self._handle.set_options(
                timeout, max_bytes_in_flight, bucket_nbytes, _all_held(missing)
            )
            held = None if shards is None else _shards_of(shards)._up_to_date()
            needed = None if plan is None else _plan_of(plan)._handle
        self._handle.connect(held, needed, "")

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        """One at a time: what two threads moved at once would be mixed."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another thread is in an update of this schedule; call it after it")
        try:
            yield
        finally:
            self._lock.release()

    def report(self) -> str:
        """Bytes per link, balance and lower bounds, for people."""
        return str(self._handle.report()).rstrip("\n")

    @property
    def traffic(self) -> Traffic:
        """Bytes of each update, between all ranks."""
        ranks, links, sums = self._handle.traffic()
        rows = [tuple(links[i : i + ranks]) for i in range(0, ranks * ranks, ranks)]
        return Traffic(tuple(rows), *sums)


def schedule_shards(
    group: Group,
    *,
    shards: AnyShards | None = None,
    plan: LoadPlan | None = None,
    timeout: float = 60.0,
    max_bytes_in_flight: int = 256 * MIB,
    bucket_nbytes: int = 8 * MIB,
    missing: str = "error",
) -> ShardSchedule:
    """Plans the updates of a group: called by all its ranks, once for many updates.

    Trainers give their ``shards``, inference ranks the ``plan`` of their model, a rank that is both
    gives both, and one that gives neither only takes part.  Every byte that a receiver needs
    crosses once; replicas take turns.  The group (or its name) should be one of its own:
    ``torch.distributed.new_group()``.

    Raises on every rank when shards and plans do not fit (a needed box that nobody holds, another
    shape or dtype), or when some rank does not come within ``timeout`` seconds.  The group is not
    used again then, also to schedule: make a new one.  With
    ``missing="skip"``, on all ranks, names that nobody holds (frozen ones, all but an adapter) are
    left out: they come by other calls, or not at all with ``finish_reload(partial=[...])``.
    """
    return ShardSchedule(group, shards, plan, timeout, max_bytes_in_flight, bucket_nbytes, missing)


def exchange_shards(
    schedule: ShardSchedule,
    *,
    shards: AnyShards | None = None,
    model: Model | None = None,
    plan: LoadPlan | None = None,
) -> ExchangeReceipt:
    """One update of a scheduled group, called by all its ranks.

    `send_shards` and `receive_shards` are this for ranks with one part.  A rank that receives
    calls it between `start_reload` and `finish_reload`.  Any error on any rank is raised on every
    rank, at the latest after the schedule's time-out; the reload has failed then, and the group is
    not used again.
    """
    if not isinstance(schedule, ShardSchedule):
        raise TypeError(
            f"the schedule is {type(schedule).__name__}; expected what `schedule_shards` returned"
        )
    handle = schedule._handle
    with schedule._update(), contextlib.ExitStack() as steps:
        session: Session | None = None
        with _telling(handle, lambda: session):
            if model is not None:
                entered = session_of(model)
                steps.enter_context(step(entered, "exchange_shards"))
                session = entered
            elif plan is not None:
                raise TypeError("a rank that receives gives its model and its plan")
            held = None if shards is None else _shards_of(shards)._up_to_date()
            if session is not None:
                session.begin(_plan_of(plan))
            handle.move(held, None if session is None else session.handle, "")
            if session is not None:
                landed(session)
        return ExchangeReceipt(*_settled(handle, session))


@dataclass(frozen=True)
class SharedRead:
    """What one rank did in `load_files_together`, in bytes: read from files, sent, received."""

    read: int
    sent: int
    received: int


def load_files_together(
    model: Model,
    plan: LoadPlan,
    paths: StrPath | Iterable[StrPath],
    group: Group,
    *,
    undeclared: str = "error",
    timeout: float = 60.0,
    max_bytes_in_flight: int = 256 * MIB,
    bucket_nbytes: int = 8 * MIB,
) -> SharedRead:
    """`load_files` by the ranks of a node together: what any of them needs is read by one of them.

    Called by all ranks of ``group``, each in an active reload.  All give the same files, which is
    compared by their inodes, sizes and times.  Ranks read disjoint ranges and send one another what
    they read, as trainers send shards.  The files hold every name that the plans need; names that a
    plan does not declare are an error, or left alone with ``undeclared="skip"``.  Errors as in
    `exchange_shards`.
    """
    exchange = classes.ShardExchange(boxed(group))
    with contextlib.ExitStack() as steps:
        session: Session | None = None
        try:
            with _telling(exchange, lambda: session):
                entered = session_of(model)
                steps.enter_context(step(entered, "load_files_together"))
                session = entered
                exchange.set_options(timeout, max_bytes_in_flight, bucket_nbytes, True)
                session.begin(_plan_of(plan))
                existing = existing_paths(paths)
                exchange.connect_files(plan._handle, existing, _skips(undeclared))
                exchange.move(None, session.handle, "")
                landed(session)
            sent, received, *_ = _settled(exchange, session)
        except Exception as error:
            if session is not None and session.state == "active":
                with contextlib.suppress(RuntimeError):
                    session.handle.fail(str(error))
            raise
    return SharedRead(exchange.read_nbytes(), sent, received)


def _settled(exchange: Any, session: Session | None) -> list[int]:
    """What the exchange moved, once all ranks are through with what landed there."""
    moved: list[int] = exchange.settle(None if session is None else session.handle, "")
    return moved


def send_shards(shards: AnyShards, schedule: ShardSchedule) -> ExchangeReceipt:
    """The trainer's side of an update: `exchange_shards` of a rank that receives nothing."""
    return exchange_shards(schedule, shards=shards)


def receive_shards(model: Model, plan: LoadPlan, schedule: ShardSchedule) -> ExchangeReceipt:
    """The inference side of an update, between `start_reload` and `finish_reload`."""
    return exchange_shards(schedule, model=model, plan=plan)


@contextlib.contextmanager
def _telling(exchange: Any, session: Callable[[], Session | None] | None) -> Iterator[None]:
    """The other ranks wait for this one: they are told what it raises."""
    try:
        yield
    except BaseException as error:
        entered = None if session is None else session()
        # A path may hold bytes that no text has.
        words = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        with contextlib.suppress(Exception):
            exchange.fail(None if entered is None else entered.handle, words)
        raise


def _skips(undeclared: str) -> bool:
    if undeclared not in ("error", "skip"):
        raise ValueError(f"undeclared={undeclared!r}; expected 'error' or 'skip'")
    return undeclared == "skip"


def _all_held(missing: str) -> bool:
    if missing not in ("error", "skip"):
        raise ValueError(f"missing={missing!r}; expected 'error' or 'skip'")
    return missing == "error"


def _shards_of(shards: AnyShards) -> Shards:
    if isinstance(shards, Shards):
        return shards
    if isinstance(shards, Mapping):
        return Shards(shards)
    raise TypeError(f"{type(shards).__name__} is no Shards, nor a mapping of names to pieces")


def _plan_of(plan: LoadPlan | None) -> LoadPlan:
    if isinstance(plan, LoadPlan):
        return plan
    if plan is None:
        raise TypeError("a rank that receives gives its model and its plan")
    raise TypeError(
        f"the plan is {type(plan).__name__}; expected what `plan_loads` or `load_plan` returned"
    )


def boxed(group: Group) -> Any:
    """The group as the library takes it."""
    if isinstance(group, str):
        from torch.distributed import distributed_c10d

        group = distributed_c10d._resolve_process_group(group)  # type: ignore
    if not hasattr(group, "boxed"):
        raise TypeError(
            f"the group is {group!r}; expected a process group that this process is in, as "
            "`torch.distributed.new_group` gives it"
        )
    return group.boxed()
