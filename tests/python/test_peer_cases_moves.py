"""Sections C (experts) and D (trainer shards) of the same peer's cases, by their numbers.

Rows of C are small loaders, checked as those of `test_peer_cases`.  Rows of D say which boxes ranks
hold and which receivers need.  Each is loaded in one process, and all are moved once between
processes, where every byte that crosses is counted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import shard_ranks
import torch
import torch.distributed as dist
from test_peer_cases import (
    BF16,
    F32,
    UNNEEDED,
    Box,
    Row,
    Shape,
    Targets,
    Weights,
    check_plan,
    each,
    live,
    lives,
    plan_row,
    update_and_compare,
)
from torch import Tensor

import loadplan

EXPERTS = {f"experts.{e}.{kind}": (8, 4) for e in range(2) for kind in ("gate", "up")}


# ------------------------------------------------------------------ C: experts
def fused_moe(rank: int) -> Callable[[Targets, Weights], None]:
    """w13 is [gate | up] per expert; the loader is called by keyword, through views of views."""

    def load_expert(*, param: Tensor, loaded_weight: Tensor, shard_id: str, expert_id: int) -> None:
        half = param.data[expert_id].unsqueeze(0).unbind()[0].chunk(2)[shard_id == "up"]
        half.copy_(loaded_weight.narrow(0, 4 * rank, 4))

    def load(targets: Targets, weights: Weights) -> None:
        for name, weight in weights:
            _, expert, kind = name.split(".")
            load_expert(
                param=targets["dst"], loaded_weight=weight, shard_id=kind, expert_id=int(expert)
            )

    return load


def only_experts_of_rank_1(targets: Targets, weights: Weights) -> None:
    for name, weight in weights:
        slot = int(name.split(".")[1]) - 2
        if slot >= 0:
            targets["dst"].data[slot].copy_(weight)


def up_first(targets: Targets, weights: Weights) -> None:
    for name, weight in weights:
        targets["dst"].data.chunk(2)[name == "gate"].copy_(weight)


def columns_by_expert(targets: Targets, weights: Weights) -> None:
    for name, weight in weights:
        targets["dst"].data[int(name.split(".")[1])].copy_(weight.narrow(1, 8, 8))


SECTION_C = [
    Row("C1-rank0", live(2, 8, 4), EXPERTS, fused_moe(0),
        runs={"experts.1.up": [(0, 48, 16)], "experts.0.gate": [(0, 0, 16)]}),
    Row("C1-rank1", live(2, 8, 4), EXPERTS, fused_moe(1),
        runs={"experts.1.up": [(16, 48, 16)], "experts.0.gate": [(16, 0, 16)]},
        writes=dict.fromkeys(EXPERTS, 1)),
    Row("C2", live(2, 4, 4), {"down": (4, 8)},
        each(lambda dst, src: dst[1].copy_(src.narrow(1, 4, 4))), writes={"down": 1},
        runs={"down": [(4, 16, 4), (12, 20, 4), (20, 24, 4), (28, 28, 4)]}),
    Row("C3", live(2, 4, 4), {f"experts.{e}.w": (4, 4) for e in range(4)}, only_experts_of_rank_1,
        kinds={f"experts.{e}.w": frozenset({"direct"}) if e > 1 else UNNEEDED for e in range(4)},
        runs={"experts.2.w": [(0, 0, 16)], "experts.3.w": [(0, 16, 16)]}),
    Row("C4-fc1", live(4, 4, 8), {"fc1": (4, 16, 8)},
        each(lambda dst, src: dst.copy_(src.narrow(1, 12, 4))), writes={"fc1": 1},
        runs={"fc1": [(96, 0, 32), (224, 32, 32), (352, 64, 32), (480, 96, 32)]}),
    Row("C4-fc2", live(4, 8, 4), {"fc2": (4, 8, 16)},
        each(lambda dst, src: dst.copy_(src.narrow(2, 12, 4))), writes={"fc2": 1},
        runs={"fc2": [(12 + 16 * i, 4 * i, 4) for i in range(32)]}),
    Row("C5", live(4, 4), {"fused": (2, 4, 8)},
        each(lambda dst, src: dst.copy_(src.transpose(-1, -2).chunk(2, dim=1)[1][1])),
        writes={"fused": 1}, runs={"fused": [(36, 0, 1), (37, 4, 1), (38, 8, 1), (39, 12, 1)]}),
    # The order is what the loader does: nothing has to state it, and nothing guesses it.
    Row("C6-destination", live(8, 4), {"gate": (4, 4), "up": (4, 4)}, up_first,
        runs={"gate": [(0, 16, 16)], "up": [(0, 0, 16)]}),
    Row("C6-source", lives(gate=(4, 4), up=(4, 4)), {"up_gate": (8, 4)},
        lambda targets, weights: [
            targets[name].data.copy_(half)
            for _, src in weights for name, half in zip(("up", "gate"), src.chunk(2), strict=True)
        ] and None,
        runs={"up_gate": [(0, 0, 16), (16, 0, 16)]}),
    # A copy of C7 for rank 1 of 8: 8 of the 64 regions, none of them expanded into its segments.
    Row("C7", live(8, 64, 8), {f"experts.{e}.w": (64, 64) for e in range(8)}, columns_by_expert,
        writes={f"experts.{e}.w": 1 for e in range(8)}),
]  # fmt: skip


@pytest.mark.parametrize("row", SECTION_C, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    targets = row.targets()
    adapter, plan = plan_row(row, targets)
    check_plan(row, plan)
    update_and_compare(row, adapter, plan, targets)


def test_unneeded_experts_cost_nothing() -> None:
    """C3: 0 bytes of the experts of the other rank."""
    row = next(row for row in SECTION_C if row.id == "C3")
    _, plan = plan_row(row, row.targets())
    assert [plan.entries[f"experts.{e}.w"].nbytes for e in range(4)] == [0, 0, 64, 64]


def test_large_experts_stay_regions() -> None:
    """C7 in full size: 64 regions of 8192 segments each take no more room than small ones."""
    size = 8192
    dst = torch.empty(8, size, size // 8, dtype=torch.int8)

    def load(targets: Targets, weights: Weights) -> None:
        for name, weight in weights:
            targets["dst"][int(name)].copy_(weight.narrow(1, rank * (size // 8), size // 8))

    metas = {str(expert): ((size, size), torch.int8) for expert in range(8)}
    regions = 0
    for rank in range(8):
        adapter = loadplan.Targets({"dst": dst}, lambda weights: load({"dst": dst}, weights))
        plan = loadplan.plan_loads(adapter, metas)
        for name, entry in plan.entries.items():
            assert list(entry.reads) == [((0, size), (rank * 1024, (rank + 1) * 1024))]
            regions += len(entry.writes)
            ((_, place),) = plan.get_dest(name)
            assert place.stride() == (1024, 1)
    assert regions == 64


# ------------------------------------------------------------------ D: boxes against shards
@dataclass(frozen=True)
class Move:
    """Which rank holds which box of one tensor, and which box each receiver needs."""

    id: str
    shape: Shape
    held: list[tuple[int, Box]]
    needed: list[Box]
    nbytes: int  # that cross, in all
    dtype: torch.dtype = F32
    # Elements of the first receiver, row-major, that come from a rank.
    places: dict[int, list[int]] | None = None

    def tensor(self) -> Tensor:
        """Every element is another one, and no bits are a NaN's."""
        count = torch.Size(self.shape).numel()
        return torch.arange(count, dtype=torch.float32).to(self.dtype).reshape(self.shape)

    def shards(self, rank: int | None = None) -> loadplan.Shards:
        """With the tensors of one rank, or of all."""
        full = self.tensor()
        pieces = [
            (holder, box, part(full, box).clone() if rank in (None, holder) else None)
            for holder, box in self.held
        ]
        return loadplan.Shards({"w": pieces}, [loadplan.ParamMeta("w", self.shape, self.dtype)])

    def receiver(self, index: int) -> tuple[Tensor, loadplan.Targets]:
        box = self.needed[index]
        live = torch.full([stop - start for start, stop in box], -77.0).to(self.dtype)

        def load(weights: Weights) -> None:
            for _, weight in weights:
                live.copy_(part(weight, box))

        return live, loadplan.Targets({"dst": live}, load)

    def plan(self, model: loadplan.Targets) -> loadplan.LoadPlan:
        loadplan.start_reload(model)
        plan = loadplan.plan_loads(model, {"w": (self.shape, self.dtype)})
        loadplan.abort_reload(model)
        return plan


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*interval) for interval in box)]


