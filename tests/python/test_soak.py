"""Many updates: nothing grows, nothing is kept alive, every byte is right."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref

import pytest
import torch
from lifecycle_models import F32, Everything, Weights, bytes_of, differing
from torch import Tensor, nn

import loadplan

# `./dev soak` sets it to 1000 or to what it is told.
UPDATES = int(os.environ.get("LOADPLAN_SOAK", "60"))
SEED = int(os.environ.get("LOADPLAN_TEST_SEED", "1"))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))
        self.weight.weight_loader = self.load  # leads from the parameter to the module

    def load(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear() for _ in range(3))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.layers[int(name)].weight.weight_loader(weight)

    metas = {str(index): ((8, 4), F32) for index in range(3)}


def reload(model: nn.Module, plan: loadplan.LoadPlan, atomic: bool, how: str) -> None:
    weights = [(name, torch.ones(8, 4)) for name in Small.metas]
    loadplan.start_reload(model, atomic=atomic)
    loadplan.load_planned(model, plan, weights[:2])
    if how == "abort":
        loadplan.abort_reload(model)
        return
    if how == "fail":
        with pytest.raises(ValueError):
            loadplan.load_planned(model, plan, weights)
        return
    loadplan.load_planned(model, plan, weights[2:])
    loadplan.finish_reload(model)


@pytest.mark.parametrize("how", ["finish", "abort", "fail", "leave"])
@pytest.mark.parametrize("atomic", [False, True])
def test_deleting_the_model_frees_everything(atomic: bool, how: str) -> None:
    model = Small()
    loadplan.start_reload(model, atomic=atomic)
    plan = loadplan.plan_loads(model, Small.metas)
    if how != "leave":
        loadplan.abort_reload(model)
        reload(model, plan, atomic, how)
    else:
        loadplan.load_planned(model, plan, [("0", torch.ones(8, 4))])
    gone = [weakref.ref(model), *(weakref.ref(layer) for layer in model.layers)]
    storage = weakref.ref(model.layers[0].weight.untyped_storage())
    parameter = weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert all(ref() is None for ref in gone) and parameter() is None
    del plan
    gc.collect()
    assert storage() is None


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_a_thousand_reloads_do_not_grow() -> None:
    model = Small()
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, Small.metas)
    loadplan.abort_reload(model)
    ways = [(atomic, how) for atomic in (False, True) for how in ("finish", "abort", "fail")]
    for index in range(1300):
        if index == 300:
            gc.collect()
            objects, memory = len(gc.get_objects()), resident_kb()
        reload(model, plan, *ways[index % len(ways)])
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resident_kb() - memory < 2048


def send(
    model: Everything, plan: loadplan.LoadPlan, weights: dict[str, Tensor], rng: random.Random
):
    names = list(weights)
    rng.shuffle(names)
    while names:
        count = rng.randint(1, len(names))
        bucket = [(name, weights[name].clone()) for name in names[:count]]
        names = names[count:]
        loadplan.load_planned(model.targets, plan, rng.choice([list, iter])(bucket))
        for _, tensor in bucket:  # a sender may reuse its memory
            tensor.fill_(-1)


def test_soak(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(SEED)
    model = Everything()
    plan = model.plan()
    began, warm = time.perf_counter(), min(UPDATES // 4, 200)
    memory, failures = 0, 0
    for index in range(UPDATES):
        if index == warm:
            gc.collect()
            memory = resident_kb()
        weights = model.weights(SEED * 100_000 + index)
        atomic = rng.random() < 0.5
        before, expected = bytes_of(model.targets), model.eager(weights)
        if rng.random() < 0.25:
            failures += 1
            model.fail_in_loader = rng.choice(["half way", "at the end"])
            loadplan.start_reload(model.targets, atomic=atomic)
            with pytest.raises(RuntimeError):
                send(model, plan, weights, rng)
            model.fail_in_loader = ""
            assert not atomic or differing(model.targets, before) == [], f"seed {SEED}, {index}"
        loadplan.start_reload(model.targets, atomic=atomic)
        send(model, plan, weights, rng)
        loadplan.finish_reload(model.targets)
        assert differing(model.targets, expected) == [], f"seed {SEED}, update {index}"
    gc.collect()
    growth = resident_kb() - memory
    with capsys.disabled():
        if "LOADPLAN_SOAK" in os.environ:
            seconds = time.perf_counter() - began
            print(
                f"\nsoak, direct: {UPDATES} updates, {failures} failed ones between, "
                f"{seconds:.1f} s, resident memory {growth:+d} KiB after update {warm}"
            )
    assert growth < 4096
