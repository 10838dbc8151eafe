"""Updates of few names with many bytes: the engine's `copy_`s against one plan.

    ./dev python bench/update_bytes.py [--mib 256] [--rounds 7]

Each case lands ``--mib`` mebibytes in so many tensors, on all threads that torch uses.  Both ways
take turns, go first in turn, and fill tensors of their own, which are compared after every round.
*best*: ratio of the best rounds; *median*: of the ratios of each round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import loadplan

RANK, RANKS = 1, 8
COLUMNS = 4096
Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    label: str
    tensors: int
    cut: Cut
    share: tuple[int, int] = (1, 1)  # of rows and of columns that a rank keeps: one of so many
    source: torch.dtype = torch.bfloat16
    live: torch.dtype = torch.bfloat16


def rows(weight: Tensor) -> Tensor:
    share = weight.shape[0] // RANKS
    return weight.narrow(0, RANK * share, share)


def columns(weight: Tensor) -> Tensor:
    share = weight.shape[1] // RANKS
    return weight.narrow(1, RANK * share, share)


CASES = (
    Case("whole, float32", 8, lambda w: w, source=torch.float32, live=torch.float32),
    Case("whole, bfloat16", 8, lambda w: w),
    Case("whole, in 1,024 tensors", 1024, lambda w: w),
    Case("rows of rank 1 of 8", 8, rows, (RANKS, 1)),
    Case("columns of rank 1 of 8", 8, columns, (1, RANKS)),
    Case("bfloat16 to float32", 8, lambda w: w, live=torch.float32),
    Case("float32 to bfloat16", 8, lambda w: w, source=torch.float32),
)


def race(case: Case, mib: int, rounds: int) -> None:
    wide = COLUMNS // case.share[1]
    tall = (mib << 20) // (case.tensors * wide * case.live.itemsize)
    shape = (tall * case.share[0], COLUMNS)
    models = [
        {str(i): torch.zeros(tall, wide, dtype=case.live) for i in range(case.tensors)}
        for _ in range(2)
    ]

    def loader(live: dict[str, Tensor]) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, weight in weights:
                live[name].copy_(case.cut(weight))

        return load_weights

    eager = loader(models[0])
    targets = loadplan.Targets(models[1], loader(models[1]))
    plan = loadplan.plan_loads(targets, {name: (shape, case.source) for name in models[1]})
    if plan.has_fallbacks:
        raise SystemExit(f"{case.label}: the plan has fallbacks, nothing was measured")
    # Of what is cut one tensor stands for all, for want of room.
    full = torch.randn(shape).to(case.source)
    weights = {name: full.clone() if case.share == (1, 1) else full for name in models[1]}

    def by_plan(items: Iterable[tuple[str, Tensor]]) -> None:
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, items)
        loadplan.finish_reload(targets)

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for live in models:
            for tensor in live.values():
                tensor.fill_(turn)
        gc.collect()
        for way in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (eager, by_plan)[way](weights.items())
            if turn:
                times[way].append(time.perf_counter() - start)
        for name, tensor in models[1].items():
            if not torch.equal(tensor, models[0][name]):
                raise SystemExit(f"{case.label}: `{name}` differs from what the loader leaves")
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    gbs = [(mib << 20) / min(way) / 1e9 for way in times]
    print(
        f"{case.label:<26}{min(times[0]) * 1e3:>10.1f}{min(times[1]) * 1e3:>10.1f}"
        f"{gbs[0]:>9.1f}{gbs[1]:>9.1f}{min(times[0]) / min(times[1]):>8.2f}{ratio:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{options.mib} MiB landed, {torch.get_num_threads()} threads, {options.rounds} rounds")
    print(
        f"{'case':<26}{'loader':>10}{'plan':>10} ms{'GB/s':>6}{'GB/s':>9}{'best':>8}{'median':>8}"
    )
    for case in CASES:
        race(case, options.mib, options.rounds)


if __name__ == "__main__":
    main()
