"""One warm layerwise update of a large vLLM model on a CPU: vLLM's own reload, and the plan."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm_loaders as cases
from measure import RING_NBYTES, arrivals, digest
from torch import nn

import loadplan.vllm

# Sizes at which memory shows; these cases have none of their own.
cases._CASES["llama_gptq"].big.update(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
)

HEADER = (
    f"{'case':12}{'rank':>5}{'names':>7}{'model GB':>10}{'vLLM s':>9}{'by plan':>9}{'ratio':>7}"
    f"{'vLLM peak MB':>14}{'by plan':>9}{'staged MB':>11}"
)


def peak_growth(update: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and how far the process grew at most beyond what it held before, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    start = time.perf_counter()
    update()
    seconds = time.perf_counter() - start
    return seconds, (_status("VmHWM") - before) / 1e3


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def measure(case: str, rank: int, size: int, process: Callable[[nn.Module], None]) -> bool:
    """Prints one row; whether both ways left the same bytes."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model, metas = cases.build(case, rank, size, large=True)
    config = model.vllm_case[3]
    ring = torch.randint(0, 56, (RING_NBYTES,), dtype=torch.uint8)
    loadplan.record_metadata_for_reloading(model)
    cases.load(model, arrivals(metas, ring))
    process(model)
    targets = loadplan.vllm.targets(model, config)
    plan = None
    staged = 0

    def by_vllm() -> None:
        with set_current_vllm_config(config), cases._default_dtype(config.model_config.dtype):
            initialize_layerwise_reload(model)
            model.load_weights(arrivals(metas, ring))
            finalize_layerwise_reload(model, config.model_config)

    def by_plan() -> None:
        nonlocal plan, staged
        loadplan.start_reload(targets, mode="layerwise")
        if plan is None:
            declared = [loadplan.ParamMeta(n, s, d) for n, (s, d) in metas.items()]
            plan = loadplan.plan_loads(targets, declared)
        loadplan.load_planned(targets, plan, arrivals(metas, ring))
        staged = loadplan.finish_reload(targets).peak_staging_nbytes

    with cases.tensor_parallel(rank, size):
        # Another ring, so that equal digests say that both have written.
        wanted = digest(model)
        ring.add_(1)
        by_vllm()
        theirs = digest(model)
        ring.sub_(1)
        by_plan()
        equal = digest(model) == wanted and theirs != wanted
        rounds = [(peak_growth(by_vllm), peak_growth(by_plan)) for _ in range(3)]
    (loader, loader_peak), (planned, planned_peak) = (
        (min(s for s, _ in column), max(p for _, p in column))
        for column in zip(*rounds, strict=True)
    )
    total = sum(p.nbytes for p in model.parameters())
    print(
        f"{case:12}{f'{rank}/{size}':>5}{len(metas):>7}{total / 1e9:10.2f}{loader:9.3f}"
        f"{planned:9.3f}{loader / planned:7.2f}{loader_peak:14.0f}{planned_peak:9.0f}"
        f"{staged / 1e6:11.0f}  {'same bytes' if equal else 'BYTES DIFFER'}",
        flush=True,
    )
    return equal
