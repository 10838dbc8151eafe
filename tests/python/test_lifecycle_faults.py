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
