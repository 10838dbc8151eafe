"""Updates of models with many names: the engine's loader against one plan.

    ./dev python bench/update_names.py [--rounds 5]

Kimi-K2's 69,975 names and Qwen3-30B-A3B's 18,867, experts fused, rank 1 of 8, with tiny tensors:
what is left is the price of a name.  The loader is written as engines write it (as in
``trace_k2.py``): experts found by a scan of `(param_name, weight_name, expert_id, shard_id)`;
*indexed*: the same with that table in a dict, the best that such a loader can be.  By plan: all
names in one call of `load_planned`, in buckets of 100, and one by one from a generator.  *handed
over*: the pairs are iterated in Python and two lists go to the library, which does nothing.

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
from torch import Tensor, nn

import loadplan
from loadplan._sessions import session_of

RANK, RANKS = 1, 8
HIDDEN, WIDTH, VOCAB = 32, 32, 64
BUCKET = 100

Shape = tuple[int, ...]
Weights = Iterable[tuple[str, Tensor]]
Route = tuple[str, str, int, str]  # param_name, weight_name, expert_id, shard_id

EXPERT_PARTS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))


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


def load_part_of_rows(param: Tensor, loaded: Tensor, part: int) -> None:
    """Several projections in one parameter, each cut by rank."""
    share = loaded.shape[0] // RANKS
    place = param.data.narrow(0, part * share, share)
    place.copy_(loaded.narrow(0, RANK * share, share))


def load_expert(param: Tensor, loaded: Tensor, shard_id: str, expert_id: int) -> None:
    expert = param.data[expert_id]
    if shard_id == "w2":
        share = expert.shape[1]
        expert.copy_(loaded.narrow(1, RANK * share, share))
        return
    share = expert.shape[0] // 2
    place = expert.narrow(0, 0 if shard_id == "w1" else share, share)
    place.copy_(loaded.narrow(0, RANK * share, share))


class Engine:
    """The parameters of one rank and `load_weights`, as engines write them for such models."""

    def __init__(self, experts: int, fused: dict[str, tuple[str, int]], indexed: bool) -> None:
        self.params: dict[str, Tensor] = {}
        self.fused = [(param, weight, part) for weight, (param, part) in fused.items()]
        self.indexed = indexed
        self.routes: list[Route] = [
            ("experts.w2_" if shard == "w2" else "experts.w13_", f"experts.{e}.{name}.", e, shard)
            for e in range(experts)
            for shard, name in EXPERT_PARTS
        ]
        self.route_of = {route[1]: [route] for route in self.routes}

    def add(self, name: str, loader: Callable[..., None], *shape: int) -> None:
        param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        param.weight_loader = loader  # type: ignore[attr-defined]
        self.params[name] = param

    def routes_for(self, name: str) -> list[Route]:
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
            for param_name, weight_name, part in self.fused:
                if weight_name not in name or "mlp.experts." in name:
                    continue
                name = name.replace(weight_name, param_name)
                param = params[name]
                param.weight_loader(param, loaded, part)  # type: ignore[attr-defined]
                break
            else:
                for param_name, weight_name, expert_id, shard_id in self.routes_for(name):
                    if weight_name not in name:
                        continue
                    name = name.replace(weight_name, param_name)
                    param = params[name]
                    param.weight_loader(  # type: ignore[attr-defined]
                        param, loaded, shard_id=shard_id, expert_id=expert_id
                    )
                    break
                else:
                    param = params[name]
                    param.weight_loader(param, loaded)  # type: ignore[attr-defined]
            written.add(name)
        return written


class Model:
    """A checkpoint's names with their shapes, and the engines that load it."""

    def __init__(self, label: str, layers: int, experts: int) -> None:
        self.label = f"{label}, TP{RANKS} rank {RANK}"
        self.layers = layers
        self.experts = experts

    fused: dict[str, tuple[str, int]]

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
        engine = Engine(self.experts, self.fused, indexed)
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
    fused = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

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
    fused = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

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
