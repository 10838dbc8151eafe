"""Tensors older than the tracing, no targets: what a plan was made of leaves them as they were.

However a loader writes one, wherever it keeps it and however the tracing ends; and an update leaves
in it what an eager call leaves.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loadplan
from loadplan import LoadPlan, ParamMeta, Targets

F32 = torch.float32
NAMES = ("a", "b", "c")
METAS = [ParamMeta(name, (4,), F32) for name in NAMES]
Weights = Any


def sets_data(t: Tensor) -> None:
    t.data = torch.full((4,), 8.0)


def writes_array(t: Tensor) -> None:
    t.numpy()[1:] = 9


def assigns(t: Tensor) -> None:
    t[1:3] = 5


def assigns_by_index(t: Tensor) -> None:
    t[torch.tensor([3, 0])] = torch.tensor([1.0, 2.0])


def assigns_by_mask(t: Tensor) -> None:
    t[torch.tensor([True, False, True, True])] = 4


WAYS: dict[str, Callable[[Tensor], object]] = {
    "copy_": lambda t: t.copy_(torch.arange(4.0)),
    "copy_ of another dtype": lambda t: t.copy_(torch.arange(4)),
    "fill_": lambda t: t.fill_(3),
    "fill_ with a tensor": lambda t: t.fill_(torch.tensor(3.0)),
    "zero_": lambda t: t.zero_(),
    "item assignment": assigns,
    "assignment by index": assigns_by_index,
    "assignment by mask": assigns_by_mask,
    "add_": lambda t: t.add_(1),
    "mul_ by a tensor": lambda t: t.mul_(torch.arange(4.0) + 2),
    "augmented": lambda t: t.__iadd__(torch.ones(4)),
    "out": lambda t: torch.add(torch.ones(4), 2, out=t),
    "out of a factory": lambda t: torch.arange(4.0, out=t),
    "out of another size": lambda t: torch.cat([torch.ones(4), torch.ones(4)], out=t),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([2, 1]), torch.ones(2)),
    "index_put_": lambda t: t.index_put_((torch.tensor([1]),), torch.ones(1), accumulate=True),
    "masked_fill_": lambda t: t.masked_fill_(torch.arange(4) > 1, 7),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([1, 2]), torch.ones(2)),
    "foreach": lambda t: torch._foreach_add_([t], 2),
    "data": lambda t: t.data.fill_(6),
    "detach": lambda t: t.detach().clamp_(0, 1),
    "view": lambda t: t.view(2, 2).t()[0].copy_(torch.ones(2)),
    "as_strided": lambda t: t.as_strided((2,), (2,)).zero_(),
    "other dtype": lambda t: t.view(torch.int32).bitwise_or_(1),
    "init": lambda t: nn.init.constant_(t, 3),
    "random": lambda t: t.normal_(),
    "resize_": lambda t: t.resize_(8).fill_(1),
    "resize_ to less": lambda t: t.resize_(2),
    "set_": lambda t: t.set_(torch.full((4,), 8.0)),
    "set_ to a storage": lambda t: t.set_(torch.full((4,), 8.0).untyped_storage()),
    "data = ...": sets_data,
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "numpy": writes_array,
    "dlpack": lambda t: np.from_dlpack(t).__array__(),
}
# An eager call leaves other numbers each time, or other memory: only the tracing is looked at.
ONLY_TRACED = {"resize_", "unsqueeze_", "out of another size"}


class Holder(nn.Module):
    """Keeps one tensor that is no target, in one of some places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.randn(4), requires_grad=False))
        whole = torch.randn(6)
        hidden = whole[1:5] if place == "part" else torch.randn(4)
        self.whole = lambda: whole
        self.get = lambda: hidden
        if place == "attribute":
            self.shown = hidden
        if place == "list":
            self.listed = [hidden]

    def targets(self, load: Callable[[Holder, Weights], None]) -> Targets:
        named = {name: getattr(self, name).data for name in NAMES}
        return Targets(named, lambda weights: load(self, weights))

    def state(self) -> list[Tensor]:
        hidden = self.get()
        assert hidden.device.type == "cpu"
        shape = torch.tensor([*hidden.shape, *hidden.stride(), hidden.storage_offset()])
        storage = torch.empty(0, dtype=torch.uint8).set_(hidden.untyped_storage())
        parts = [hidden, shape, storage, self.whole(), *(getattr(self, n).data for n in NAMES)]
        return [part.detach().clone() for part in parts]


