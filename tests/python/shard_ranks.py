"""Processes that exchange shards: what each rank of the tests of `test_shard_exchange` runs.

Ranks 0 to 3 train, the others infer.  All can make the whole checkpoint of any step, so that each
inference rank compares its live bytes with what its loader leaves.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import loadplan

F32, BF16 = torch.float32, torch.bfloat16
NUM_TRAINERS = 4
EXPERTS, HIDDEN, WIDTH, VOCAB = 8, 20, 14, 37

Weights = dict[str, Tensor]


def shapes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """A small mixture of experts; several extents are divisible by neither 2, 3 nor 4."""
    result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "embed.weight": ((VOCAB, HIDDEN), BF16),
        "scale": ((), F32),
    }
    for layer in range(2):
        prefix = f"layers.{layer}."
        for name, rows in (("q", 24), ("k", 12), ("v", 12)):
            result[f"{prefix}attn.{name}.weight"] = ((rows, HIDDEN), BF16)
        result[f"{prefix}attn.o.weight"] = ((HIDDEN, 24), BF16)
        result[f"{prefix}attn.q_a.weight"] = ((8, HIDDEN), BF16)
        result[f"{prefix}attn.kv_a.weight"] = ((4, HIDDEN), BF16)
        result[f"{prefix}norm.weight"] = ((HIDDEN,), BF16)
        result[f"{prefix}A_log"] = ((12,), F32)
        result[f"{prefix}unused"] = ((16,), F32)
        result[f"{prefix}clip"] = ((4, 4), F32)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate", (WIDTH, HIDDEN)),
                ("up", (WIDTH, HIDDEN)),
                ("down", (HIDDEN, WIDTH)),
            ):
                result[f"{prefix}experts.{expert}.{name}.weight"] = (shape, BF16)
    return result


def metas() -> list[loadplan.ParamMeta]:
    return [loadplan.ParamMeta(name, *of_name) for name, of_name in shapes().items()]


def checkpoint(step: int) -> Weights:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes().items()
    }


def cut(extent: int, rank: int, size: int) -> tuple[int, int]:
    start, stop = extent * rank // size, extent * (rank + 1) // size
    return start, stop - start


class Engine(loadplan.Targets):
    """What one inference rank of ``size`` holds, and its loader: fused, sharded, cast, padded."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        vocab = -(-VOCAB // size)
        width = cut(WIDTH, rank, size)[1]
        tensors: dict[str, Tensor] = {
            "embed": torch.full((vocab, HIDDEN), 5.0, dtype=BF16),
            "scale": torch.zeros(2),
        }
        for layer in range(2):
            qkv = sum(cut(rows, rank, size)[1] for rows in (24, 12, 12))
            tensors[f"{layer}.qkv"] = torch.zeros(qkv, HIDDEN, dtype=BF16)
            tensors[f"{layer}.o"] = torch.zeros(HIDDEN, cut(24, rank, size)[1], dtype=BF16)
            tensors[f"{layer}.a"] = torch.zeros(HIDDEN, 12, dtype=BF16)
            tensors[f"{layer}.norm"] = torch.zeros(HIDDEN, dtype=F32)
            tensors[f"{layer}.A"] = torch.zeros(12)
            tensors[f"{layer}.clip"] = torch.zeros(4, 4)
            tensors[f"{layer}.w13"] = torch.zeros(EXPERTS, 2 * width, HIDDEN, dtype=BF16)
            tensors[f"{layer}.w2"] = torch.zeros(EXPERTS, HIDDEN, width, dtype=BF16)
        self.named_tensors = tensors
        super().__init__(tensors, load_weights=lambda weights: self.load(tensors, weights))

    def load(self, live: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        rank, size = self.rank, self.size
        held: dict[str, Tensor] = {}
        for name, weight in weights:
            if name == "embed.weight":
                share = live["embed"].shape[0]
                real = min(VOCAB - rank * share, share)
                live["embed"][:real].copy_(weight.narrow(0, rank * share, real))
                live["embed"][real:].zero_()
                continue
            if name == "scale":
                live["scale"][1].copy_(weight)
                continue
            _, layer, rest = name.split(".", 2)
            if rest.startswith("attn."):
                kind = rest.split(".")[1]
                if kind in ("q", "k", "v"):
                    at = 0
                    for other, rows in (("q", 24), ("k", 12), ("v", 12)):
                        start, count = cut(rows, rank, size)
                        if other == kind:
                            live[f"{layer}.qkv"].narrow(0, at, count).copy_(
                                weight.narrow(0, start, count)
                            )
                        at += count
                elif kind == "o":
                    live[f"{layer}.o"].copy_(weight.narrow(1, *cut(24, rank, size)))
                else:
                    held[f"{layer}.{kind}"] = weight
                    if f"{layer}.q_a" in held and f"{layer}.kv_a" in held:  # one write of two names
                        both = torch.cat([held[f"{layer}.q_a"], held[f"{layer}.kv_a"]])
                        live[f"{layer}.a"].copy_(both.t())
            elif rest == "norm.weight":
                live[f"{layer}.norm"].copy_(weight)  # a cast
            elif rest == "A_log":
                live[f"{layer}.A"].copy_(-weight.exp())  # derived
            elif rest == "clip":
                live[f"{layer}.clip"].copy_(
                    weight * 2 if weight.sum() > 0 else weight
                )  # falls back
            elif rest.startswith("experts."):
                _, expert, kind, _ = rest.split(".")
                start, count = cut(WIDTH, rank, size)
                if kind == "down":
                    live[f"{layer}.w2"][int(expert)].copy_(weight.narrow(1, start, count))
                else:
                    half = live[f"{layer}.w13"][int(expert)].chunk(2)[kind == "up"]
                    half.copy_(weight.narrow(0, start, count))

    def wrong_bytes(self, before: Weights, weights: Weights) -> list[str]:
        """Names whose live bytes are not what the loader leaves on ``before``."""
        self.load(before, weights.items())
        return [
            name
            for name, live in self.named_tensors.items()
            if not torch.equal(
                live.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)
            )
        ]

    def snapshot(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.named_tensors.items()}