def cuts(shape: Shape, dim: int, count: int) -> list[Box]:
    """``count`` equal boxes along ``dim``."""
    whole = tuple((0, extent) for extent in shape)
    step = shape[dim] // count
    return [(*whole[:dim], (i * step, (i + 1) * step), *whole[dim + 1 :]) for i in range(count)]


def numbered(boxes: list[Box]) -> list[tuple[int, Box]]:
    return list(enumerate(boxes))


WIDE = (64, 16)
SECTION_D = [
    Move("D1", (4, 8), numbered(cuts((4, 8), 1, 2)), [((0, 4), (0, 8))], 128,
         places={0: [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27],
                 1: [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31]}),
    Move("D2", (8, 4), numbered(cuts((8, 4), 0, 2)), [((2, 6), (0, 4))], 64,
         places={0: list(range(8)), 1: list(range(8, 16))}),
    # A shard that does not meet the box is not read.
    Move("D3", (8, 4), numbered(cuts((8, 4), 0, 4)), [((2, 4), (0, 4))], 32,
         places={0: [], 1: list(range(8)), 2: [], 3: []}),
    Move("D4", (8, 4), [(rank, box) for rank in range(8) for box in cuts((8, 4), 0, 2)],
         [((0, 8), (0, 4))], 64, BF16),
    # The row that both hold comes from one of them.
    Move("D8", (4, 4), [(0, ((0, 3), (0, 4))), (1, ((2, 4), (0, 4)))], [((0, 4), (0, 4))], 64),
    Move("D8-one-rank", (4, 4), [(0, ((0, 3), (0, 4))), (0, ((2, 4), (0, 4)))],
         [((0, 4), (0, 4))], 64),
    Move("D8-corners", (4, 4),
         [(0, ((0, 3), (0, 3))), (1, ((1, 4), (1, 4))), (2, ((0, 2), (2, 4))),
          (3, ((2, 4), (0, 2)))], [((0, 4), (0, 4)), ((1, 3), (0, 4))], 96),
    Move("D11-4-to-8", WIDE, numbered(cuts(WIDE, 0, 4)), cuts(WIDE, 0, 8), 4096),
    Move("D11-8-to-4", WIDE, numbered(cuts(WIDE, 0, 8)), cuts(WIDE, 0, 4), 4096),
    Move("D11-columns-to-rows", WIDE, numbered(cuts(WIDE, 1, 4)), cuts(WIDE, 0, 4), 4096),
    Move("D11-rows-to-columns", WIDE, numbered(cuts(WIDE, 0, 8)), cuts(WIDE, 1, 4), 4096),
]  # fmt: skip


