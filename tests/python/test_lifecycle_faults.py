"""What once went wrong in sessions: each test is a small program that found it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from lifecycle_models import F32, Weights
from torch import Tensor, nn

import loadplan
from loadplan import Targets


class Plain:
    """A loader of direct names; `f`, which it looks at, falls back."""

    def __init__(self, *names: str, **hooks: Any) -> None:
        self.live = {name: torch.zeros(2) for name in names}
        self.targets = Targets(self.live, self.load_weights, **hooks)
        self.metas = {name: ((2,), F32) for name in names}

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "f" and weight.sum().item() < 0:
                weight = -weight
            self.live[name].copy_(weight)

    def weights(self, value: float = 1.0) -> dict[str, Tensor]:
        return {name: torch.full((2,), value) for name in self.live}


def test_a_model_whose_hook_failed_takes_the_next_update() -> None:
    fails = [True]

    def process(layer: Any) -> None:
        if fails[0]:
            raise OverflowError

    model = Plain("a", process=process)
    plan = loadplan.plan_loads(model.targets, model.metas)
    for fail in (True, False):
        fails[0] = fail
        loadplan.start_reload(model.targets)
        loadplan.load_planned(model.targets, plan, model.weights().items())
        if fail:
            with pytest.raises(RuntimeError, match="OverflowError"):
                loadplan.finish_reload(model.targets)
            assert loadplan.state(model.targets).state == "failed"
    loadplan.finish_reload(model.targets)
    assert loadplan.state(model.targets).state == "idle"


def test_a_target_that_moves_after_the_loader_was_called() -> None:
    model = Plain("a", "f")
    plan = loadplan.plan_loads(model.targets, model.metas)
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, [("f", torch.ones(2))])
    model.live["a"] = torch.zeros(2)
    loadplan.load_planned(model.targets, plan, [("a", torch.ones(2))])
    with pytest.raises(RuntimeError, match="`a` has moved"):
        loadplan.finish_reload(model.targets)
    assert loadplan.state(model.targets).state == "failed"


def two_plans() -> tuple[Plain, loadplan.LoadPlan, Tensor, loadplan.LoadPlan]:
    """A plan whose destinations an engine keeps, and one that was used after it."""
    model = Plain("a", "b")
    first = loadplan.plan_loads(model.targets, model.metas)
    [(_, place)] = first.get_dest("a") or []
    second = loadplan.plan_loads(model.targets, {"b": ((2,), F32)})
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, second, [("b", torch.ones(2))])
    loadplan.finish_reload(model.targets)
    return model, first, place, second


def test_destinations_of_an_earlier_plan_are_kept_too() -> None:
    model, first, place, _ = two_plans()
    loadplan.start_reload(model.targets, atomic=True)
    place.fill_(7)
    first.delivered("a")
    with pytest.raises(ValueError, match="the old bytes are back"):
        loadplan.load_planned(model.targets, first, [("b", torch.ones(9))])
    assert model.live["a"].tolist() == [0, 0] and model.live["b"].tolist() == [1, 1]


def test_destinations_of_an_earlier_plan_may_have_been_written() -> None:
    model, _, place, second = two_plans()
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, second, [("b", torch.ones(2))])
    place.fill_(7)
    loadplan.abort_reload(model.targets)
    assert set(loadplan.state(model.targets).undefined) == {"a", "b"}


def test_a_destination_that_was_looked_at_does_not_stand_for_a_name() -> None:
    model = Plain("a", "b", "c")
    plan = loadplan.plan_loads(model.targets, model.metas)
    plan.get_dest("b")
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, [("a", torch.ones(2))])
    with pytest.raises(RuntimeError, match="2 planned name.* `b`, `c`"):
        loadplan.finish_reload(model.targets)
    coverage = loadplan.finish_reload(model.targets, partial=["a"]).coverage
    assert [item.nbytes for item in coverage.values()] == [8, 0, 0]


def test_an_engine_that_says_nothing_is_trusted_with_what_it_lists() -> None:
    model = Plain("a", "b")
    plan = loadplan.plan_loads(model.targets, model.metas)
    [(_, place)] = plan.get_dest("a") or []
    loadplan.start_reload(model.targets)
    place.fill_(3)
    coverage = loadplan.finish_reload(model.targets, partial=["a"]).coverage
    assert [item.nbytes for item in coverage.values()] == [8, 0]


# ------------------------------------------------------------------ hooks
@pytest.mark.parametrize("call", ["abort", "finish", "start", "load"])
def test_hooks_have_no_say_in_the_reload(call: str) -> None:
    def process(layer: Any) -> None:
        if call == "abort":
            loadplan.abort_reload(model.targets)
        elif call == "finish":
            loadplan.finish_reload(model.targets)
        elif call == "start":
            loadplan.start_reload(model.targets)
        else:
            loadplan.load_planned(model.targets, plan, [])

    model = Plain("a", process=process)
    plan = loadplan.plan_loads(model.targets, model.metas)
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, model.weights().items())
    with pytest.raises(RuntimeError, match="while `finish_reload` runs the hooks"):
        loadplan.finish_reload(model.targets)
    assert loadplan.state(model.targets).state == "failed"


@pytest.mark.parametrize("hook", ["restore", "process"])
def test_an_interrupt_in_a_hook_stays_one(hook: str) -> None:
    interrupts = [False]

    def run(layer: Any) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt

    model = Plain("a", **{hook: run})
    loadplan.start_reload(model.targets)
    plan = loadplan.plan_loads(model.targets, model.metas)
    loadplan.abort_reload(model.targets)
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        loadplan.start_reload(model.targets)
        loadplan.load_planned(model.targets, plan, model.weights().items())
        loadplan.finish_reload(model.targets)
    assert "KeyboardInterrupt" in loadplan.state(model.targets).error
    assert loadplan.state(model.targets).state == "failed"


class Turned(nn.Module):
    """Layers whose kernel format is a transposed view of the load format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(3))
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.requires_grad_(False)
        self.fail = ""
        self.metas = {str(index): ((2, 3), F32) for index in range(3)}
        self.targets = Targets(self, restore=self.turn("restore"), process=self.turn("process"))
        for layer in self.layers:
            layer.weight.data = layer.weight.data.t()

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.layers[int(name)].weight.data.copy_(weight)

    def turn(self, hook: str) -> Any:
        def run(layer: nn.Module) -> None:
            if not isinstance(layer, nn.Linear):
                return
            layer.weight.data = layer.weight.data.t()
            if self.fail == hook and layer is self.layers[1]:
                raise OverflowError

        return run

    def update(self, plan: loadplan.LoadPlan, weight: Tensor, **options: Any) -> None:
        loadplan.start_reload(self.targets, **options)
        weights = [(name, weight) for name in self.metas]
        loadplan.load_planned(self.targets, plan, weights)
        loadplan.finish_reload(self.targets)

    def plan(self) -> loadplan.LoadPlan:
        loadplan.start_reload(self.targets)
        plan = loadplan.plan_loads(self.targets, self.metas)
        loadplan.abort_reload(self.targets)
        return plan


