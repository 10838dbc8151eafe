"""What an atomic update costs beside a plain one, in one process, interleaved.

    ./dev python bench/atomic_update.py [MiB]

A model of `MiB` mebibytes (default 512) in float32, 64 tensors; each is a column slice (rank 1 of
2) or a whole matrix in turn.  Wall and CPU seconds, best of 5 after one warm round; every update is
compared with the loader's bytes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

import torch
from torch import Tensor

import loadplan

TENSORS = 64
ROUNDS = 5


def main(mebibytes: int) -> None:
    rows = 512
    columns = mebibytes * (1 << 20) // (TENSORS * rows * 4)
    live = {str(index): torch.zeros(rows, columns) for index in range(TENSORS)}
    wide = {name: (rows, 2 * columns if int(name) % 2 else columns) for name in live}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            live[name].copy_(weight[:, columns:] if int(name) % 2 else weight)

    targets = loadplan.Targets(live, load_weights)
    plan = loadplan.plan_loads(
        targets, {name: (shape, torch.float32) for name, shape in wide.items()}
    )
    weights = {name: torch.rand(shape) for name, shape in wide.items()}
    ways = {
        "plain": (False, ""),
        "atomic, in memory": (True, ""),
        "atomic, in a file": (True, "0"),
        "atomic, aborted": (True, ""),
    }
    best: dict[str, tuple[float, float]] = {}
    for turn in range(ROUNDS + 1):
        for way, (atomic, memory) in ways.items():
            os.environ["LOADPLAN_ATOMIC_MEMORY"] = memory
            for tensor in live.values():
                tensor.fill_(turn)
            wall, cpu = time.perf_counter(), time.process_time()
            loadplan.start_reload(targets, atomic=atomic)
            loadplan.load_planned(targets, plan, weights.items())
            if way.endswith("aborted"):
                loadplan.abort_reload(targets)
            else:
                loadplan.finish_reload(targets)
            took = time.perf_counter() - wall, time.process_time() - cpu
            for name, tensor in live.items():
                expected = weights[name][:, -columns:]
                assert bool(
                    (tensor == turn).all()
                    if way.endswith("aborted")
                    else (tensor == expected).all()
                )
            if turn:
                best[way] = tuple(map(min, took, best.get(way, took)))  # type: ignore[assignment]
    plain = best["plain"]
    print(f"{mebibytes} MiB in {TENSORS} tensors, best of {ROUNDS}")
    for way, (wall, cpu) in best.items():
        print(
            f"{way:18} wall {wall:.4f} s ({wall / plain[0]:.2f})  "
            f"CPU {cpu:.4f} s ({cpu / plain[1]:.2f})"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