class Trainer:
    """Rank ``rank`` of the trainers: holds its shards and changes them in place."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shards: loadplan.Shards

    def step(self, weights: Weights) -> None:
        raise NotImplementedError


class Tree(nn.Module):
    """A module whose parameters have the names of the checkpoint."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name, weight in weights.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(weight.clone()))


class FsdpTrainer(Trainer):
    """FSDP2: every parameter cut by rows, unevenly where it must be."""

    def __init__(self, rank: int, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(rank)
        # FSDP2 cuts no scalars: it is left to DTensor's replication.
        weights = {name: w for name, w in checkpoint(0).items() if w.dim() > 0}
        self.module = Tree(weights)
        for layer in self.module.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.scale = checkpoint(0)["scale"]
        named = [*self.module.named_parameters(), ("scale", self.scale)]
        self.shards = loadplan.Shards.of_tensors(named)

    def step(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                parts = weights[name].chunk(NUM_TRAINERS)
                if self.rank < len(parts):
                    param.to_local().copy_(parts[self.rank])
            self.scale.copy_(weights["scale"])


class MegatronTrainer(Trainer):
    """TP 2 x DP 2, experts dealt to EP 2 with ETP 2."""

    LAYOUT = loadplan.ParallelLayout(
        tp=2,
        dp=2,
        ep=2,
        etp=2,
        tp_dims={
            r"\.(q|k|v|gate|up)\.weight": 0,
            r"\.(o|down)\.weight": 1,
        },
        expert=r"\.experts\.(\d+)\.",
        num_experts=EXPERTS,
    )

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.tensors = {name: shard.clone() for name, shard in self.cut(checkpoint(0)).items()}
        self.shards = loadplan.Shards.of_layout(metas(), self.LAYOUT, self.tensors, rank)

    def cut(self, weights: Weights) -> Weights:
        tp, ep = self.rank % 2, self.rank // 2
        result = {}
        for name, weight in weights.items():
            if ".experts." in name and int(name.split(".")[3]) // (EXPERTS // 2) != ep:
                continue
            kind = name.split(".")[-2] if "." in name else ""
            if kind in ("q", "k", "v", "gate", "up"):
                weight = weight.chunk(2, dim=0)[tp]
            elif kind in ("o", "down"):
                weight = weight.chunk(2, dim=1)[tp]
            result[name] = weight
        return result

    def step(self, weights: Weights) -> None:
        for name, shard in self.cut(weights).items():
            self.tensors[name].copy_(shard)


@dataclass
class Context:
    rank: int
    world: int
    report: Callable[..., None]

    @property
    def trains(self) -> bool:
        return self.rank < NUM_TRAINERS


def plan_of(engine: Engine) -> loadplan.LoadPlan:
    loadplan.start_reload(engine)
    plan = loadplan.plan_loads(engine, metas())
    loadplan.abort_reload(engine)
    return plan


def matrix(context: Context, trainers: tuple[str, ...], receivers: tuple[int, ...]) -> None:
    """Every kind of trainer against every number of inference ranks, three updates each."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", list(range(NUM_TRAINERS)))
    trainer: Trainer | None = None
    for kind in trainers:
        if context.trains:
            fsdp = kind == "fsdp"
            trainer = FsdpTrainer(context.rank, mesh) if fsdp else MegatronTrainer(context.rank)
        for size in receivers:
            group = dist.new_group(list(range(NUM_TRAINERS + size)))
            if context.rank >= NUM_TRAINERS + size:
                continue
            updates(context, group, trainer, size, f"{kind} to {size}")


def updates(
    context: Context, group: dist.ProcessGroup, trainer: Trainer | None, size: int, label: str
) -> None:
    # Small buckets and few bytes in flight, so that all paths of a long update are taken.
    options: dict[str, Any] = {"timeout": 20, "bucket_nbytes": 512, "max_bytes_in_flight": 2048}
    if trainer is not None:
        schedule = loadplan.schedule_shards(group, shards=trainer.shards, **options)
        for step in range(1, 4):
            trainer.step(checkpoint(step))
            receipt = loadplan.send_shards(trainer.shards, schedule)
            assert receipt.sent == schedule.traffic.sent[context.rank]
        context.report(label, traffic=schedule.traffic.total, broadcast=schedule.traffic.broadcast)
        return
    engine = Engine(context.rank - NUM_TRAINERS, size)
    plan = plan_of(engine)
    schedule = loadplan.schedule_shards(group, plan=plan, **options)
    needed = sum(entry.nbytes for entry in plan.entries.values())
    for step in range(1, 4):
        before = engine.snapshot()
        loadplan.start_reload(engine)
        receipt = loadplan.receive_shards(engine, plan, schedule)
        loadplan.finish_reload(engine)
        assert receipt.received == needed, (receipt, needed)
        wrong = engine.wrong_bytes(before, checkpoint(step))
        assert wrong == [], f"{label}, step {step}: {wrong}"
    kinds = {entry.kind for entry in plan.entries.values()}
    context.report(label, kinds=sorted(kinds), in_place=receipt.in_place)


def broadcast(context: Context, fault: str) -> None:
    """Whole tensors from rank 0 to two inference ranks."""
    group = dist.new_group()
    engine = None if context.rank == 0 else Engine(context.rank - 1, 2)
    plan = None if engine is None else plan_of(engine)

    def weights(step: int) -> Iterable[tuple[str, Tensor]]:
        for name, weight in checkpoint(step).items():
            if fault == "sender" and step == 2 and name == "layers.1.A_log":
                raise OSError("the trainer is out of memory")
            yield name, weight

    for step in range(1, 3):
        try:
            if engine is None:
                given = checkpoint(step) if step == 1 else weights(step)
                sent = loadplan.broadcast_weights(group, weights=given, bucket_nbytes=4096)
                assert sent == sum(weight.nbytes for weight in checkpoint(step).values())
                continue
            before = engine.snapshot()
            loadplan.start_reload(engine)
            if fault == "receiver" and step == 2 and context.rank == 1:
                loadplan.load_planned(engine, plan, [("scale", torch.ones(()))])
            loadplan.broadcast_weights(group, model=engine, plan=plan, bucket_nbytes=4096)
            loadplan.finish_reload(engine)
            wrong = engine.wrong_bytes(before, checkpoint(step))
            assert wrong == [], wrong
        except (OSError, ValueError, RuntimeError) as error:
            state = None if engine is None else loadplan.state(engine).state
            context.report("raised", error=str(error), state=state)
            return
    context.report("updated")


def read_together(context: Context, path: str) -> None:
    """All ranks infer and read one file; what any of them needs is read once."""
    group = dist.new_group()
    plans = []
    for rank in range(context.world):
        other = Engine(rank, context.world)
        if rank == context.rank:
            engine = other
        plans.append(plan_of(other))
    needed = 0
    for name, (shape, dtype) in shapes().items():
        mask = torch.zeros(shape, dtype=torch.bool)
        for plan in plans:
            for box in plan.entries[name].reads:
                mask[tuple(slice(*interval) for interval in box)] = True
        needed += int(mask.sum()) * dtype.itemsize
    before = engine.snapshot()
    loadplan.start_reload(engine)
    receipt = loadplan.load_files_together(
        engine, plans[context.rank], path, group, bucket_nbytes=512, max_bytes_in_flight=2048
    )
    loadplan.finish_reload(engine)
    wrong = engine.wrong_bytes(before, checkpoint(7))
    assert wrong == [], wrong
    context.report("read", read=receipt.read, needed=needed, received=receipt.received)


def read_apart(context: Context, path: str, fault: str) -> None:
    """Rank 1 does not take part: it has another path, or no reload in progress."""
    group = dist.new_group()
    engine = Engine(context.rank, context.world)
    plan = plan_of(engine)
    if context.rank != 1 or fault != "idle":
        loadplan.start_reload(engine)
    if context.rank == 1 and fault == "path":
        path += ".not-there"
    start = time.monotonic()
    try:
        loadplan.load_files_together(engine, plan, path, group)
    except (OSError, RuntimeError) as error:
        seconds, state = time.monotonic() - start, loadplan.state(engine).state
        context.report("raised", error=repr(error), seconds=seconds, state=state)


class Large(loadplan.Targets):
    """One direct matrix, large enough that a failure finds it half way."""

    SHAPE = (4096, 1024)

    def __init__(self) -> None:
        self.live = {"w": torch.zeros(self.SHAPE), "v": torch.zeros(4)}
        super().__init__(self.live, load_weights=self.load)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.live[name].copy_(weight)

    @classmethod
    def metas(cls) -> list[loadplan.ParamMeta]:
        return [loadplan.ParamMeta("w", cls.SHAPE, F32), loadplan.ParamMeta("v", (4,), F32)]

    @classmethod
    def shards(
        cls, rank: int, holders: int, rows: int | None = None, packs: bool = False
    ) -> loadplan.Shards:
        total, columns = rows or cls.SHAPE[0], cls.SHAPE[1]
        pieces: list[Any] = []
        for holder in range(holders):
            start, count = cut(total, holder, holders)
            mine = torch.ones(count, columns) if holder == rank else None
            if packs and mine is not None:
                mine = mine.t().contiguous().t()
            pieces.append((holder, ((start, start + count), (0, columns)), mine))
        v = [(h, ((0, 4),), torch.ones(4) if h == rank else None) for h in range(holders)]
        named = {"w": pieces, "v": v}
        declared = [loadplan.ParamMeta("w", (total, columns), F32), cls.metas()[1]]
        return loadplan.Shards(named, declared)


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Less than a message of `Large` can be allocated."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    taken = []  # what was given back and is still mapped
    with suppress(RuntimeError):
        while True:
            taken.append(torch.empty(1 << 20, dtype=torch.uint8))
    try:
        yield
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


def expect_error(context: Context, call: Callable[[], object], engine: Large | None) -> None:
    """Reports what was raised, after how long, and what the session says of it."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001
        seconds = time.monotonic() - start
        state = None if engine is None else loadplan.state(engine).state
        context.report("raised", error=str(error), seconds=seconds, state=state)
    else:
        context.report("no error")


def failing(context: Context, fault: str, holders: int = 2) -> None:
    """Two trainers and two inference ranks; rank 1 is the one with the fault."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    timeout = 2.0 if fault == "slow" else 15.0
    options: dict[str, Any] = {
        "timeout": timeout,
        "bucket_nbytes": 1 << 12,
        "max_bytes_in_flight": 1 << 14,
    }
    if fault == "killed half way":  # through a message, most likely: there are few and large ones
        options.update(bucket_nbytes=1 << 26, max_bytes_in_flight=1 << 26)
    if fault == "memory":  # a sender packs more than it then can allocate
        options["bucket_nbytes"] = 1 << 26
    is_faulty = context.rank == 1
    engine: Large | None = None
    plan: loadplan.LoadPlan | None = None
    shards: loadplan.Shards | None = None
    if context.rank < holders:
        rows = 4095 if fault == "shape" and is_faulty else None
        shards = Large.shards(context.rank, holders, rows, packs=fault == "memory")
    else:
        engine = Large()
        loadplan.start_reload(engine)
        plan = loadplan.plan_loads(engine, Large.metas())
        loadplan.abort_reload(engine)
    if fault == "shape":
        expect_error(
            context,
            lambda: loadplan.schedule_shards(group, shards=shards, plan=plan, **options),
            engine,
        )
        return
    schedule = loadplan.schedule_shards(group, shards=shards, plan=plan, **options)

    updates: list[bool] = []

    def update() -> None:
        if engine is None:
            assert shards is not None
            loadplan.send_shards(shards, schedule)
            return
        assert plan is not None
        loadplan.start_reload(engine)
        other = plan
        if fault == "plan" and context.rank == holders and updates:
            other = loadplan.plan_loads(engine, Large.metas())
        loadplan.receive_shards(engine, other, schedule)
        loadplan.finish_reload(engine)
        updates.append(True)

    if fault == "memory":

        def limited() -> None:
            with no_more_memory() if is_faulty else nullcontext():
                update()

        expect_error(context, limited, engine)
        expect_error(context, update, engine)
        return
    update()
    assert engine is None or bool((engine.live["w"] == 1).all())
    if fault == "none":
        context.report("updated")
        return
    killed = fault.startswith("killed")
    if killed and is_faulty:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if fault == "slow" and is_faulty:
        time.sleep(2 * timeout)
    if killed:  # until it happens
        expect_error(context, lambda: [update() for _ in range(100)], engine)
    else:
        expect_error(context, update, engine)
    if engine is not None:
        expect_error(context, update, engine)  # the group is not used again
    if killed:
        report_rest(context, group)


def report_rest(context: Context, group: dist.ProcessGroup) -> None:
    """What is left of a group that failed: work for a processor, the time that its end takes."""
    before = time.process_time()
    time.sleep(0.5)
    busy = time.process_time() - before
    start = time.monotonic()
    dist.destroy_process_group(group)
    context.report("rest", busy=busy, destroyed=time.monotonic() - start)


class Picky(loadplan.Targets):
    """Its loader, called with real bytes, raises on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.live = {"w": torch.zeros(6, 4), "v": torch.zeros(4)}
        super().__init__(self.live, load_weights=self.load)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "v" and weight.sum().item() == 4 and self.rank == 1:
                raise OSError("the loader has no more disk")
            self.live[name].copy_(weight)


def picky_loader(context: Context, transport: str, path: str) -> None:
    group = dist.new_group()
    weights = {"w": torch.ones(6, 4), "v": torch.ones(4)}
    engine = Picky(context.rank)
    loadplan.start_reload(engine)
    plan = loadplan.plan_loads(engine, weights)
    loadplan.abort_reload(engine)

    def update() -> None:
        if transport == "files":
            loadplan.start_reload(engine, atomic=True)
            loadplan.load_files_together(engine, plan, path, group, timeout=20)
            return
        pieces = {
            name: [(0, tuple((0, extent) for extent in w.shape), None if context.rank else w)]
            for name, w in weights.items()
        }
        shards = loadplan.Shards(pieces, weights) if context.rank == 0 else None
        schedule = loadplan.schedule_shards(group, shards=shards, plan=plan, timeout=20)
        loadplan.start_reload(engine, atomic=True)
        loadplan.exchange_shards(schedule, shards=shards, model=engine, plan=plan)

    expect_error(context, update, engine)
    old = not any(live.any() for live in engine.live.values())
    context.report("rest", old=old)


def with_the_store(context: Context, fault: str) -> None:
    """Rank 0 has the store of the group in it, and stops half way."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    options: dict[str, Any] = {"timeout": 3.0, "bucket_nbytes": 1 << 12}
    if context.rank == 0:
        shards = Large.shards(0, 1)
        weights = ((meta.name, torch.ones(*meta.shape)) for meta in Large.metas())

        def stop() -> None:
            context.report("stops")
            time.sleep(0.5)  # for the report
            os.kill(os.getpid(), signal.SIGSTOP)

        def given() -> Iterator[tuple[str, Tensor]]:
            yield next(weights)
            stop()

        if fault == "broadcast":
            loadplan.broadcast_weights(group, weights=given(), bucket_nbytes=16, timeout=3.0)
        schedule = loadplan.schedule_shards(group, shards=shards, **options)
        schedule._handle.move(shards._handle, None, "")
        return stop()  # while the others wait for the end of the update
    engine = Large()
    loadplan.start_reload(engine)
    plan = loadplan.plan_loads(engine, Large.metas())

    def broadcast() -> None:
        loadplan.broadcast_weights(group, model=engine, plan=plan, timeout=3.0)

    if fault == "broadcast":
        return expect_error(context, broadcast, engine)
    schedule = loadplan.schedule_shards(group, plan=plan, **options)
    expect_error(context, lambda: loadplan.receive_shards(engine, plan, schedule), engine)


def dying_broadcast(context: Context, dies: int) -> None:
    """Of a few large buckets, until a rank is gone."""
    group = dist.new_group()
    if context.rank == dies:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    engine = Large()
    loadplan.start_reload(engine)
    plan = loadplan.plan_loads(engine, Large.metas())
    loadplan.abort_reload(engine)

    def update() -> None:
        if context.rank == 0:
            weights = [(meta.name, torch.ones(*meta.shape)) for meta in Large.metas()]
            loadplan.broadcast_weights(group, weights=weights)
            return
        loadplan.start_reload(engine)
        loadplan.broadcast_weights(group, model=engine, plan=plan)
        loadplan.finish_reload(engine)

    receives = None if context.rank == 0 else engine
    expect_error(context, lambda: [update() for _ in range(1000)], receives)
    report_rest(context, group)


def scheduled_again(context: Context) -> None:
    """Two schedules of one group, one after the other; in the second a receiver fails."""
    group = dist.new_group()
    for attempt in range(2):
        if context.rank == 0:
            shards = Large.shards(0, 1)
            schedule = loadplan.schedule_shards(group, shards=shards, timeout=10)
            expect_error(context, lambda: loadplan.send_shards(shards, schedule), None)  # noqa: B023
            continue
        engine = Large()
        loadplan.start_reload(engine)
        plan = loadplan.plan_loads(engine, Large.metas())
        if attempt == 1 and context.rank == 1:
            loadplan.load_planned(engine, plan, [("v", torch.ones(4))])
        schedule = loadplan.schedule_shards(group, plan=plan, timeout=10)
        receive = lambda: loadplan.receive_shards(engine, plan, schedule)  # noqa: B023, E731
        expect_error(context, receive, engine)


def run_rank(
    rank: int,
    world: int,
    ports: Any,
    hosts: bool,
    function: Callable[..., None],
    arguments: Any,
    reports: Any,
) -> None:
    torch.set_num_threads(1)

    def report(label: str, **values: Any) -> None:
        reports.put((rank, label, values))

    try:
        # The port, or rank 0 says on which it is.
        master = hosts and rank == 0
        port = 0 if master else ports.get()
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=master,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        if master:
            for _ in range(world - 1):
                ports.put(store.port)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        function(Context(rank, world, report), *arguments)
    except BaseException:
        report("crashed", traceback=traceback.format_exc())
    # Nothing that is left of a broken group is waited for.
    reports.close()
    reports.join_thread()
    os._exit(0)


@dataclass(frozen=True)
class Report:
    rank: int
    label: str
    values: dict[str, Any]


def launch(
    world: int,
    function: Callable[..., None],
    *arguments: Any,
    timeout: float = 90,
    stops: tuple[int, ...] = (),
) -> list[Report]:
    """Runs ``function`` on ``world`` ranks; what they reported, by rank.  Fails if one hangs.

    Ranks in ``stops`` stop themselves; where rank 0 does, the store is in its process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "loadplan", __name__])
    # In this process: no rank takes it along when it dies.
    hosts = 0 in stops
    store = None
    ports = context.Queue()
    if not hosts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(world):
            ports.put(store.port)
    reports = context.Queue()
    ranks = [
        context.Process(
            target=run_rank, args=(rank, world, ports, hosts, function, arguments, reports)
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    received: list[Report] = []
    awaited = [process for rank, process in enumerate(ranks) if rank not in stops]
    while any(process.is_alive() for process in awaited) and time.monotonic() < deadline:
        while not reports.empty():
            received.append(Report(*reports.get()))
        time.sleep(0.02)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        ranks[rank].kill()
    hung = [rank for rank in hung if rank not in stops]
    time.sleep(0.05)
    while not reports.empty():
        received.append(Report(*reports.get()))
    del store
    assert not hung, f"ranks {hung} did not end; reported: {received}"
    crashed = [r for r in received if r.label == "crashed"]
    assert received, f"no rank said anything; exit codes {[rank.exitcode for rank in ranks]}"
    assert not crashed, "\n".join(f"rank {r.rank}\n{r.values['traceback']}" for r in crashed)
    return sorted(received, key=lambda r: r.rank)
