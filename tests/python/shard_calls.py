"""Ranks that do not make the calls that the others expect: what `test_shard_calls` runs."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from shard_ranks import Context, expect_error, no_more_memory
from torch import Tensor

import loadplan
from loadplan.broadcast import _Wire

Weights = dict[str, Tensor]


class Copies(loadplan.Targets):
    """A target for each name."""

    def __init__(self, weights: Weights) -> None:
        self.live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        super().__init__(self.live, load_weights=self.load)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.live[name].copy_(weight)


def planned(weights: Weights) -> tuple[Copies, loadplan.LoadPlan]:
    model = Copies(weights)
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, weights)
    loadplan.abort_reload(model)
    return model, plan


def whole(weights: Weights, rank: int = 0) -> dict[str, list[Any]]:
    return {
        name: [(rank, tuple((0, extent) for extent in weight.shape), weight)]
        for name, weight in weights.items()
    }


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "missing": {"missing": "no"},
    "another missing": {"missing": "skip"},
    "time-out": {"timeout": -1.0},
    "kind of time-out": {"timeout": "long"},
}


def raised_while_all_are_there(context: Context, call: Callable[[], object]) -> None:
    """A rank that is gone would be an error of another kind."""

    def interrupted() -> None:
        try:
            call()
        except KeyboardInterrupt as error:
            raise RuntimeError("interrupted") from error

    expect_error(context, interrupted, None)
    store = dist.distributed_c10d._get_default_store()
    store.add("done", 1)
    deadline = time.monotonic() + 10
    while store.add("done", 0) < context.world and time.monotonic() < deadline:
        time.sleep(0.01)


def same_calls(context: Context, fault: str) -> None:
    """Rank 0 sends, the others receive.  What each says is in its report."""
    group = dist.new_group()
    options: dict[str, Any] = {"timeout": 60.0}
    weights = {"w": torch.ones(6, 4)}

    def scheduled(**roles: Any) -> loadplan.ShardSchedule:
        return loadplan.schedule_shards(group, **roles, **options)

    def says(call: Callable[[], object]) -> None:
        raised_while_all_are_there(context, call)

    if fault == "other ranks":
        pieces = [(0, ((0, 3), (0, 4)), torch.ones(3, 4)), (7, ((3, 6), (0, 4)), torch.ones(3, 4))]
        if context.rank == 0:
            return says(lambda: scheduled(shards={"w": pieces}))
        return says(lambda: scheduled(plan=planned(weights)[1]))
    if fault in WRONG_OPTIONS:
        if context.rank == 1:
            options.update(WRONG_OPTIONS[fault])
            return says(lambda: scheduled(plan=planned(weights)[1]))
        return says(lambda: scheduled(shards=whole(weights)))
    if fault == "no shards":
        if context.rank == 0:
            return says(lambda: scheduled(shards={"w": []}))
        return says(lambda: scheduled(plan=planned(weights)[1]))
    if fault in ("memory", "thread"):  # names so long that a rank cannot take what others say
        if fault == "memory":  # the memory of a thread is there still
            if context.rank == 0:
                scheduled(shards=whole(weights))
            else:
                scheduled(plan=planned(weights)[1])
        long = {**weights, "n" * (8 << 20): torch.ones(1)}
        if context.rank == 0:
            return says(lambda: scheduled(shards=whole(long)))
        plan = planned(weights)[1]

        def limited() -> None:
            with no_more_memory() if context.rank == 1 else nullcontext():
                scheduled(plan=plan)

        return says(limited)

    if fault == "broadcasts":
        if context.rank == 0:
            return says(lambda: loadplan.broadcast_weights(group, weights=weights.items()))
        return says(lambda: scheduled(plan=planned(weights)[1]))

    shards = loadplan.Shards(whole(weights))
    other = loadplan.Shards(whole({"w": torch.full((6, 4), 2.0)}))
    if context.rank == 0:
        first = scheduled(shards=shards)
        if fault == "swapped":
            scheduled(shards=other)
        return says(lambda: loadplan.send_shards(shards, first))
    model, plan = planned(weights)
    first = scheduled(plan=plan)
    if fault == "swapped":  # two models that are laid out alike
        second_model, second_plan = planned(weights)
        second = scheduled(plan=second_plan)
        loadplan.start_reload(second_model)
        return says(lambda: loadplan.receive_shards(second_model, second_plan, second))
    if fault == "schedules":
        return says(lambda: scheduled(plan=plan))
    no_model: Any = {"w": model.live["w"]}
    return says(lambda: loadplan.receive_shards(no_model, plan, first))


def moved(context: Context) -> None:
    """Parameters that are moved between updates: FSDP2's by `module.to`, others by `p.data =`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = dist.new_group()
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 7)
    scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights["scale"] = scale.detach().clone()
    changes = [1.0, 2.0, 3.0]
    mesh = DeviceMesh("cpu", [0, 1])
    if context.rank < 2:
        fully_shard(module, mesh=mesh)
        shards = loadplan.Shards.of_tensors([*module.named_parameters(), ("scale", scale)])
        schedule = loadplan.schedule_shards(group, shards=shards, timeout=30)
        for change in changes:
            module.to(torch.float64).to(torch.float32)
            scale.data = scale.data.clone()
            with torch.no_grad():
                for parameter in (*module.parameters(), scale):
                    parameter.mul_(change)
            loadplan.send_shards(shards, schedule)
        return context.report("sent")
    model, plan = planned(weights)
    schedule = loadplan.schedule_shards(group, plan=plan, timeout=30)
    for change in changes:
        loadplan.start_reload(model)
        loadplan.receive_shards(model, plan, schedule)
        loadplan.finish_reload(model)
        weights = {name: weight * change for name, weight in weights.items()}
        wrong = [name for name, live in model.live.items() if not torch.equal(live, weights[name])]
        assert wrong == [], (change, wrong)
    context.report("received")


