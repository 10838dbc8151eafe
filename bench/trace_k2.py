"""What tracing adds to an engine's loader: Kimi-K2's 69,975 names on `trace` and on `meta`.

    python bench/trace_k2.py [--parallel tp|ep] [--repeat 3] [--layers 61]

The loader is that of ``moe_engine.py``, called once.  It is the same code for both devices and only
it is timed; parameters are on the meta device, shapes are real, ranks are rank 1 of 8.

The scan is half of the time and the same on both devices, which flatters the ratio.  A second row
times the same loader with the expert mapping indexed, where little is left but tensor operations.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator

import moe_engine
import torch
from moe_engine import (
    RANK,
    RANKS,
    ExpertLoader,
    load_columns,
    load_part_of_rows,
    load_rows,
    load_whole,
)
from torch import Tensor

import loadplan

TARGET = 1.15  # seconds on trace / seconds on meta, with the scan

HIDDEN, VOCAB, EXPERTS = 7168, 163_840, 384
DENSE_WIDTH, EXPERT_WIDTH = 18_432, 2048
HEADS, NOPE, ROPE, VALUE = 64, 128, 64, 128
Q_LORA, KV_LORA = 1536, 512

Name = tuple[str, tuple[int, ...], torch.dtype]


def checkpoint_names(layers: int) -> Iterator[Name]:
    """Every tensor of the checkpoint, in the order of its files: layer by layer."""

    def bf16(name: str, *shape: int) -> Name:
        return name, shape, torch.bfloat16

    def mlp(prefix: str, width: int) -> Iterator[Name]:
        yield bf16(f"{prefix}.gate_proj.weight", width, HIDDEN)
        yield bf16(f"{prefix}.up_proj.weight", width, HIDDEN)
        yield bf16(f"{prefix}.down_proj.weight", HIDDEN, width)

    yield bf16("model.embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield bf16(f"{at}.input_layernorm.weight", HIDDEN)
        yield bf16(f"{at}.self_attn.q_a_proj.weight", Q_LORA, HIDDEN)
        yield bf16(f"{at}.self_attn.q_a_layernorm.weight", Q_LORA)
        yield bf16(f"{at}.self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), Q_LORA)
        yield bf16(f"{at}.self_attn.kv_a_proj_with_mqa.weight", KV_LORA + ROPE, HIDDEN)
        yield bf16(f"{at}.self_attn.kv_a_layernorm.weight", KV_LORA)
        yield bf16(f"{at}.self_attn.kv_b_proj.weight", HEADS * (NOPE + VALUE), KV_LORA)
        yield bf16(f"{at}.self_attn.o_proj.weight", HIDDEN, HEADS * VALUE)
        yield bf16(f"{at}.post_attention_layernorm.weight", HIDDEN)
        if layer == 0:
            yield from mlp(f"{at}.mlp", DENSE_WIDTH)
            continue
        yield bf16(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
        yield f"{at}.mlp.gate.e_score_correction_bias", (EXPERTS,), torch.float32
        yield from mlp(f"{at}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(EXPERTS):
            yield from mlp(f"{at}.mlp.experts.{expert}", EXPERT_WIDTH)
    yield bf16("model.norm.weight", HIDDEN)
    yield bf16("lm_head.weight", VOCAB, HIDDEN)


# ------------------------------------------------------------------ the engine's side
def load_stacked(param: Tensor, loaded: Tensor, part: int) -> None:
    """Two replicated low-rank projections in one parameter."""
    start = Q_LORA if part else 0
    param.data.narrow(0, start, loaded.shape[0]).copy_(loaded)


class Engine(moe_engine.Engine):
    """Of Kimi-K2, on the meta device."""

    FUSED = (
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
        ("fused_qkv_a_proj", "q_a_proj", 0),
        ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
    )

    def __init__(self, layers: int, expert_parallel: bool, indexed: bool) -> None:
        super().__init__(EXPERTS, self.FUSED, indexed=indexed, device="meta")
        held = EXPERTS // RANKS if expert_parallel else EXPERTS
        first = RANK * held if expert_parallel else 0
        width = EXPERT_WIDTH if expert_parallel else EXPERT_WIDTH // RANKS
        load_expert = ExpertLoader({first + e: e for e in range(held)}, cut=not expert_parallel)

        self.add("model.embed_tokens.weight", load_rows, VOCAB // RANKS, HIDDEN)
        for layer in range(layers):
            at = f"model.layers.{layer}"
            heads, low_rank = HEADS // RANKS, Q_LORA + KV_LORA + ROPE
            attention = f"{at}.self_attn"
            self.add(f"{at}.input_layernorm.weight", load_whole, HIDDEN)
            self.add(f"{attention}.fused_qkv_a_proj.weight", load_stacked, low_rank, HIDDEN)
            self.add(f"{attention}.q_a_layernorm.weight", load_whole, Q_LORA)
            self.add(f"{attention}.q_b_proj.weight", load_rows, heads * (NOPE + ROPE), Q_LORA)
            self.add(f"{attention}.kv_a_layernorm.weight", load_whole, KV_LORA)
            self.add(f"{attention}.kv_b_proj.weight", load_rows, heads * (NOPE + VALUE), KV_LORA)
            self.add(f"{attention}.o_proj.weight", load_columns, HIDDEN, heads * VALUE)
            self.add(f"{at}.post_attention_layernorm.weight", load_whole, HIDDEN)
            if layer == 0:
                self.add_mlp(f"{at}.mlp", DENSE_WIDTH // RANKS)
                continue
            bias = f"{at}.mlp.gate.e_score_correction_bias"
            self.add(f"{at}.mlp.gate.weight", load_whole, EXPERTS, HIDDEN)
            self.add(bias, load_whole, EXPERTS, dtype=torch.float32)
            self.add_mlp(f"{at}.mlp.shared_experts", EXPERT_WIDTH // RANKS)
            self.add(f"{at}.mlp.experts.w13_weight", load_expert, held, 2 * width, HIDDEN)
            self.add(f"{at}.mlp.experts.w2_weight", load_expert, held, HIDDEN, width)
        self.add("model.norm.weight", load_whole, HIDDEN)
        self.add("lm_head.weight", load_rows, VOCAB // RANKS, HIDDEN)

    def add_mlp(self, prefix: str, width: int) -> None:
        self.add(f"{prefix}.gate_up_proj.weight", load_part_of_rows, 2 * width, HIDDEN)
        self.add(f"{prefix}.down_proj.weight", load_columns, HIDDEN, width)


# ------------------------------------------------------------------ measuring
def seconds(load: Callable[[], set[str]], expected: set[str]) -> float:
    gc.collect()
    start = time.perf_counter()
    written = load()
    elapsed = time.perf_counter() - start
    if written != expected:
        raise SystemExit("the loader left parameters unwritten: nothing was measured")
    return elapsed


def on_meta(engine: Engine, names: list[Name]) -> float:
    """The floor: the loader on tensors that have nothing but geometry."""
    weights = [(n, torch.empty(shape, dtype=dtype, device="meta")) for n, shape, dtype in names]
    return seconds(lambda: engine.load_weights(weights), set(engine.params))


def on_trace(engine: Engine, names: list[Name]) -> float:
    """The same tensors on `trace`, with every copy recorded."""
    metas = [loadplan.ParamMeta(*name) for name in names]
    with loadplan.trace(loadplan.Targets(engine.params), metas) as tracing:
        weights = [(name, tracing.tensor(name)) for name, _, _ in names]
        return seconds(lambda: engine.load_weights(weights), set(engine.params))


def until_planned(engine: Engine, names: list[Name]) -> tuple[float, float]:
    """Seconds of `plan_loads`, the loader included, and gibibytes that the plan reads."""
    metas = [loadplan.ParamMeta(*name) for name in names]
    targets = loadplan.Targets(engine.params, load_weights=engine.load_weights)
    loadplan.start_reload(targets)
    gc.collect()
    start = time.perf_counter()
    plan = loadplan.plan_loads(targets, metas)
    elapsed = time.perf_counter() - start
    loadplan.abort_reload(targets)
    return elapsed, sum(entry.nbytes for entry in plan.entries.values()) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("tp", "ep"), default="tp")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many is printed")
    parser.add_argument("--layers", type=int, default=61)
    options = parser.parse_args()

    names = list(checkpoint_names(options.layers))
    print(f"K2/{options.parallel.upper()}{RANKS} rank {RANK}: {len(names):,} names")
    print(f"{'expert mapping':<16}{'meta s':>9}{'trace s':>9}{'ratio':>8}{'us per name more':>19}")
    for label, indexed in (("scanned", False), ("indexed", True)):
        engine = Engine(options.layers, options.parallel == "ep", indexed)
        meta, trace = [], []
        for _ in range(options.repeat):  # interleaved: a slow spell of the machine hits both
            meta.append(on_meta(engine, names))
            trace.append(on_trace(engine, names))
        ratio = min(trace) / min(meta)
        more = (min(trace) - min(meta)) / len(names) * 1e6
        verdict = (
            "" if indexed else f"  target <= {TARGET}: {'met' if ratio <= TARGET else 'missed'}"
        )
        print(f"{label:<16}{min(meta):>9.3f}{min(trace):>9.3f}{ratio:>8.3f}{more:>19.2f}{verdict}")
    elapsed, gib = until_planned(engine, names)
    print(f"plan_loads with the mapping indexed: {elapsed:.3f} s; the plan reads {gib:.1f} GiB")


if __name__ == "__main__":
    main()