@pytest.mark.parametrize("hook", ["restore", "process"])
def test_a_hook_that_fails_between_layers_can_be_made_good(hook: str) -> None:
    model = Turned()
    plan = model.plan()
    model.fail = hook
    with pytest.raises(RuntimeError, match="layer `layers.1`, raised OverflowError"):
        model.update(plan, torch.rand(2, 3))
    assert "table" in loadplan.state(model.targets).undefined
    model.fail = ""
    weight = torch.rand(2, 3)
    model.update(plan, weight)
    for layer in model.layers:
        assert layer.weight.shape == (3, 2) and torch.equal(layer.weight.t(), weight)


def test_layers_that_stay_in_load_format_are_told() -> None:
    model = Turned()
    plan = model.plan()
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, [("0", torch.rand(2, 3))])
    loadplan.abort_reload(model.targets)
    undefined = loadplan.state(model.targets).undefined
    assert {f"layers.{index}.weight" for index in range(3)} <= set(undefined)


def test_an_atomic_update_gives_back_what_a_hook_deleted() -> None:
    model = nn.Linear(3, 2, bias=False).requires_grad_(False)
    fails = [False]

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            model.weight.data.copy_(weight)

    def process(layer: nn.Module) -> None:
        if fails[0]:
            layer.packed = nn.Parameter(layer.weight * 2, requires_grad=False)
            del layer.weight
            raise OverflowError

    targets = Targets(model, load_weights, process=process)
    plan = loadplan.plan_loads(targets, {"w": ((2, 3), F32)})
    weight, before = model.weight, model.weight.clone()
    fails[0] = True
    loadplan.start_reload(targets, atomic=True)
    loadplan.load_planned(targets, plan, [("w", torch.ones(2, 3))])
    with pytest.raises(RuntimeError, match="the old bytes are back"):
        loadplan.finish_reload(targets)
    assert dict(model.named_parameters()) == {"weight": weight} and model.weight is weight
    assert torch.equal(weight, before)


