"""Mirrors: tensors that are no targets, that a loader writes, and that outlive the load."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loader_programs import random_values
from torch import Tensor, nn

import loadplan
from loadplan import LoadPlan, ParamMeta, Targets

F32 = torch.float32
NAMES = ("weight", "bias")
METAS = [ParamMeta(name, (4,), F32) for name in NAMES]
Weights = Any


class Model(nn.Module):
    def __init__(self, program: Callable[[Model, Weights], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0) + 10, requires_grad=False)
        self.bias = nn.Parameter(torch.arange(4.0) + 20, requires_grad=False)
        self.kept = torch.zeros(4)
        self.calls = torch.zeros(1)
        self.listed = [torch.zeros(2, 4)]
        enclosed = torch.ones(4)
        self.enclosed = lambda: enclosed
        self.store: dict[str, Tensor] = {}
        self.program = program

    def load_weights(self, weights: Weights) -> None:
        self.program(self, weights)

    def bytes(self) -> dict[str, Tensor]:
        shown = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        shown.update(self.named_parameters(), listed=self.listed[0], enclosed=self.enclosed())
        shown.update({f"store.{name}": value for name, value in self.store.items()})
        return {name: value.detach().clone() for name, value in shown.items()}


def copies_all(model: Model, weights: Weights) -> None:
    for name, w in weights:
        getattr(model, name).copy_(w)


Program = Callable[[Model, Weights], None]
PROGRAMS: dict[str, tuple[Program, str]] = {}


def program(kinds: str) -> Callable[[Program], Program]:
    """``kinds`` of `weight` and `bias` that the plan must have."""

    def note(run: Program) -> Program:
        PROGRAMS[run.__name__] = run, kinds
        return run

    return note


@program("direct direct")
def keeps_the_old_bytes(model: Model, weights: Weights) -> None:
    model.kept.copy_(model.weight)
    copies_all(model, weights)


@program("direct direct")
def keeps_the_old_bytes_in_a_closure(model: Model, weights: Weights) -> None:
    model.enclosed().copy_(model.weight.data)
    copies_all(model, weights)


@program("direct direct")
def adds_the_old_bytes(model: Model, weights: Weights) -> None:
    with torch.inference_mode():
        model.kept.add_(model.weight)
    copies_all(model, weights)


@program("direct direct")
def writes_with_out(model: Model, weights: Weights) -> None:
    torch.add(model.weight, model.kept, out=model.listed[0][1])
    copies_all(model, weights)


@program("direct direct")
def counts(model: Model, weights: Weights) -> None:
    model.calls.add_(1)
    model.enclosed()[:1].mul_(3)
    copies_all(model, weights)


@program("fallback fallback")
def counts_and_looks(model: Model, weights: Weights) -> None:
    model.calls.add_(1)
    times = model.calls.item()
    for name, w in weights:
        getattr(model, name).copy_(w * times)


@program("direct derived")
def mirrors(model: Model, weights: Weights) -> None:
    for name, w in weights:
        getattr(model, name).copy_(w)
        if name == "bias":
            model.listed[0][0].copy_(w * 2)
            model.kept[1:3].copy_(model.bias[:2])
            model.kept[3:].fill_(5)


@program("derived derived")
def reads_the_mirror_back(model: Model, weights: Weights) -> None:
    for name, w in weights:
        row = model.listed[0][NAMES.index(name)]
        row.copy_(w)
        getattr(model, name).copy_(row.flip(0) + model.calls)
    model.calls.fill_(7)


@program("direct direct")
def mirrors_in_a_thread(model: Model, weights: Weights) -> None:
    def work() -> None:
        model.kept.copy_(model.weight)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    copies_all(model, weights)


@program("direct direct")
def shows_one_mirror_twice(model: Model, weights: Weights) -> None:
    model.kept.view(2, 2)[0].copy_(model.weight[:2])
    model.kept[1:3].add_(model.kept[2:].sum())
    copies_all(model, weights)


@functools.lru_cache
def table() -> Tensor:
    made = torch.empty(4)
    made.fill_(2)
    return made.mul_(3)


@program("derived derived")
def makes_a_table_once(model: Model, weights: Weights) -> None:
    for name, w in weights:
        getattr(model, name).copy_(w * table())


@program("fallback fallback")
def makes_a_tensor_each_time(model: Model, weights: Weights) -> None:
    for name, w in weights:
        model.store[name] = torch.empty(4)
        model.store[name].copy_(w)
        getattr(model, name).copy_(w)


@program("fallback fallback")
def makes_a_tensor_of_old_bytes_each_time(model: Model, weights: Weights) -> None:
    model.store["old"] = torch.empty(4)
    model.store["old"].copy_(model.weight)
    copies_all(model, weights)


@program("direct fallback")
def sets_an_attribute(model: Model, weights: Weights) -> None:
    for name, w in weights:
        getattr(model, name).copy_(w)
        if name == "bias":
            model.fresh = torch.empty(4)
            model.fresh.copy_(w)


@program("direct fallback")
def fills_with_a_value(model: Model, weights: Weights) -> None:
    for name, w in weights:
        getattr(model, name).copy_(w)
        if name == "bias":
            model.kept.fill_(w.sum().item())


@program("fallback fallback")
def writes_at_the_first_call(model: Model, weights: Weights) -> None:
    if model.calls.item() == 0:
        model.calls.fill_(1)
        model.kept.fill_(5)
    copies_all(model, weights)


@program("fallback fallback")
def draws(model: Model, weights: Weights) -> None:
    model.kept.normal_()
    copies_all(model, weights)


@program("fallback fallback")
def is_read_through_a_pointer(model: Model, weights: Weights) -> None:
    model.kept.copy_(model.weight)
    model.kept.data_ptr()
    copies_all(model, weights)


@program("direct direct")
def fills_scratch_space(model: Model, weights: Weights) -> None:
    for name, w in weights:
        scratch = torch.empty(4)
        scratch.zero_()
        scratch[:2].copy_(w[:2])
        scratch[2:].copy_(w[2:])
        getattr(model, name).copy_(scratch)


def plan_of(model: Model) -> LoadPlan:
    loadplan.start_reload(model)
    try:
        return loadplan.plan_loads(model, METAS)
    finally:
        loadplan.abort_reload(model)


def update(model: Model, plan: LoadPlan, weights: dict[str, Tensor], buckets: int) -> None:
    torch.manual_seed(4)
    loadplan.start_reload(model)
    items = [(name, w.clone()) for name, w in weights.items()]
    if buckets == 1:
        loadplan.load_planned(model, plan, items)
    else:
        for item in reversed(items) if buckets == 3 else items:
            loadplan.load_planned(model, plan, [item])
    loadplan.finish_reload(model)


@pytest.mark.parametrize("buckets", [1, 2, 3], ids=["whole", "each", "backwards"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_update_by_plan_leaves_mirrors_as_eager_does(name: str, buckets: int) -> None:
    table.cache_clear()
    run, kinds = PROGRAMS[name]
    eager, planned = Model(run), Model(run)
    before = planned.bytes()
    plan = plan_of(planned)
    after = planned.bytes()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert [plan.entries[n].kind for n in NAMES] == kinds.split()
    assert not any(key not in NAMES for key in plan.uncovered)
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(3):
        weights = {n: random_values(generator, (4,), F32) for n in NAMES}
        torch.manual_seed(4)
        planned.store.clear()
        eager.load_weights(iter([(n, w.clone()) for n, w in weights.items()]))
        update(planned, plan, weights, buckets)
        left, expected = planned.bytes(), eager.bytes()
        assert left.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(left[key].view(torch.uint8), value.view(torch.uint8)), key


def test_a_fallback_of_mirrors_names_operator_and_line() -> None:
    plan = plan_of(Model(makes_a_tensor_each_time))
    line = makes_a_tensor_each_time.__code__.co_firstlineno + 4
    assert plan.entries["weight"].reason == (
        f"`aten::copy_` at test_mirrors.py:{line} takes it into a tensor of shape [4] and dtype "
        "float32 that is no target and outlives load_weights"
    )


def test_a_mirror_that_has_gone_refuses_the_update() -> None:
    model = Model(keeps_the_old_bytes)
    plan = plan_of(model)
    held = model.kept
    for value, words in ((held.clone(), "is another tensor now"), (None, "is another tensor now")):
        model.kept = value
        loadplan.start_reload(model)
        with pytest.raises(RuntimeError, match=f"`kept`, which is no target .* {words}"):
            loadplan.load_planned(model, plan, [("bias", torch.ones(4))])
        loadplan.abort_reload(model)
        assert model.bias.tolist() == [20, 21, 22, 23]
    model.kept = held
    update(model, plan, {n: torch.ones(4) for n in NAMES}, 1)
    assert model.kept.tolist() == [10, 11, 12, 13]


def test_a_mirror_that_only_the_plan_holds_refuses_the_update() -> None:
    held = [torch.zeros(4)]
    live = {"p": torch.ones(4)}

    def load(weights: Weights) -> None:
        held[0].copy_(live["p"])
        for _, w in weights:
            live["p"].copy_(w)

    targets = Targets(live, load_weights=load)
    plan = loadplan.plan_loads(targets, [ParamMeta("w", (4,), F32)])
    held[0] = torch.zeros(4)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="no longer exists; plan again"):
        loadplan.load_planned(targets, plan, [("w", torch.zeros(4))])
    loadplan.abort_reload(targets)
    assert live["p"].tolist() == [1] * 4


def test_a_plan_with_mirrors_is_not_saved(tmp_path: Any) -> None:
    plan = plan_of(Model(keeps_the_old_bytes))
    with pytest.raises(RuntimeError, match="its loader writes `kept`, which is no target"):
        plan.save(tmp_path / "plan")


def test_a_first_call_that_keeps_traced_bytes_refuses_the_plan() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            if name not in model.store:
                model.store[name] = torch.empty(4)
                model.store[name].copy_(w)
            getattr(model, name).copy_(model.store[name])

    with pytest.raises(RuntimeError, match="in one call and keeps it for the next ones"):
        plan_of(Model(load))


def test_an_atomic_update_puts_mirrors_back() -> None:
    model = Model(mirrors)
    plan = plan_of(model)
    before = model.bytes()
    loadplan.start_reload(model, atomic=True)
    loadplan.load_planned(model, plan, [("bias", torch.ones(4))])
    loadplan.abort_reload(model)
    after = model.bytes()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_required_and_the_receipt_speak_of_declared_targets() -> None:
    model = Model(mirrors)
    plan = plan_of(model)
    loadplan.start_reload(model, required=["*"])
    loadplan.load_planned(model, plan, [(n, torch.ones(4)) for n in NAMES])
    receipt = loadplan.finish_reload(model)
    assert set(receipt.coverage) == set(NAMES)


def test_verify_puts_mirrors_back_and_compares_them() -> None:
    model = Model(counts)
    plan = plan_of(model)
    before = model.bytes()
    assert loadplan.verify(model, plan, {n: torch.ones(4) for n in NAMES}) == ()
    after = model.bytes()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_pass_that_fails_leaves_a_mirror_alone() -> None:
    def load(model: Model, weights: Weights) -> None:
        model.calls.add_(1)
        model.kept.copy_(model.weight)
        raise OverflowError("half way")

    model = Model(load)
    before = model.bytes()
    with pytest.raises(RuntimeError, match="OverflowError: half way"):
        plan_of(model)
    after = model.bytes()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_known_values_that_an_operator_writes_are_put_back() -> None:
    """The operator runs, as all that it reads is known; what it wrote must not stay."""

    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            getattr(model, name).copy_(w)
            w.fill_(1)
            model.kept.index_copy_(0, torch.tensor([1, 0]), w[:2])

    model, eager = Model(load), Model(load)
    weights = {name: torch.randn(4) for name in NAMES}
    eager.load_weights((name, w.clone()) for name, w in weights.items())
    loadplan.start_reload(model)
    before = model.bytes()
    plan = loadplan.plan_loads(model, METAS)
    assert all(torch.equal(value, before[name]) for name, value in model.bytes().items())
    loadplan.load_planned(model, plan, weights.items())
    loadplan.finish_reload(model)
    assert model.kept.tolist() == eager.kept.tolist() == [1, 1, 0, 0]
