"""What tracing adds to an engine's loader: Kimi-K2's 69,975 names on `trace` and on `meta`.

    python bench/trace_k2.py [--parallel tp|ep] [--repeat 3] [--layers 61]

The loader is written as engines write it: a dict of parameters, fused projections found in a list
of substrings, experts found by a scan of `(param_name, weight_name, expert_id, shard_id)`, every
parameter with its own weight loader, one `load_weights` call.  It is the same code for both devices
and only it is timed; parameters are on the meta device, shapes are real, ranks are rank 1 of 8.

The scan is half of the time and the same on both devices, which flatters the ratio.  A second row
times the same loader with the expert mapping indexed, where little is left but tensor operations.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import loadplan

TARGET = 1.15  # seconds on trace / seconds on meta, with the scan
RANK, RANKS = 1, 8

HIDDEN, VOCAB, EXPERTS = 7168, 163_840, 384
DENSE_WIDTH, EXPERT_WIDTH = 18_432, 2048
HEADS, NOPE, ROPE, VALUE = 64, 128, 64, 128
Q_LORA, KV_LORA = 1536, 512

Name = tuple[str, tuple[int, ...], torch.dtype]
Weights = Iterable[tuple[str, Tensor]]
ExpertRoute = tuple[str, str, int, str]  # param_name, weight_name, expert_id, shard_id


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
def load_whole(param: Tensor, loaded: Tensor) -> None:
    assert param.shape == loaded.shape
    param.data.copy_(loaded)


def load_rows(param: Tensor, loaded: Tensor) -> None:
    """Column parallel: this rank's block of rows."""
    share = param.shape[0]
    param.data.copy_(loaded.narrow(0, RANK * share, share))


def load_columns(param: Tensor, loaded: Tensor) -> None:
    """Row parallel: this rank's block of columns."""
    share = param.shape[1]
    param.data.copy_(loaded.narrow(1, RANK * share, share))


def load_half_of_rows(param: Tensor, loaded: Tensor, half: int) -> None:
    """Gate and up in one parameter, each cut by rank."""
    share = param.shape[0] // 2
    place = param.data.narrow(0, half * share, share)
    place.copy_(loaded.narrow(0, RANK * share, share))


def load_stacked(param: Tensor, loaded: Tensor, part: int) -> None:
    """Two replicated low-rank projections in one parameter."""
    start = Q_LORA if part else 0
    param.data.narrow(0, start, loaded.shape[0]).copy_(loaded)


@dataclass(frozen=True)
class ExpertLoader:
    """Cuts every expert by rank, or keeps whole experts of which this rank has a block."""

    local_of: dict[int, int]
    cut: bool

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: str, expert_id: int) -> bool:
        local = self.local_of.get(expert_id, -1)
        if local == -1:
            return False
        expert = param.data[local]
        if shard_id == "w2":
            if self.cut:
                share = expert.shape[1]
                loaded = loaded.narrow(1, RANK * share, share)
            expert.copy_(loaded)
            return True
        share = expert.shape[0] // 2
        if self.cut:
            loaded = loaded.narrow(0, RANK * share, share)
        expert.narrow(0, 0 if shard_id == "w1" else share, share).copy_(loaded)
        return True


class Engine:
    """The parameters of one rank and `load_weights`, as engines write them for such models."""

    FUSED = (  # param_name, weight_name, part
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
        ("fused_qkv_a_proj", "q_a_proj", 0),
        ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
    )

    def __init__(self, layers: int, expert_parallel: bool, indexed: bool) -> None:
        self.params: dict[str, Tensor] = {}
        self.indexed = indexed
        self.routes: list[ExpertRoute] = [
            (
                "experts.w2_" if shard_id == "w2" else "experts.w13_",
                f"experts.{e}.{name}.",
                e,
                shard_id,
            )
            for e in range(EXPERTS)
            for shard_id, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
        ]
        self.route_of = {
            weight_name: [route] for route in self.routes for weight_name in route[1:2]
        }
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

    def add(
        self,
        name: str,
        loader: Callable[..., object],
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        data = torch.empty(shape, dtype=dtype, device="meta")
        param = nn.Parameter(data, requires_grad=False)
        param.weight_loader = loader
        self.params[name] = param

    def add_mlp(self, prefix: str, width: int) -> None:
        self.add(f"{prefix}.gate_up_proj.weight", load_half_of_rows, 2 * width, HIDDEN)
        self.add(f"{prefix}.down_proj.weight", load_columns, HIDDEN, width)

    def routes_for(self, name: str) -> list[ExpertRoute]:
        """All routes, for the scan; or the one that fits, where the mapping is indexed."""
        if not self.indexed:
            return self.routes
        _, found, rest = name.partition(".mlp.experts.")
        return self.route_of["experts." + rest.removesuffix("weight")] if found else []

    def load_weights(self, weights: Weights) -> set[str]:
        params = self.params
        written: set[str] = set()
        for name, loaded in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            for param_name, weight_name, part in self.FUSED:
                if weight_name not in name or "mlp.experts." in name:
                    continue
                name = name.replace(weight_name, param_name)
                param = params[name]
                param.weight_loader(param, loaded, part)
                break
            else:
                is_expert = False
                for param_name, weight_name, expert_id, shard_id in self.routes_for(name):
                    if weight_name not in name:
                        continue
                    is_expert = True
                    mapped = name.replace(weight_name, param_name)
                    param = params[mapped]
                    if param.weight_loader(param, loaded, shard_id=shard_id, expert_id=expert_id):
                        name = mapped
                        break
                else:
                    if is_expert:  # an expert of another rank
                        continue
                    param = params[name]
                    param.weight_loader(param, loaded)
            written.add(name)
        return written


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