@pytest.mark.parametrize("move", SECTION_D, ids=lambda move: move.id)
def test_move_in_one_process(move: Move) -> None:
    for index, box in enumerate(move.needed):
        live, model = move.receiver(index)
        plan = move.plan(model)
        loadplan.start_reload(model)
        loadplan.load_shards(model, plan, move.shards())
        loadplan.finish_reload(model)
        assert torch.equal(live, part(move.tensor(), box))


@pytest.mark.parametrize("move", [m for m in SECTION_D if m.places], ids=lambda move: move.id)
def test_which_shard_an_element_comes_from(move: Move) -> None:
    marked = {
        "w": [
            (rank, box, torch.full_like(part(move.tensor(), box), float(rank)))
            for rank, box in move.held
        ]
    }
    live, model = move.receiver(0)
    plan = move.plan(model)
    loadplan.start_reload(model)
    loadplan.load_shards(model, plan, marked)
    loadplan.finish_reload(model)
    assert move.places is not None
    for rank, elements in move.places.items():
        assert (live.flatten() == rank).nonzero().flatten().tolist() == elements


def test_what_covers_no_tensor_is_refused_before_a_byte_moves() -> None:
    """D3: a shard of another rank than its tensor.  D7: half a tensor, 32 of 64 bytes.  D8 with two
    values for a row.
    """
    full = torch.arange(16.0).reshape(4, 4)
    whole = [loadplan.ParamMeta("w", (4, 4), F32)]
    rows = ((0, 2), (0, 4))
    refused: list[tuple[list[Any], str]] = [
        ([(0, rows, full[:2]), (1, ((2, 4),), full[2:])], "box"),
        ([(0, rows, full[:2]), (1, ((2, 4), (0, 4)), full[2:].flatten())], r"shape \[8\]"),
        ([(0, rows, full[:2])], r"the shards hold 8 of 16 elements; no rank holds \[2:4, 0:4\]"),
        (
            [(0, ((0, 3), (0, 4)), full[:3]), (1, ((2, 4), (0, 4)), full[2:] + 1)],
            r"`w`: ranks 0 and 1 both hold \[2:3, 0:4\], with different bytes",
        ),
    ]
    for pieces, words in refused:
        live = torch.full((4, 4), -77.0)
        model = loadplan.Targets({"w": live}, lambda ws, live=live: [live.copy_(w) for _, w in ws])
        plan = loadplan.plan_loads(model, {"w": ((4, 4), F32)})
        loadplan.start_reload(model)
        with pytest.raises(ValueError, match=words):
            loadplan.load_shards(model, plan, loadplan.Shards({"w": pieces}, whole))
        assert live.eq(-77).all()


