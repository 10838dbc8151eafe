"""Inputs taken from the tests of a peer that plans loads by tracing, and from what breaks it.

A row is one small loader.  For each: tracing changes no live byte, the names get the kinds (and
boxes, and runs) that a right system gives them, and two updates by plan with fresh values leave
what the eager loader leaves on a copy: whole storages are compared, so that a byte beside a target
counts too.  `runs` are `(source element, destination element, length)`, in source order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import loadplan

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32

Targets = Mapping[str, Tensor]
Weights = Iterable[tuple[str, Tensor]]
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
Run = tuple[int, int, int]

DIRECT = frozenset({"direct"})
UNNEEDED = frozenset({"unneeded"})
COMPUTED = frozenset({"derived", "fallback"})  # right bytes, but not by moving the name's own bytes
NEEDED = DIRECT | COMPUTED


@dataclass(frozen=True)
class Row:
    id: str
    targets: Callable[[], dict[str, Tensor]]
    checkpoint: dict[str, Shape | tuple[Shape, torch.dtype]]
    load: Callable[[Targets, Weights], None]
    kinds: Mapping[str, frozenset[str]] | frozenset[str] = DIRECT  # one for all, or by name
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)  # a prefix of the list is enough
    writes: dict[str, int] = field(default_factory=dict)  # the number of regions

    def shape_and_dtype(self, name: str) -> tuple[Shape, torch.dtype]:
        declared = self.checkpoint[name]
        if len(declared) == 2 and isinstance(declared[1], torch.dtype):
            return declared
        return declared, F32

    def metas(self) -> list[loadplan.ParamMeta]:
        return [loadplan.ParamMeta(name, *self.shape_and_dtype(name)) for name in self.checkpoint]

    def weights(self, seed: int) -> list[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        result = []
        for name in self.checkpoint:
            shape, dtype = self.shape_and_dtype(name)
            values = torch.randn(shape, generator=generator)
            # An integer tensor holds the bits of floats, for a loader that views them as such.
            result.append(
                (name, values.to(dtype) if dtype.is_floating_point else values.view(dtype))
            )
        return result

    def kinds_of(self, name: str) -> frozenset[str]:
        return self.kinds if isinstance(self.kinds, frozenset) else self.kinds[name]


def live(*shape: int, name: str = "dst") -> Callable[[], dict[str, Tensor]]:
    """One target full of a value that no checkpoint holds."""
    return lives(**{name: shape})


def lives(**shapes: Shape) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.full(shape, -77.0) for name, shape in shapes.items()}


def each(write: Callable[[Tensor, Tensor], object]) -> Callable[[Targets, Weights], None]:
    """A loader that does `write(dst, src)` for every name."""

    def load(targets: Targets, weights: Weights) -> None:
        for _, src in weights:
            write(targets["dst"].data, src)

    return load


def copy(view: Callable[[Tensor], Tensor]) -> Callable[[Targets, Weights], None]:
    return each(lambda dst, src: dst.copy_(view(src)))


def by_name(targets: Targets, weights: Weights) -> None:
    for name, src in weights:
        targets[name].data.copy_(src)


# ------------------------------------------------------------------ A: one copy, its box and region
def fuse_qkv(targets: Targets, weights: Weights) -> None:
    rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
    for name, src in weights:
        targets["qkv"].data.narrow(0, *rows[name]).copy_(src)


def copy_slices_of_experts(dst: Tensor, src: Tensor) -> None:
    for index, expert in enumerate(src.unbind(0)):
        dst[index].copy_(expert)


def assign_element(dst: Tensor, src: Tensor) -> None:
    dst[1] = src


def second_half_of_big() -> dict[str, Tensor]:
    return {"dst": torch.full((8, 4), -77.0)[4:]}


TRANSPOSED_3x4 = [(0, 0, 1), (1, 3, 1), (2, 6, 1), (3, 9, 1), (4, 1, 1)]

SECTION_A = [
    Row("A1-rank0", live(4, 4), {"src": (8, 4)}, copy(lambda s: s.narrow(0, 0, 4)),
        boxes={"src": [((0, 4), (0, 4))]}, runs={"src": [(0, 0, 16)]}),
    Row("A1-rank1", live(4, 4), {"src": (8, 4)}, copy(lambda s: s.narrow(0, 4, 4)),
        boxes={"src": [((4, 8), (0, 4))]}, runs={"src": [(16, 0, 16)]}),
    Row("A2-rank0", live(4, 4), {"src": (4, 8)}, copy(lambda s: s.narrow(1, 0, 4)),
        boxes={"src": [((0, 4), (0, 4))]}, writes={"src": 1},
        runs={"src": [(0, 0, 4), (8, 4, 4), (16, 8, 4), (24, 12, 4)]}),
    Row("A2-rank1", live(4, 4), {"src": (4, 8)}, copy(lambda s: s.narrow(1, 4, 4)),
        boxes={"src": [((0, 4), (4, 8))]}, writes={"src": 1},
        runs={"src": [(4, 0, 4), (12, 4, 4), (20, 8, 4), (28, 12, 4)]}),
    Row("A3", live(8, 4, name="qkv"), {"q": (4, 4), "k": (2, 4), "v": (2, 4)}, fuse_qkv,
        runs={"q": [(0, 0, 16)], "k": [(0, 16, 8)], "v": [(0, 24, 8)]}),
    Row("A4", live(4), {"src": (4,)}, copy(lambda s: s), runs={"src": [(0, 0, 4)]}),
    Row("A5", live(4, 3), {"src": (3, 4)}, copy(lambda s: s.t()),
        boxes={"src": [((0, 3), (0, 4))]}, runs={"src": TRANSPOSED_3x4}),
    Row("A6", live(4, 2, 3), {"src": (2, 3, 4)}, copy(lambda s: s.permute(2, 0, 1)),
        boxes={"src": [((0, 2), (0, 3), (0, 4))]}, runs={"src": [(0, 0, 1), (1, 6, 1)]}),
    Row("A7", live(5, 2), {"src": (4, 5)}, copy(lambda s: s.narrow(0, 1, 2).t()),
        boxes={"src": [((1, 3), (0, 5))]}, runs={"src": [(5, 0, 1)]}),
    Row("A8", live(4, 4), {"src": (4, 4)}, copy(lambda s: s.t().contiguous()),
        runs={"src": [(0, 0, 1), (1, 4, 1), (2, 8, 1), (3, 12, 1), (4, 1, 1)]}),
    Row("A9-reshape", live(12), {"src": (3, 4)}, copy(lambda s: s.reshape(-1)),
        runs={"src": [(0, 0, 12)]}),
    Row("A9-squeeze", live(4), {"src": (1, 4)}, copy(lambda s: s.squeeze()),
        runs={"src": [(0, 0, 4)]}),
    Row("A9-unsqueeze", live(4, 1, 4), {"src": (4, 4)}, copy(lambda s: s.unsqueeze(1)),
        runs={"src": [(0, 0, 16)]}),
    Row("A10-select", live(4, 4), {"src": (3, 4, 4)}, copy(lambda s: s[1]),
        boxes={"src": [((1, 2), (0, 4), (0, 4))]}, runs={"src": [(16, 0, 16)]}),
    Row("A10-unbind", live(3, 4, 4), {"src": (3, 4, 4)}, each(copy_slices_of_experts),
        runs={"src": [(0, 0, 48)]}),
    Row("A11-split", live(2, 4), {"src": (6, 4)}, copy(lambda s: s.split([1, 2, 3])[1]),
        runs={"src": [(4, 0, 8)]}),
    Row("A11-chunk", live(2, 4), {"src": (4, 4)}, copy(lambda s: s.chunk(2)[1]),
        runs={"src": [(8, 0, 8)]}),
    Row("A12-negative", live(2, 4), {"src": (8, 4)}, copy(lambda s: s[-2:]),
        runs={"src": [(24, 0, 8)]}),
    Row("A12-ellipsis", live(4, 2), {"src": (4, 4)}, copy(lambda s: s[..., :2]),
        runs={"src": [(0, 0, 2), (4, 2, 2), (8, 4, 2), (12, 6, 2)]}),
    Row("A12-view", live(2, 4), {"src": (4, 4)}, copy(lambda s: s.view(2, 2, 4)[1]),
        runs={"src": [(8, 0, 8)]}),
    # A stepped source has no destination to hand out (`get_dest` is None), but exact reads.
    Row("A13", live(2, 4), {"src": (4, 4)}, copy(lambda s: s[::2]), kinds=NEEDED),
    Row("A14-scalar", live(), {"src": ()}, copy(lambda s: s),
        boxes={"src": [()]}, runs={"src": [(0, 0, 1)]}),
    Row("A14-slot", live(4), {"src": ()}, each(lambda d, s: d[1].copy_(s)),
        boxes={"src": [()]}, runs={"src": [(0, 1, 1)]}),
    Row("A14-setitem", live(4), {"src": ()}, each(assign_element), runs={"src": [(0, 1, 1)]}),
    Row("A15-broadcast", live(3, 4), {"src": (4,)}, copy(lambda s: s), kinds=NEEDED),
    Row("A15-expand", live(3, 4), {"src": (1, 4)}, copy(lambda s: s.expand(3, 4)), kinds=NEEDED),
    Row("A16-transposed", live(4, 3), {"src": (3, 4)}, each(lambda d, s: d.t().copy_(s)),
        runs={"src": TRANSPOSED_3x4}),
    Row("A16-columns", live(4, 8), {"src": (4, 4)}, each(lambda d, s: d[:, 4:].copy_(s)),
        runs={"src": [(0, 4, 4), (4, 12, 4), (8, 20, 4), (12, 28, 4)]}),
    Row("A17", second_half_of_big, {"src": (8, 4)}, copy(lambda s: s[:4]),
        boxes={"src": [((0, 4), (0, 4))]}, runs={"src": [(0, 16, 16)]}),
    Row("A18", live(4, 4), {"src": ((8, 4), I32)}, copy(lambda s: s.view(F32)[4:]),
        boxes={"src": [((4, 8), (0, 4))]}),
]  # fmt: skip


# ------------------------------------------------------------------ B: what is no direct copy
def double_a(targets: Targets, weights: Weights) -> None:
    for name, src in weights:
        targets[name].data.copy_(src * 2 if name == "a" else src)


def through_scratch(use: Callable[[Tensor], Tensor]) -> Callable[[Targets, Weights], None]:
    def load(targets: Targets, weights: Weights) -> None:
        for _, src in weights:
            scratch = torch.empty(4, 4)
            scratch.copy_(src)
            targets["dst"].data.copy_(use(scratch))

    return load


def copy_then_double(dst: Tensor, src: Tensor) -> None:
    dst.copy_(src)
    dst.mul_(2)


def copy_and_pad(dst: Tensor, src: Tensor) -> None:
    dst[:3].copy_(src)
    dst[3:].fill_(7)


def two_parameters(targets: Targets, weights: Weights) -> None:
    for _, src in weights:
        targets["w"].data.copy_(src[:4])
        targets["v"].data.copy_(src[4:])


def stack_pair(targets: Targets, weights: Weights) -> None:
    loaded = dict(weights)
    targets["dst"].data.copy_(torch.stack([loaded["a"], loaded["b"]]))


def stack_when_second_comes(targets: Targets, weights: Weights) -> None:
    held: list[Tensor] = []
    for name, src in weights:
        if name == "other":
            targets["other"].data.copy_(src)
            continue
        held.append(src)
        if len(held) == 2:
            targets["dst"].data.copy_(torch.stack(held))


def overlapping(targets: Targets, weights: Weights) -> None:
    rows = {"all": slice(None), "tail": slice(2, 4), "head": slice(0, 1)}
    for name, src in weights:
        targets["dst"].data[rows[name]].copy_(src)


def skip_rotary(targets: Targets, weights: Weights) -> None:
    by_name(targets, ((name, src) for name, src in weights if "inv_freq" not in name))


def rebind(targets: Targets, weights: Weights) -> None:
    for name, src in weights:
        if name == "a":
            targets["a"].data = src
        else:
            targets[name].data.copy_(src)


def halves(targets: Targets, weights: Weights) -> None:
    for name, src in weights:
        targets["dst"].data[slice(0, 2) if name == "a" else slice(2, 4)].copy_(src)


SECTION_B = [
    Row("B1", lives(a=(4, 4), b=(4, 4), c=(4,)), {"a": (4, 4), "b": (4, 4), "c": (4,)}, double_a,
        kinds={"a": COMPUTED, "b": DIRECT, "c": DIRECT}),
    Row("B2", live(4), {"src": ()}, each(lambda d, s: d.fill_(s.item())),
        kinds=frozenset({"fallback"})),
    Row("B4-arithmetic", live(4, 4), {"src": (4, 4)}, through_scratch(lambda t: t * 2),
        kinds=COMPUTED),
    Row("B4-transpose", live(4, 4), {"src": (4, 4)}, through_scratch(lambda t: t.t()),
        kinds=NEEDED),
    Row("B5", live(4, 4), {"src": (4, 4)}, each(copy_then_double), kinds=COMPUTED),
    Row("B6", live(4, 4), {"src": (3, 4)}, each(copy_and_pad), runs={"src": [(0, 0, 12)]}),
    Row("B7", lives(w=(4, 4), v=(4, 4)), {"src": (8, 4)}, two_parameters,
        boxes={"src": [((0, 8), (0, 4))]}),
    Row("B8-dict", live(2, 4), {"a": (4,), "b": (4,)}, stack_pair, kinds=NEEDED),
    Row("B8-held", lives(dst=(2, 4), other=(3,)), {"a": (4,), "other": (3,), "b": (4,)},
        stack_when_second_comes, kinds={"a": NEEDED, "other": DIRECT, "b": NEEDED}),
    Row("B9", live(4, 4), {"all": (4, 4), "tail": (2, 4), "head": (1, 4)}, overlapping,
        kinds=frozenset({"fallback"})),
    Row("B10", lives(w=(4,)), {"w": (4,), "rotary.inv_freq": (2,)}, skip_rotary,
        kinds={"w": DIRECT, "rotary.inv_freq": UNNEEDED}),
    Row("B13-cast", live(4, 4), {"src": ((4, 4), BF16)}, copy(lambda s: s), kinds=COMPUTED),
    Row("B13-halves", live(4, 4), {"a": ((2, 4), BF16), "b": ((2, 4), BF16)}, halves,
        kinds=COMPUTED),
]  # fmt: skip


# ------------------------------------------------------------------ checks
def storage_bytes(targets: Targets) -> dict[str, Tensor]:
    """All bytes of every storage, those beside the targets included."""
    result = {}
    for name, tensor in targets.items():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        result[name] = whole.clone()
    return result


def assert_same_bytes(got: Targets, want: Targets) -> None:
    theirs = storage_bytes(want)
    differing = [n for n, mine in storage_bytes(got).items() if not torch.equal(mine, theirs[n])]
    assert differing == []


def elements_of(shape: Shape, boxes: Iterable[Box]) -> list[int]:
    """What boxes cover, one element as often as boxes hold it: how they are cut does not matter."""
    source = torch.arange(math.prod(shape)).reshape(shape)
    parts = (source[tuple(slice(*interval) for interval in box)] for box in boxes)
    return sorted(element for part in parts for element in part.flatten().tolist())


def runs_of(shape: Shape, places: Iterable[tuple[Box, Tensor]]) -> Iterator[Run]:
    """Maximal contiguous runs of what `get_dest` says, in source order."""
    source = torch.arange(math.prod(shape)).reshape(shape)
    pairs: list[tuple[int, int]] = []
    for box, place in places:
        part = source[tuple(slice(*interval) for interval in box)].reshape(place.shape)
        index = torch.full(place.shape, place.storage_offset())
        for dim, (extent, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
            along = [1] * place.dim()
            along[dim] = extent
            index = index + (torch.arange(extent) * stride).view(along)
        pairs += zip(part.flatten().tolist(), index.flatten().tolist(), strict=True)
    pairs.sort()
    start = 0
    for end in range(1, len(pairs) + 1):
        length = end - start
        follows = end < len(pairs) and pairs[end] == tuple(at + length for at in pairs[start])
        if not follows:
            yield (*pairs[start], length)
            start = end


def check_plan(row: Row, plan: loadplan.LoadPlan) -> None:
    kinds = {name: plan.entries[name].kind for name in row.checkpoint}
    assert all(kind in row.kinds_of(name) for name, kind in kinds.items()), kinds
    for name, kind in kinds.items():
        if kind in ("fallback", "derived"):
            assert plan.get_dest(name) is None
        if kind == "fallback":
            assert plan.entries[name].reason
        if kind == "unneeded":
            assert plan.get_boxes(name) is None and plan.get_dest(name) == []
    for name, boxes in row.boxes.items():
        shape, _ = row.shape_and_dtype(name)
        assert elements_of(shape, plan.entries[name].reads) == elements_of(shape, boxes)
    for name, count in row.writes.items():
        assert len(plan.entries[name].writes) == count
    for name, runs in row.runs.items():
        places = plan.get_dest(name)
        assert places is not None, f"`{name}` has no destination"
        got = runs_of(row.shape_and_dtype(name)[0], places)
        assert list(itertools.islice(got, len(runs))) == runs


def plan_row(row: Row, targets: Targets) -> tuple[loadplan.Targets, loadplan.LoadPlan]:
    adapter = loadplan.Targets(targets, load_weights=lambda weights: row.load(targets, weights))
    before = storage_bytes(targets)
    loadplan.start_reload(adapter)
    plan = loadplan.plan_loads(adapter, row.metas())
    loadplan.abort_reload(adapter)
    after = storage_bytes(targets)
    assert all(torch.equal(before[name], after[name]) for name in before), "tracing wrote"
    return adapter, plan


def update_and_compare(
    row: Row, adapter: loadplan.Targets, plan: loadplan.LoadPlan, targets: Targets
) -> None:
    """Two updates with fresh values, beside the eager loader on a copy of the targets."""
    truth = row.targets()
    for seed in (1, 2):
        row.load(truth, iter(row.weights(seed)))
        loadplan.start_reload(adapter)
        loadplan.load_planned(adapter, plan, row.weights(seed))
        loadplan.finish_reload(adapter)
        assert_same_bytes(targets, truth)


@pytest.mark.parametrize("row", SECTION_A + SECTION_B, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    targets = row.targets()
    adapter, plan = plan_row(row, targets)
    check_plan(row, plan)
    update_and_compare(row, adapter, plan, targets)


@pytest.mark.parametrize("row", SECTION_A, ids=lambda row: row.id)
def test_destinations_receive_raw_values(row: Row) -> None:
    """An engine that only uses `get_dest` gets there too: its own copies, no `load_planned`."""
    targets, truth = row.targets(), row.targets()
    _, plan = plan_row(row, targets)
    weights = row.weights(3)
    for name, full in weights:
        places = plan.get_dest(name)
        if places is None:
            pytest.skip(f"`{name}` has no destination: {plan.entries[name].kind}")
        for box, place in places:
            part = full[tuple(slice(*interval) for interval in box)]
            assert place.dtype == full.dtype
            place.copy_(part.reshape(place.shape))
    row.load(truth, iter(weights))
    assert_same_bytes(targets, truth)


# ------------------------------------------------------------------ more than one loader's update
def test_one_operator_reported_once_with_its_count() -> None:
    """B3: 128 names that fall back for one operator are one line of the report, not 128."""
    count = 128
    names = [f"layers.{index}.scale" for index in range(count)]

    def fill_all(targets: Targets, weights: Weights) -> None:
        for name, src in weights:
            targets["dst"].data[names.index(name)].fill_(src.item())

    row = Row("B3", live(count), {name: () for name in names}, fill_all)
    targets = row.targets()
    adapter, plan = plan_row(row, targets)
    lines = [line for line in plan.report().splitlines() if str(count) in line]
    assert any("item" in line or "_local_scalar_dense" in line for line in lines), plan.report()
    assert sum(plan.report().count(name) for name in names) < count // 4
    update_and_compare(row, adapter, plan, targets)


def test_a_rebound_parameter_spoils_no_other_name() -> None:
    """B11: `param.data = src`.  Planned as a copy into the old memory; no storage moves."""
    row = Row("B11", lives(a=(4,), b=(4, 4)), {"a": (4,), "b": (4, 4)}, rebind)
    targets = row.targets()
    pointers = {name: tensor.data_ptr() for name, tensor in targets.items()}
    adapter, plan = plan_row(row, targets)
    assert plan.entries["a"].kind == "direct" and plan.entries["b"].kind == "direct"
    assert pointers == {name: tensor.data_ptr() for name, tensor in targets.items()}
    loadplan.start_reload(adapter)
    loadplan.load_planned(adapter, plan, row.weights(1))
    loadplan.finish_reload(adapter)
    truth = row.targets()
    row.load(truth, iter(row.weights(1)))
    assert_same_bytes(targets, truth)
    assert pointers == {name: tensor.data_ptr() for name, tensor in targets.items()}


def test_buffers_and_own_copies_are_targets() -> None:
    """B12: a module whose `load_weights` calls `copy_` itself, into a parameter and a buffer."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4, 4), -77.0), requires_grad=False)
            self.register_buffer("bias", torch.full((4,), -77.0), persistent=False)

        def load_weights(self, weights: Weights) -> None:
            for name, src in weights:
                getattr(self, name).data.copy_(src.narrow(0, 4, 4))

    row = Row("B12", dict, {"weight": (8, 4), "bias": (8,)}, by_name)
    model, truth = Model(), Model()
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, row.metas())
    assert {name: plan.entries[name].kind for name in row.checkpoint} == {
        "weight": "direct",
        "bias": "direct",
    }
    loadplan.load_planned(model, plan, row.weights(1))
    loadplan.finish_reload(model)
    truth.load_weights(row.weights(1))
    assert torch.equal(model.weight, truth.weight) and torch.equal(model.bias, truth.bias)


def test_a_reason_names_operator_and_tensor() -> None:
    """B1, B2: what a reader of the plan needs to find the line of the loader."""
    row = next(row for row in SECTION_B if row.id == "B2")
    _, plan = plan_row(row, row.targets())
    reason = plan.entries["src"].reason
    assert "item" in reason or "_local_scalar_dense" in reason
    row = next(row for row in SECTION_B if row.id == "B1")
    _, plan = plan_row(row, row.targets())
    if plan.entries["a"].kind == "fallback":
        assert "mul" in plan.entries["a"].reason


def test_names_that_one_write_joins_have_one_fate() -> None:
    """B8: planned together or delivered together, never one of them alone."""
    for row in SECTION_B:
        if row.id.startswith("B8"):
            _, plan = plan_row(row, row.targets())
            assert plan.entries["a"].kind == plan.entries["b"].kind
