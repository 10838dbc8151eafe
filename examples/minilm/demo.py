"""Loads all-MiniLM-L6-v2 into a TP=2 engine model by plan, and proves that nothing went astray.

    python -m examples.minilm

The loader of ``model.py`` is traced once for each rank.  From then on weights move by plan: for the
first load as for every later update, without the loader.  Ends with an error unless every live byte
equals the eager loader's and the sentence embeddings equal those of the unsharded model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

import loadplan

from .checkpoint import Config, tokenize, weights_file
from .model import BertRank, Rank, forward
from .reference import load_reference, sentence_embeddings

TP = 2
ROUNDS = 5
TOLERANCE = 1e-5  # absolute, on unit vectors: two ranks add in another order than one matrix does

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "The plan moves the weights.",
)

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Planned:
    """A rank's model, with the plan that tracing its loader gave."""

    model: BertRank
    plan: loadplan.LoadPlan


def make_ranks(config: Config) -> list[BertRank]:
    """Models full of NaN: what a load forgets can neither be right by chance nor stay unseen."""
    ranks = [BertRank(config, Rank(index, TP)) for index in range(TP)]
    for param in (param for rank in ranks for param in rank.parameters()):
        param.data.fill_(float("nan"))
    return ranks


def first_load(
    ranks: list[BertRank], weights: Weights, console: Console
) -> tuple[list[Planned], float]:
    """Traces, plans and loads each rank; also returns the seconds of tracing and planning."""
    metas = loadplan.metadata(weights_file())
    planned, planning = [], 0.0
    for index, rank in enumerate(ranks):
        loadplan.start_reload(rank)
        start = time.perf_counter()
        plan = loadplan.plan_loads(rank, metas)
        planning += time.perf_counter() - start
        loadplan.load_planned(rank, plan, weights.items())
        loadplan.finish_reload(rank)
        planned.append(Planned(rank, plan))
        console.rule(f"plan of rank {index} of {TP}")
        console.print(plan.report(), markup=False, highlight=False)
    return planned, planning


def load_by_plan(planned: list[Planned], weights: Weights) -> None:
    for item in planned:
        loadplan.start_reload(item.model)
        loadplan.load_planned(item.model, item.plan, weights.items())
        loadplan.finish_reload(item.model)


def load_eagerly(ranks: list[BertRank], weights: Weights) -> None:
    for rank in ranks:
        rank.load_weights(weights.items())


def count_equal_bytes(planned: list[Planned], eager: list[BertRank]) -> int:
    """The number of live bytes, all of them proven equal."""
    count = 0
    for item, other in zip(planned, eager, strict=True):
        theirs = dict(other.named_parameters())
        for name, param in item.model.named_parameters():
            mine = param.data.view(torch.uint8)
            if not torch.equal(mine, theirs[name].data.view(torch.uint8)):
                raise SystemExit(f"`{name}` differs from what the eager loader leaves")
            count += mine.numel()
    return count


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def race(planned: list[Planned], eager: list[BertRank], weights: Weights) -> tuple[float, float]:
    """Best seconds of an update of all ranks: (loader, plan).  Every round has new values."""
    by_loader: list[float] = []
    by_plan: list[float] = []
    for step in range(ROUNDS):
        update = {
            name: weight * (1 + 0.01 * (step + 1)) if weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
        ways = [
            (by_loader, partial(load_eagerly, eager, update)),
            (by_plan, partial(load_by_plan, planned, update)),
        ]
        for times, way in ways if step % 2 else reversed(ways):  # neither is always the second
            times.append(seconds(way))
        count_equal_bytes(planned, eager)
    return min(by_loader), min(by_plan)


def show_similarities(console: Console, sharded: Tensor, reference: Tensor) -> None:
    table = Table(title="cosine similarity: plan-loaded TP=2 model / unsharded reference")
    table.add_column("")
    for number in range(1, len(SENTENCES) + 1):
        table.add_column(f"({number})", justify="right")
    pairs = zip(SENTENCES, sharded @ sharded.T, reference @ reference.T, strict=True)
    for number, (sentence, ours, theirs) in enumerate(pairs, start=1):
        cells = (f"{a:.4f} / {b:.4f}" for a, b in zip(ours, theirs, strict=True))
        table.add_row(f"({number}) {sentence}", *cells)
    console.print(table)


def main() -> None:
    # Captured output is wrapped like a wide terminal: the tables stay readable in a log.
    console = Console() if Console().is_terminal else Console(width=120)
    config, weights = Config.read(), load_file(weights_file())

    live = make_ranks(config)
    planned, planning = first_load(live, weights, console)

    eager = make_ranks(config)
    load_eagerly(eager, weights)
    proven = count_equal_bytes(planned, eager)
    console.rule("proof")
    console.print(f"{proven:,} live bytes of {TP} ranks equal the eager loader's, byte for byte")

    ids, mask = tokenize(SENTENCES)
    with torch.inference_mode():
        sharded = sentence_embeddings(forward(live, ids, mask), mask)
        reference_model = load_reference(config, weights_file())
        reference = sentence_embeddings(reference_model(ids, mask), mask)
    difference = (sharded - reference).abs().max().item()
    if not torch.allclose(sharded, reference, rtol=0, atol=TOLERANCE):
        raise SystemExit(f"embeddings differ by {difference:.2e}, more than {TOLERANCE:.0e}")
    show_similarities(console, sharded, reference)
    console.print(f"largest difference of an embedding: {difference:.1e} (allowed {TOLERANCE:.0e})")

    by_loader, by_plan = race(planned, eager, weights)
    table = Table(title=f"seconds for {TP} ranks (best of {ROUNDS} updates, each proven)")
    for column in ("", "eager loader", "by plan"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("an update", f"{by_loader:.4f}", f"{by_plan:.4f}")
    table.add_row("tracing and planning, once", "-", f"{planning:.4f}")
    console.print(table)
