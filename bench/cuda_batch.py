"""Bytes per second of batched copies on a GPU, beside one ``copy_`` a write and a plain copy.

    ./dev python bench/cuda_batch.py [rounds]
    ./dev python bench/cuda_batch.py --check     the same cases, small, on the CPU: no figures

One layer of Kimi-K2 on rank 1 of 8, the senders' full tensors on the device.  *large*: 384 experts,
gate and up by rows (3.7 MB in one run each), down by columns (7168 runs of 512 bytes).  *casts*:
the same of fewer experts from a checkpoint in float32.  *small*: the norms and biases of 61 layers,
0.8 to 14 KB each.

    batched         load_planned with LOADPLAN_CUDA_BATCH=1
    each            load_planned with LOADPLAN_CUDA_BATCH=0
    bare copy_      one copy_ a write, views made beforehand, without loadplan
    one copy        one contiguous copy_ of as many bytes: what the device can do

ms: between two events of the stream around the call, median of the rounds.  host ms: until the
call returns.  GB/s: bytes read and written / ms.  After each way all bytes are compared with the
loader's.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import loadplan

BF16, F32 = torch.bfloat16, torch.float32
RANK, RANKS = 1, 8


@dataclass
class Case:
    name: str
    weights: dict[str, Tensor]
    live: dict[str, Tensor]
    writes: list[tuple[Tensor, Tensor]]  # where, what: views

    @property
    def nbytes(self) -> int:
        """Read and written."""
        return sum(to.nbytes + what.nbytes for to, what in self.writes)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            to, view = self.place(name, weight)
            to.copy_(view)

    place: Callable[[str, Tensor], tuple[Tensor, Tensor]]


def large(device: str, experts: int, hidden: int, width: int, dtype: torch.dtype = BF16) -> Case:
    shard = width // RANKS
    mine = slice(RANK * shard, (RANK + 1) * shard)
    live = {
        "w13": torch.zeros(experts, 2 * shard, hidden, dtype=BF16, device=device),
        "w2": torch.zeros(experts, hidden, shard, dtype=BF16, device=device),
    }

    def place(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        expert, part = name.split(".")
        if part == "down":
            return live["w2"][int(expert)], weight[:, mine]
        start = 0 if part == "gate" else shard
        return live["w13"][int(expert), start : start + shard], weight[mine]

    weights = {}
    for expert in range(experts):
        for part in ("gate", "up", "down"):
            shape = (hidden, width) if part == "down" else (width, hidden)
            weights[f"{expert}.{part}"] = torch.rand(shape, device=device).to(dtype)
    writes = [place(name, weight) for name, weight in weights.items()]
    kind = "large" if dtype == BF16 else "casts"
    return Case(f"{kind}, {experts} experts", weights, live, writes, place)


def small(device: str, layers: int) -> Case:
    sizes = {"input": 7168, "post": 7168, "q_a": 1536, "kv_a": 512}
    live, weights = {}, {}
    for layer in range(layers):
        for name, size in sizes.items():
            live[f"{layer}.{name}"] = torch.zeros(size, dtype=BF16, device=device)
            weights[f"{layer}.{name}"] = torch.rand(size, device=device).to(BF16)
        live[f"{layer}.bias"] = torch.zeros(384, dtype=F32, device=device)
        weights[f"{layer}.bias"] = torch.rand(384, device=device)

    def place(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        return live[name], weight

    writes = [place(name, weight) for name, weight in weights.items()]
    return Case(f"small, {layers} layers", weights, live, writes, place)


class Clock:
    def __init__(self, device: str) -> None:
        self.is_gpu = device != "cpu"
        self.device_ms: list[float] = []
        self.host_ms: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        if not self.is_gpu:
            work()
            return
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        before = time.perf_counter()
        work()
        self.host_ms.append(1e3 * (time.perf_counter() - before))
        stop.record()
        torch.cuda.synchronize()
        self.device_ms.append(start.elapsed_time(stop))


def check(case: Case, way: str) -> None:
    for to, what in case.writes:
        want = what.to(to.dtype).contiguous()
        if not torch.equal(to.view(torch.uint8), want.view(torch.uint8)):
            raise SystemExit(f"{case.name}: {way} left other bytes than the loader")


def run(case: Case, device: str, rounds: int) -> None:
    targets = loadplan.Targets(case.live, case.load_weights)
    metas = {name: (tuple(weight.shape), weight.dtype) for name, weight in case.weights.items()}
    plan = loadplan.plan_loads(targets, metas)
    ways = {"batched": "1" if device != "cpu" else "reference", "each": "0", "bare copy_": ""}
    clocks = {way: Clock(device) for way in [*ways, "one copy"]}
    flat = torch.empty(case.nbytes // 2, dtype=torch.uint8, device=device)
    there = torch.empty_like(flat)
    for turn in range(rounds + 1):
        if turn == 1:  # what comes first warms up
            clocks = {way: Clock(device) for way in clocks}
        for way, batch in ways.items():
            for tensor in case.live.values():
                tensor.fill_(3)
            if way == "bare copy_":
                clocks[way].time(lambda: [to.copy_(what) for to, what in case.writes])
            else:
                os.environ["LOADPLAN_CUDA_BATCH"] = batch
                loadplan.start_reload(targets)
                clocks[way].time(lambda: loadplan.load_planned(targets, plan, case.weights.items()))
                loadplan.finish_reload(targets)
            check(case, way)
        clocks["one copy"].time(lambda: there.copy_(flat))
    if device == "cpu":
        print(f"{case.name}: {len(case.writes)} writes, bytes as the loader's in every way")
        return
    print(f"{case.name}: {len(case.writes)} writes, {case.nbytes / 2e6:.1f} MB")
    plain = statistics.median(clocks["one copy"].device_ms)
    for way, clock in clocks.items():
        ms, host = statistics.median(clock.device_ms), statistics.median(clock.host_ms)
        speed = case.nbytes / ms / 1e6
        share = f"{plain / ms:.2f} of one copy"
        print(f"  {way:11} {ms:9.3f} ms  host {host:8.3f} ms  {speed:8.1f} GB/s  {share}")


def main(arguments: list[str]) -> None:
    if "--check" in arguments:
        run(large("cpu", 4, 896, 256), "cpu", 1)
        run(large("cpu", 4, 896, 256, F32), "cpu", 1)
        run(small("cpu", 8), "cpu", 1)
        return
    if not torch.cuda.is_available():
        print("no GPU: nothing is measured; --check runs the cases on the CPU")
        return
    rounds = int(arguments[0]) if arguments else 11
    free, _ = torch.cuda.mem_get_info()
    experts = min(384, int(free * 0.8) // (3 * 7168 * 2048 * 2 * 10 // 8))
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, {rounds} rounds")
    run(large("cuda", experts, 7168, 2048), "cuda", rounds)
    torch.cuda.empty_cache()
    run(large("cuda", max(1, experts // 4), 7168, 2048, F32), "cuda", rounds)
    torch.cuda.empty_cache()
    run(small("cuda", 61), "cuda", rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
