"""Loaders that exchange tensors with the other ranks: what each rank of `test_collectives` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from shard_ranks import Context
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import loadplan

Live = dict[str, Tensor]


def broadcast(w: Tensor, live: Live) -> None:
    w = w.clone()
    dist.broadcast(w, 0)
    live["a"].copy_(w)


def broadcast_later(w: Tensor, live: Live) -> None:
    w = w.clone()
    work = dist.broadcast(w, 0, async_op=True)
    work.wait()
    live["a"].copy_(w)


def broadcast_where_it_is(w: Tensor, live: Live) -> None:
    dist.broadcast(w, 0)
    live["a"].copy_(w)


def all_reduce(w: Tensor, live: Live) -> None:
    w = w.clone()
    dist.all_reduce(w)
    live["a"].copy_(w)


def all_gather(w: Tensor, live: Live) -> None:
    parts = [torch.empty_like(w[:2]) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, w[2:].contiguous())
    live["a"].copy_(torch.cat(parts))


def all_gather_into_scratch(w: Tensor, live: Live) -> None:
    whole = torch.empty(4, 4)
    dist.all_gather_into_tensor(whole, w[:2])
    live["a"].copy_(whole)


def scatter_into_scratch(w: Tensor, live: Live) -> None:
    part = torch.empty(2, 4)
    dist.scatter(part, list(w.split(2)) if dist.get_rank() == 0 else None)
    live["a"][:2].copy_(part)


def broadcast_live(w: Tensor, live: Live) -> None:
    live["a"].copy_(w)
    dist.broadcast(live["a"], 0)


def gather_into_live(w: Tensor, live: Live) -> None:
    dist.all_gather_into_tensor(live["a"], w[:2])


def functional_all_reduce(w: Tensor, live: Live) -> None:
    live["a"].copy_(functional.all_reduce(w, "sum", dist.group.WORLD))


def functional_all_gather(w: Tensor, live: Live) -> None:
    live["a"].copy_(functional.all_gather_single(w[1:3], 0, dist.group.WORLD))


def distribute(w: Tensor, live: Live) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    live["a"][:2].copy_(distribute_tensor(w, mesh, [Shard(0)]).to_local())


def send(w: Tensor, live: Live) -> None:
    if dist.get_rank() == 0:
        dist.send(w, 1)
        live["a"].copy_(w)
    else:
        dist.recv(live["a"], 0)


OF_ONE_NAME: list[Callable[[Tensor, Live], None]] = [
    broadcast,
    broadcast_later,
    broadcast_where_it_is,
    all_reduce,
    all_gather,
    all_gather_into_scratch,
    scatter_into_scratch,
    broadcast_live,
    gather_into_live,
    functional_all_reduce,
    functional_all_gather,
    distribute,
    send,
]


def updates_like_the_loader(context: Context, load: Callable[[Iterable], None], live: Live) -> None:
    """Plans, and compares three updates with the loader's.  Weights differ between ranks."""
    model = loadplan.Targets(live, load)
    generator = torch.Generator().manual_seed(context.rank)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(t.shape, generator=generator) for name, t in live.items()}

    before = {name: t.clone() for name, t in live.items()}
    plan = loadplan.plan_loads(model, loadplan.metadata(draw()))
    for name, t in live.items():
        assert torch.equal(t, before[name]), f"planning changed {name}"
    for _ in range(3):
        weights = draw()
        for t in live.values():
            t.zero_()
        load((name, w.clone()) for name, w in weights.items())
        expected = {name: t.clone() for name, t in live.items()}
        for t in live.values():
            t.zero_()
        loadplan.start_reload(model)
        loadplan.load_planned(model, plan, ((name, w.clone()) for name, w in weights.items()))
        loadplan.finish_reload(model)
        for name, t in live.items():
            assert torch.equal(t, expected[name]), name
    kinds = {name: entry.kind for name, entry in plan.entries.items()}
    reasons = {name: entry.reason for name, entry in plan.entries.items()}
    context.report("kinds", load=load.__name__, kinds=kinds, reasons=reasons)


def of_one_name(context: Context) -> None:
    for exchange in OF_ONE_NAME:
        live = {"a": torch.zeros(4, 4), "b": torch.zeros(4)}

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, w in weights:
                if name == "a":
                    exchange(w, live)  # noqa: B023
                else:
                    live["b"].copy_(w)  # noqa: B023

        load.__name__ = exchange.__name__
        updates_like_the_loader(context, load, live)


def of_live_tensors(context: Context) -> None:
    """Rank 0 has the weights, the others get what it loaded."""
    live = {"a": torch.zeros(4, 4), "b": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, w in weights:
            live[name].copy_(w)
        for t in live.values():
            dist.broadcast(t, 0)

    updates_like_the_loader(context, load, live)


def of_none(context: Context) -> None:
    """Ranks that wait for each other exchange nothing."""
    live = {"a": torch.zeros(4, 4), "b": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        dist.barrier()
        for name, w in weights:
            live[name].copy_(w)

    updates_like_the_loader(context, load, live)


def of_own_tensors(context: Context) -> None:
    """What the others say could steer anything."""
    live = {"a": torch.zeros(4, 4), "b": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        for name, w in weights:
            live[name].copy_(w)

    updates_like_the_loader(context, load, live)
