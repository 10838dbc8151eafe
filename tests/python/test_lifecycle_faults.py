"""What once went wrong in sessions: each test is a small program that found it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lifecycle_models import F32, Weights
from torch import Tensor

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