def difference(one: list[Tensor], other: list[Tensor]) -> list[int]:
    return [
        index
        for index, (a, b) in enumerate(zip(one, other, strict=True))
        if not (a.shape == b.shape and torch.equal(a, b))
    ]


def updates(holder: Holder, targets: Targets, plan: LoadPlan, eager: Holder, load: Any) -> None:
    for index in range(2):
        weights = {n: torch.randn(4, generator=torch.Generator().manual_seed(index)) for n in NAMES}
        torch.manual_seed(index)
        load(eager, iter([(n, w.clone()) for n, w in weights.items()]))
        torch.manual_seed(index)
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, [(n, w.clone()) for n, w in weights.items()])
        loadplan.finish_reload(targets)
        assert difference(holder.state(), eager.state()) == []


End = Callable[[Holder, str, Tensor], None]


def simply(holder: Holder, name: str, w: Tensor) -> None:
    getattr(holder, name).data.copy_(w)


def fails(holder: Holder, name: str, w: Tensor) -> None:
    if name == "c":
        raise OverflowError("half way")
    getattr(holder, name).data.copy_(w)


def is_interrupted(holder: Holder, name: str, w: Tensor) -> None:
    if name == "c" and w.device.type == "cpu":
        raise KeyboardInterrupt
    getattr(holder, name).data.copy_(w)


def overlaps(holder: Holder, name: str, w: Tensor) -> None:
    holder.get()[:1].copy_(getattr(holder, name)[:1])
    holder.a.data[1:].copy_(holder.a.data[:-1])


def reads(holder: Holder, name: str, w: Tensor) -> None:
    if name == "b" and w.sum().item() > 0:
        w = w * 2
    getattr(holder, name).data.copy_(w)


def reads_and_goes_on(holder: Holder, name: str, w: Tensor) -> None:
    try:
        value = w[0].item() if name == "b" else 1
    except RuntimeError:
        value = 1
    getattr(holder, name).data.copy_(w * value)


def reads_all(holder: Holder, name: str, w: Tensor) -> None:
    getattr(holder, name).data.fill_(w[0].item())


ENDS: dict[str, tuple[End, type[BaseException] | None]] = {
    "planned": (simply, None),
    "an error": (fails, RuntimeError),
    "an interruption": (is_interrupted, KeyboardInterrupt),
    "a refusal": (overlaps, RuntimeError),
    "a read": (reads, None),
    "a read that is caught": (reads_and_goes_on, None),
    "reads of all": (reads_all, None),
}


def loader(way: str, end: End, at: str) -> Callable[[Holder, Weights], None]:
    """Writes the hidden tensor in the way, in the turn of one name, then goes on to the end."""

    def load(holder: Holder, weights: Weights) -> None:
        if at == "before":
            WAYS[way](holder.get())
        for name, w in weights:
            if at == name:
                WAYS[way](holder.get())
            end(holder, name, w)
        if at == "after":
            WAYS[way](holder.get())

    return load


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_written_and_however_tracing_ends(way: str, end: str) -> None:
    step, raises = ENDS[end]
    others = [("attribute", "before"), ("list", "after"), ("part", "before"), ("closure", "after")]
    for place, at in (("closure", "b"), others[(len(way) + len(end)) % len(others)]):
        load = loader(way, step, at)
        holder, eager = Holder(place), Holder(place)
        targets = holder.targets(load)
        before = holder.state()
        plan = None
        try:
            plan = loadplan.plan_loads(targets, METAS)
        except (RuntimeError, KeyboardInterrupt) as error:
            assert raises is None or isinstance(error, raises)
        assert difference(before, holder.state()) == [], (place, at)
        if plan is not None and way not in ONLY_TRACED:
            updates(holder, targets, plan, eager, load)


def test_a_pass_by_hand_that_raises_puts_back() -> None:
    holder = Holder("closure")
    before = holder.state()
    with pytest.raises(OverflowError), loadplan.trace(holder.targets(lambda *_: None), METAS):
        holder.get().add_(1)
        raise OverflowError
    assert difference(before, holder.state()) == []


