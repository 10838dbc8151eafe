"""One update of a large vLLM model on a CPU: its loader, and the plan."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm_loaders as cases
from torch import Tensor, nn

import loadplan.vllm

RING_NBYTES = 1 << 31


def arrivals(metas: dict[str, cases.Meta], ring: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Every checkpoint tensor, contiguous, from one ring of memory: no cache holds it before.

    A checkpoint of 60 GB need not exist; each name has the same bytes in every update.
    """
    start = 0
    for name, (shape, dtype) in metas.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if start + nbytes > len(ring):
            start = 0
        yield name, ring[start : start + nbytes].view(dtype).view(shape)
        start += -(-nbytes // 64) * 64


def digest(model: nn.Module) -> int:
    crc = 0
    for _, tensor in sorted(model.named_parameters()):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
        crc = zlib.crc32(flat.numpy(), crc)
    return crc


def seconds(update: Callable[[], Any]) -> float:
    start = time.perf_counter()
    update()
    return time.perf_counter() - start


def measure(case: str, rank: int, size: int, repetitions: int = 5) -> bool:
    """Prints one row; whether both ways left the same bytes."""
    model, metas = cases.build(case, rank, size, large=True)
    ring = torch.randint(0, 256, (RING_NBYTES,), dtype=torch.uint8)
    with cases.tensor_parallel(rank, size):
        targets = loadplan.vllm.targets(model, model.vllm_case[3])
        plan = loadplan.plan_loads(
            targets, [loadplan.ParamMeta(n, s, d) for n, (s, d) in metas.items()]
        )

        def load() -> None:
            targets.load_weights(arrivals(metas, ring))

        def load_by_plan() -> None:
            loadplan.start_reload(targets)
            loadplan.load_planned(targets, plan, arrivals(metas, ring))
            loadplan.finish_reload(targets)

        # The first round touches the memory and compares; it does not count.
        cases.fill(model)
        load()
        wanted = digest(model)
        cases.fill(model)
        load_by_plan()
        equal = digest(model) == wanted
        # In turn, so that a slow spell of the machine hits both.
        rounds = [(seconds(load), seconds(load_by_plan)) for _ in range(repetitions)]
    loader, planned = (min(column) for column in zip(*rounds, strict=True))
    needed = sum(entry.nbytes for entry in plan.entries.values())
    print(
        f"{case:12}{f'{rank}/{size}':>5}{len(metas):>8}{needed / 1e9:9.2f}{plan.trace_seconds:9.3f}"
        f"{loader:12.3f}{planned:9.3f}{loader / planned:7.2f}"
        f"  {'same bytes' if equal else 'BYTES DIFFER'}",
        flush=True,
    )
    return equal


HEADER = (
    f"{'case':12}{'rank':>5}{'names':>8}{'GB':>9}{'plan s':>9}"
    f"{'loader s':>12}{'by plan':>9}{'ratio':>7}"
)
