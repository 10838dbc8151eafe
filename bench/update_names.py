"""Updates of models with many names: the engine's loader against one plan.

    ./dev python bench/update_names.py [--rounds 5]

Kimi-K2's 69,975 names and Qwen3-30B-A3B's 18,867, experts fused, rank 1 of 8, with tiny tensors:
what is left is the price of a name.  The loader is that of ``moe_engine.py``, scanning its table of
experts or with the table indexed.  By plan: all names in one call of `load_planned`, in buckets of
100, and one by one from a generator.  *handed over*: the pairs are iterated in Python and two lists
go to the library, which does nothing.

All ways take turns and fill their own tensors, which are compared after every round.  CPU time of
the process, medians: other programs leave it as it is.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from moe_engine import (
    RANK,
    RANKS,
    Engine,
    ExpertLoader,
    Fused,
    Weights,
    load_columns,
    load_part_of_rows,
    load_rows,
    load_whole,
)
from torch import Tensor

import loadplan
from loadplan._sessions import session_of

HIDDEN, WIDTH, VOCAB = 32, 32, 64
BUCKET = 100

GATE_AND_UP = (("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))

Shape = tuple[int, ...]


class Model:
    """A checkpoint's names with their shapes, and the engines that load it."""

    def __init__(self, label: str, layers: int, experts: int) -> None:
        self.label = f"{label}, TP{RANKS} rank {RANK}"
        self.layers = layers
        self.experts = experts

    fused: tuple[Fused, ...]

    def attention(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        raise NotImplementedError

    def is_dense(self, layer: int) -> bool:
        return False

    def mlp(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        engine.add(f"{at}.gate_up_proj.weight", load_part_of_rows, 2 * WIDTH // RANKS, HIDDEN)
        engine.add(f"{at}.down_proj.weight", load_columns, HIDDEN, WIDTH // RANKS)
        yield from self.projections(at)

    def projections(self, at: str) -> Iterator[tuple[str, Shape]]:
        yield f"{at}.gate_proj.weight", (WIDTH, HIDDEN)
        yield f"{at}.up_proj.weight", (WIDTH, HIDDEN)
        yield f"{at}.down_proj.weight", (HIDDEN, WIDTH)

    def gate(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        engine.add(f"{at}.gate.weight", load_whole, self.experts, HIDDEN)
        yield f"{at}.gate.weight", (self.experts, HIDDEN)

    def build(self, indexed: bool) -> tuple[Engine, dict[str, Shape]]:
        engine = Engine(self.experts, self.fused, indexed=indexed)
        load_expert = ExpertLoader({e: e for e in range(self.experts)}, cut=True)
        names: dict[str, Shape] = {}
        share = WIDTH // RANKS
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            engine.add(name, load_rows, VOCAB // RANKS, HIDDEN)
            names[name] = (VOCAB, HIDDEN)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                engine.add(f"{at}.{norm}.weight", load_whole, HIDDEN)
                names[f"{at}.{norm}.weight"] = (HIDDEN,)
            names.update(self.attention(f"{at}.self_attn", engine))
            if self.is_dense(layer):
                names.update(self.mlp(f"{at}.mlp", engine))
                continue
            names.update(self.gate(f"{at}.mlp", engine))
            engine.add(f"{at}.mlp.experts.w13_weight", load_expert, self.experts, 2 * share, HIDDEN)
            engine.add(f"{at}.mlp.experts.w2_weight", load_expert, self.experts, HIDDEN, share)
            for expert in range(self.experts):
                names.update(self.projections(f"{at}.mlp.experts.{expert}"))
        engine.add("model.norm.weight", load_whole, HIDDEN)
        names["model.norm.weight"] = (HIDDEN,)
        return engine, names


class Qwen3Moe(Model):
    fused = (
        ("qkv_proj", "q_proj", 0),
        ("qkv_proj", "k_proj", 1),
        ("qkv_proj", "v_proj", 2),
        *GATE_AND_UP,
    )

    def attention(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        engine.add(f"{at}.qkv_proj.weight", load_part_of_rows, 3 * WIDTH // RANKS, HIDDEN)
        engine.add(f"{at}.o_proj.weight", load_columns, HIDDEN, WIDTH // RANKS)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{at}.{name}.weight", (WIDTH, HIDDEN)
        yield f"{at}.o_proj.weight", (HIDDEN, WIDTH)
        for name in ("q_norm", "k_norm"):
            engine.add(f"{at}.{name}.weight", load_whole, HIDDEN)
            yield f"{at}.{name}.weight", (HIDDEN,)


class KimiK2(Model):
    fused = GATE_AND_UP

    def is_dense(self, layer: int) -> bool:
        return layer == 0

    def attention(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            engine.add(f"{at}.{name}.weight", load_whole, WIDTH, HIDDEN)
            yield f"{at}.{name}.weight", (WIDTH, HIDDEN)
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            engine.add(f"{at}.{name}.weight", load_whole, HIDDEN)
            yield f"{at}.{name}.weight", (HIDDEN,)
        for name in ("q_b_proj", "kv_b_proj"):
            engine.add(f"{at}.{name}.weight", load_rows, WIDTH // RANKS, HIDDEN)
            yield f"{at}.{name}.weight", (WIDTH, HIDDEN)
        engine.add(f"{at}.o_proj.weight", load_columns, HIDDEN, WIDTH // RANKS)
        yield f"{at}.o_proj.weight", (HIDDEN, WIDTH)

    def gate(self, at: str, engine: Engine) -> Iterator[tuple[str, Shape]]:
        yield from super().gate(at, engine)
        name = f"{at}.gate.e_score_correction_bias"
        engine.add(name, load_whole, self.experts)
        yield name, (self.experts,)
        yield from self.mlp(f"{at}.shared_experts", engine)


def in_buckets(items: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    for start in range(0, len(items), BUCKET):
        yield items[start : start + BUCKET]


def race(model: Model, rounds: int) -> None:
    scanning, names = model.build(indexed=False)
    indexed, _ = model.build(indexed=True)
    live, _ = model.build(indexed=True)
    targets = loadplan.Targets(live.params, live.load_weights)
    plan = loadplan.plan_loads(targets, {n: (s, torch.bfloat16) for n, s in names.items()})

    def hand_over(weights: Weights) -> None:
        loadplan.start_reload(targets)
        session = session_of(targets)
        session.begin(plan)
        names, tensors = [], []
        for name, tensor in weights:
            names.append(name)
            tensors.append(tensor)
        session.handle.deliver_fallbacks(names, tensors)  # there are none
        loadplan.abort_reload(targets)

    def by_plan(calls: Iterable[Weights]) -> None:
        loadplan.start_reload(targets)
        for weights in calls:
            loadplan.load_planned(targets, plan, weights)
        loadplan.finish_reload(targets)

    ways: dict[str, Callable[[list[tuple[str, Tensor]]], object]] = {
        "eager, scanning": scanning.load_weights,
        "eager, indexed": indexed.load_weights,
        "by plan, one call": lambda items: by_plan([items]),
        f"by plan, buckets of {BUCKET}": lambda items: by_plan(in_buckets(items)),
        "by plan, from a generator": lambda items: by_plan([iter(items)]),
        "handed over": hand_over,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        flat = torch.randn(sum(torch.Size(s).numel() for s in names.values())).bfloat16()
        views = flat.split([torch.Size(s).numel() for s in names.values()])
        items = [(n, v.view(s)) for v, (n, s) in zip(views, names.items(), strict=True)]
        for way, load in ways.items():
            if way.startswith("by plan"):
                for param in live.params.values():
                    param.data.fill_(float("nan"))
            gc.collect()
            start = time.process_time()
            load(items)
            if turn:
                seconds[way].append(time.process_time() - start)
            for name, param in live.params.items() if way.startswith("by plan") else ():
                if not torch.equal(param, scanning.params[name]):
                    raise SystemExit(f"`{name}` differs from what the eager loader leaves")
    print(f"{model.label}: {len(names):,} names, CPU, median of {rounds}")
    print(f"  {'way':<28}{'ms':>9}{'us/name':>9}{'eager/way':>11}{'indexed/way':>13}")
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for way, median in medians.items():
        print(
            f"  {way:<28}{median * 1e3:>9.1f}{median / len(names) * 1e6:>9.2f}"
            f"{medians['eager, scanning'] / median:>11.1f}"
            f"{medians['eager, indexed'] / median:>13.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    race(Qwen3Moe("Qwen3-30B-A3B", layers=48, experts=128), options.rounds)
    race(KimiK2("Kimi-K2", layers=61, experts=384), options.rounds)


if __name__ == "__main__":
    main()