def table_of(make: Callable[[], Tensor]) -> Callable[[Holder, Weights], None]:
    @functools.lru_cache
    def table() -> Tensor:
        return make().mul_(3)

    def load(holder: Holder, weights: Weights) -> None:
        for name, w in weights:
            getattr(holder, name).data.copy_(w * table())

    load.table = table  # type: ignore[attr-defined]
    return load


def around_an_array() -> Tensor:
    return torch.from_numpy(np.frombuffer(np.full(4, 2, np.float32).tobytes(), np.float32).copy())


OLD = torch.full((4,), 2.0)
MAKERS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(4).fill_(2),
    "full": lambda: torch.full((4,), 2.0),
    "tensor": lambda: torch.tensor([2.0] * 4),
    "Tensor": lambda: torch.Tensor([2.0] * 4),
    "as_tensor": lambda: torch.as_tensor([2.0] * 4),
    "as_tensor of an array": lambda: torch.as_tensor(np.full(4, 2, np.float32)),
    "from_numpy": around_an_array,
    "asarray": lambda: torch.asarray(np.full(4, 2, np.float32)),
    "arange": lambda: torch.arange(2.0, 3.0, 0.25).floor(),
    "linspace": lambda: torch.linspace(2, 2, 4),
    "arithmetic": lambda: OLD + 0,
    "clone": lambda: OLD.clone(),
    "to": lambda: OLD.double().float(),
    "cat": lambda: torch.cat([OLD[:2], OLD[2:]]),
    "stack": lambda: torch.stack([OLD[0]] * 4),
    "contiguous": lambda: torch.full((4, 2), 2.0).t()[0].contiguous(),
    "reshape": lambda: torch.full((2, 2), 2.0).t().reshape(4),
    "indexing": lambda: OLD[torch.tensor([0, 1, 2, 3])],
    "deepcopy": lambda: copy.deepcopy(OLD),
    "parameter": lambda: nn.Parameter(OLD.clone(), requires_grad=False),
    "sort": lambda: OLD.sort().values,
    "where": lambda: torch.where(OLD > 0, OLD, 0),
    "eye": lambda: torch.eye(4).sum(0) * 2,
    "split": lambda: torch.full((8,), 2.0).split(4)[1],
    "chunk by copy": lambda: torch.split_copy(torch.full((8,), 2.0), 4)[1],
    "from a buffer": lambda: torch.tensor(np.full(4, 2, np.float32)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_pass_makes_keeps_its_bytes(maker: str) -> None:
    load = table_of(MAKERS[maker])
    holder, eager = Holder("closure"), Holder("closure")
    targets = holder.targets(load)
    plan = loadplan.plan_loads(targets, METAS)
    assert load.table().tolist() == [6] * 4  # type: ignore[attr-defined]
    assert all(entry.kind == "derived" for entry in plan.entries.values())
    updates(holder, targets, plan, eager, load)


def test_memory_of_an_array_that_is_older() -> None:
    array = np.zeros(4, np.float32)
    tensor = torch.from_numpy(array)

    def load(holder: Holder, weights: Weights) -> None:
        tensor.add_(1)
        for name, w in weights:
            getattr(holder, name).data.copy_(w)

    loadplan.plan_loads(Holder("closure").targets(load), METAS)
    assert array.tolist() == [0] * 4


def test_a_counter_that_decides_the_first_call() -> None:
    """Every pass meets what the first one met."""
    calls = torch.zeros(1)

    def load(holder: Holder, weights: Weights) -> None:
        if calls.item() == 0:
            calls.fill_(1)
            holder.get().fill_(5)
        for name, w in weights:
            getattr(holder, name).data.copy_(w)

    holder = Holder("closure")
    before = holder.state()
    plan = loadplan.plan_loads(holder.targets(load), METAS)
    assert calls.item() == 0
    assert difference(before, holder.state()) == []
    assert {entry.kind for entry in plan.entries.values()} == {"fallback"}


def test_a_name_that_is_given_up_wrote_it() -> None:
    """The pass without the name does not write the tensor, whose memory is as it was."""

    def load(holder: Holder, weights: Weights) -> None:
        for name, w in weights:
            if name == "b":
                holder.get().copy_(w)
            reads_and_goes_on(holder, name, w)

    holder, eager = Holder("closure"), Holder("closure")
    targets = holder.targets(load)
    plan = loadplan.plan_loads(targets, METAS)
    assert [plan.entries[name].kind for name in NAMES] == ["derived", "fallback", "derived"]
    updates(holder, targets, plan, eager, load)


def test_another_name_decides_what_a_name_that_is_given_up_writes() -> None:
    """A call with the names that go through the loader alone would leave something else."""

    def load(holder: Holder, weights: Weights) -> None:
        seen = []
        for name, w in weights:
            seen.append(name)
            if name == "b":
                scale = 1
                try:
                    scale = w[0].item()
                except RuntimeError:
                    pass
                holder.get()[:2].fill_(scale)
                if "a" in seen:
                    holder.get()[2:].copy_(w[2:])

    holder, eager = Holder("closure"), Holder("closure")
    targets = holder.targets(load)
    plan = loadplan.plan_loads(targets, METAS)
    updates(holder, targets, plan, eager, load)


def test_one_part_is_traced_and_another_written_for_real() -> None:
    def load(holder: Holder, weights: Weights) -> None:
        for name, w in weights:
            if name == "b":
                holder.get()[:2].copy_(w[:2])
                holder.get()[2:].masked_fill_(torch.tensor([True, False]), 1)
            getattr(holder, name).data.copy_(w)

    holder, eager = Holder("closure"), Holder("closure")
    targets = holder.targets(load)
    before = holder.state()
    plan = loadplan.plan_loads(targets, METAS)
    assert difference(before, holder.state()) == []
    assert {entry.kind for entry in plan.entries.values()} == {"direct"}
    updates(holder, targets, plan, eager, load)


def test_writes_through_an_array_make_every_name_fall_back() -> None:
    plan = loadplan.plan_loads(Holder("closure").targets(loader("numpy", simply, "before")), METAS)
    assert plan.entries["a"].reason == (
        "the loader writes a tensor of shape [4] and dtype float32 that is no target and outlives "
        "load_weights through `Tensor.numpy`"
    )


def test_an_array_that_is_only_read_costs_nothing() -> None:
    def load(holder: Holder, weights: Weights) -> None:
        scale = float(holder.get().numpy()[0])
        for name, w in weights:
            getattr(holder, name).data.copy_(w * scale)

    plan = loadplan.plan_loads(Holder("closure").targets(load), METAS)
    assert {entry.kind for entry in plan.entries.values()} == {"derived"}


@pytest.mark.parametrize("way", ["resize_", "set_", "data = ...", "unsqueeze_"])
def test_one_that_moves_makes_every_name_fall_back(way: str) -> None:
    plan = loadplan.plan_loads(Holder("closure").targets(loader(way, simply, "before")), METAS)
    operator = {"resize_": "aten::resize_", "data = ...": "Tensor.data"}.get(way, "aten::" + way)
    assert plan.entries["a"].reason.startswith(f"`{operator}")
    assert plan.entries["a"].reason.endswith(
        "moves a tensor of shape [4] that is no target and outlives load_weights"
    )


def test_one_that_becomes_a_checkpoint_tensor_is_put_back() -> None:
    def load(holder: Holder, weights: Weights) -> None:
        for name, w in weights:
            if name == "b":
                holder.get().data = w
            getattr(holder, name).data.copy_(w)

    holder, eager = Holder("closure"), Holder("closure")
    before = holder.state()
    targets = holder.targets(load)
    plan = loadplan.plan_loads(targets, METAS)
    assert difference(before, holder.state()) == []
    assert {entry.kind for entry in plan.entries.values()} == {"fallback"}
    updates(holder, targets, plan, eager, load)


def test_a_file_that_a_pass_reads_is_left_alone() -> None:
    stored = io.BytesIO()
    torch.save(torch.ones(4), stored)

    def load(holder: Holder, weights: Weights) -> None:
        stored.seek(0)
        scale = torch.load(stored)
        for name, w in weights:
            getattr(holder, name).data.copy_(w * scale)

    plan = loadplan.plan_loads(Holder("closure").targets(load), METAS)
    assert {entry.kind for entry in plan.entries.values()} == {"derived"}