# 16 processes with LOADPLAN_TEST_DIST=1 (`./dev test-dist`), else the rows that do with 8.
NUM_HOLDERS = NUM_RECEIVERS = 8 if os.environ.get("LOADPLAN_TEST_DIST") == "1" else 4
MOVES = [
    move
    for move in SECTION_D
    if max(rank for rank, _ in move.held) < NUM_HOLDERS and len(move.needed) <= NUM_RECEIVERS
]


def moves_between(context: shard_ranks.Context) -> None:
    """Section D between processes: receivers come after the holders.

    One group for all of them: a rank without a part says so.
    """
    group = dist.new_group()
    for move in MOVES:
        index = context.rank - NUM_HOLDERS
        if index >= len(move.needed):
            loadplan.exchange_shards(loadplan.schedule_shards(group, timeout=30))
            continue
        if index < 0:
            shards = move.shards(context.rank)
            schedule = loadplan.schedule_shards(group, shards=shards, timeout=30)
            receipt = loadplan.send_shards(shards, schedule)
            context.report(move.id, sent=receipt.sent, total=schedule.traffic.total)
            continue
        live, model = move.receiver(index)
        plan = move.plan(model)
        schedule = loadplan.schedule_shards(group, plan=plan, timeout=30)
        loadplan.start_reload(model)
        receipt = loadplan.receive_shards(model, plan, schedule)
        loadplan.finish_reload(model)
        assert torch.equal(live, part(move.tensor(), move.needed[index])), move.id
        context.report(move.id, received=receipt.received, messages=receipt.num_messages)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_each_needed_byte_crosses_once() -> None:
    reports = shard_ranks.launch(NUM_HOLDERS + NUM_RECEIVERS, moves_between)
    by_move = {
        label: [report.values for report in group]
        for label, group in itertools.groupby(
            sorted(reports, key=lambda report: report.label), key=lambda report: report.label
        )
    }
    assert set(by_move) == {move.id for move in MOVES}
    for move in MOVES:
        values = by_move[move.id]
        assert len(values) == NUM_HOLDERS + len(move.needed)
        for side in ("sent", "received"):
            assert sum(of_rank.get(side, 0) for of_rank in values) == move.nbytes, (move.id, side)
        assert {of_rank["total"] for of_rank in values if "total" in of_rank} == {move.nbytes}
    if "D4" in by_move:  # eight replicas cost what one does
        assert sum(of_rank.get("messages", 0) for of_rank in by_move["D4"]) == 2