# ------------------------------------------------------------------ one model, one session
def test_a_module_has_one_session_whoever_stands_for_it() -> None:
    model = nn.Linear(3, 2, bias=False)

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            model.weight.data.copy_(weight)

    targets = Targets(model, load_weights)
    plan = loadplan.plan_loads(targets, {"w": ((2, 3), F32)})
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="`start_reload` was called before"):
        loadplan.start_reload(Targets(model, load_weights))
    with pytest.raises(ValueError):
        loadplan.load_planned(model, plan, [("w", torch.zeros(1))])
    assert loadplan.state(model).state == "failed"


def test_hooks_must_outlive_the_reload() -> None:
    model = Turned()
    plan = model.plan()
    other = Targets(model, process=model.turn("process"))
    loadplan.start_reload(other)
    del other
    with pytest.raises(RuntimeError, match="no longer exist, nor do their hooks"):
        loadplan.load_planned(model, plan, [])
    loadplan.abort_reload(model)
    assert loadplan.state(model).state == "idle"


def test_threads_may_deliver_at_the_same_time() -> None:
    names = [f"n{index}" for index in range(40)]
    model = Plain(*names, "f")
    calls = [0]
    load_weights = model.load_weights

    def counted(weights: Weights) -> None:
        calls[0] += 1
        load_weights(weights)

    targets = Targets(model.live, counted)
    plan = loadplan.plan_loads(targets, model.metas)
    for turn in range(20):
        calls[0] = 0
        weights = list(model.weights(float(turn)).items())
        loadplan.start_reload(targets, atomic=bool(turn % 2))
        parts = [iter(weights[start::4]) for start in range(4)]
        threads = [
            threading.Thread(target=loadplan.load_planned, args=(targets, plan, part))
            for part in parts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(loadplan.finish_reload(targets).names) == set(model.metas)
        assert calls[0] == 1
        assert all(tensor.tolist() == [turn, turn] for tensor in model.live.values())


# ------------------------------------------------------------------ refusals
def test_a_mode_that_refuses_leaves_the_model_idle() -> None:
    model = Plain("a")
    with pytest.raises(TypeError, match="needs a module"):
        loadplan.start_reload(model.targets, mode="layerwise", atomic=True)
    assert loadplan.state(model.targets).state == "idle"


def test_arguments_that_are_no_lists_or_sizes() -> None:
    model = Plain("a")
    plan = loadplan.plan_loads(model.targets, model.metas)
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, model.weights().items())
    with pytest.raises(TypeError, match="`partial` is the string"):
        loadplan.finish_reload(model.targets, partial="a")
    loadplan.finish_reload(model.targets)
    with pytest.raises(ValueError, match="`max_staging_bytes` is -1"):
        loadplan.start_reload(nn.Linear(1, 1), mode="layerwise", max_staging_bytes=-1)


def test_an_atomic_update_of_a_failed_model_says_that_it_is_one() -> None:
    model = Plain("a", "b")
    plan = loadplan.plan_loads(model.targets, model.metas)
    for atomic in (False, True):
        loadplan.start_reload(model.targets, atomic=atomic)
        with pytest.raises(ValueError) as error:
            loadplan.load_planned(model.targets, plan, [("a", torch.ones(2)), ("b", torch.ones(3))])
    assert "an earlier failure has still to be made good" in str(error.value)
    assert loadplan.state(model.targets).state == "failed"


def test_verify_leaves_no_session_behind() -> None:
    model = Plain("a", "b")
    plan = loadplan.plan_loads(model.targets, model.metas)
    weights = {"a": torch.ones(2)}  # `b` does not come
    with pytest.raises(RuntimeError, match="did not arrive: `b`"):
        loadplan.verify(model.targets, plan, weights)
    assert loadplan.state(model.targets).state == "idle"
    assert not model.live["a"].any()