def part_of_the_names(context: Context) -> None:
    """Adapters only: what is frozen is held by nobody.  Rank 0 trains and infers."""
    group = dist.new_group()
    weights = {"frozen": torch.ones(3), "adapter": torch.ones(4, 2), "nothing": torch.ones(0)}
    shards = loadplan.Shards(whole({"adapter": weights["adapter"]})) if context.rank == 0 else None
    model, plan = planned(weights)
    schedule = loadplan.schedule_shards(group, shards=shards, plan=plan, missing="skip", timeout=30)
    for update in range(2):
        loadplan.start_reload(model)
        if update == 0:
            loadplan.load_planned(model, plan, [("frozen", weights["frozen"])])
        weights["adapter"].add_(1)
        loadplan.exchange_shards(schedule, shards=shards, model=model, plan=plan)
        partial = ["adapter", "nothing"] if update else None
        loadplan.finish_reload(model, partial=partial)
        assert torch.equal(model.live["adapter"], torch.full((4, 2), 2.0 + update))
        assert torch.equal(model.live["frozen"], torch.ones(3))
    context.report("updated")


def in_own_memory(context: Context) -> None:
    """A trainer whose shards lie in the memory of the engine: rows change places, in place."""
    group = dist.new_group()
    rows = torch.arange(8.0).reshape(4, 2)
    model = Copies({"w": rows})
    model.live["w"].copy_(rows)
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, {"w": rows})
    loadplan.abort_reload(model)
    halves = [model.live["w"][2:], model.live["w"][:2]]
    pieces = [
        (rank, ((2 * rank, 2 * rank + 2), (0, 2)), halves[rank] if rank == context.rank else None)
        for rank in range(2)
    ]
    shards = loadplan.Shards({"w": pieces}, {"w": rows})
    schedule = loadplan.schedule_shards(
        group, shards=shards, plan=plan, timeout=30, bucket_nbytes=8
    )
    loadplan.start_reload(model)
    loadplan.exchange_shards(schedule, shards=shards, model=model, plan=plan)
    loadplan.finish_reload(model)
    assert torch.equal(model.live["w"], torch.cat([rows[2:], rows[:2]])), model.live["w"]
    context.report("updated")


def broadcast(context: Context, case: str) -> None:
    group = dist.new_group()
    weights = {f"w{i}": torch.full((3, 5), float(i)) for i in range(4)}
    buffer = torch.empty(3, 5)

    def in_one_buffer() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            yield name, buffer.copy_(weight)

    if context.rank == 0:
        given = None if case == "no weights" else in_one_buffer()
        call = lambda: loadplan.broadcast_weights(group, weights=given, bucket_nbytes=200)  # noqa: E731
        return expect_error(context, call, None)
    model, plan = planned(weights)
    loadplan.start_reload(model)
    forgets = case == "no plan" and context.rank == 1

    def receive() -> None:
        loadplan.broadcast_weights(group, model=model, plan=None if forgets else plan)
        loadplan.finish_reload(model)
        assert all(torch.equal(live, weights[name]) for name, live in model.live.items())

    expect_error(context, receive, None)


def interrupted(context: Context, transport: str, path: str) -> None:
    """Rank 1 gets a signal while it waits for rank 0: it is raised when the wait is over."""
    group = dist.new_group()
    weights = {"w": torch.ones(6, 4)}
    model, plan = planned(weights)
    loadplan.start_reload(model, atomic=True)
    shards = loadplan.Shards(whole(weights)) if context.rank == 0 else None

    def update() -> None:
        if transport == "files":
            loadplan.load_files_together(model, plan, path, group, timeout=60)
            return
        loadplan.exchange_shards(schedule, shards=shards, model=model, plan=plan)

    schedule = loadplan.schedule_shards(group, shards=shards, plan=plan, timeout=60)
    if context.rank == 0:
        time.sleep(1)
    if context.rank == 1:
        # What runs in the background of a shell ignores it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    raised_while_all_are_there(context, update)
    context.report("rest", old=not model.live["w"].any())


def half_sent(context: Context, rank: int, count: int) -> None:
    """A signal or an error finds ``rank`` between two broadcasts of one message."""
    group = dist.new_group()
    weights = {f"w{i}": torch.ones(3, 5) for i in range(4)}
    broadcast = _Wire._broadcast
    calls = itertools.count(1)

    def limited(wire: _Wire, tensor: Tensor) -> Tensor:
        result = broadcast(wire, tensor)
        if next(calls) == count:
            raise KeyboardInterrupt if rank == 0 else RuntimeError("no memory for it")
        return result

    if context.rank == rank:
        _Wire._broadcast = limited  # type: ignore[method-assign]
    options: dict[str, Any] = {"bucket_nbytes": 64, "timeout": 60}
    if context.rank == 0:
        given: Any = weights if rank else weights.items()
        call = lambda: loadplan.broadcast_weights(group, weights=given, **options)  # noqa: E731
        return raised_while_all_are_there(context, call)
    model, plan = planned(weights)
    loadplan.start_reload(model)
    raised_while_all_are_there(
        context, lambda: loadplan.broadcast_weights(group, model=model, plan=plan, **options)
    )


def files_of_their_own(context: Context, paths: list[str], options: dict[str, Any]) -> None:
    group = dist.new_group()
    weights = {"w": torch.ones(6, 4)}
    model, plan = planned(weights)
    loadplan.start_reload(model)
    path = paths[context.rank % len(paths)]
    raised_while_all_are_there(
        context,
        lambda: loadplan.load_files_together(model, plan, path, group, timeout=60, **options),
    )
