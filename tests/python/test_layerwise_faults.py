"""What once went wrong in layerwise reloads: each test is a small program that found it."""

from __future__ import annotations

import logging
import random

import layerwise_models as models
import pytest
import torch
from fault_programs import MORE, memory_of
from torch import Tensor

import loadplan


class LiveCopy(models.Layer):
    """The loader copies one live buffer into another, of which processing makes something."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(4, 3), "weight")
        self.register_buffer("source", torch.arange(4.0))
        self.register_buffer("shift", torch.zeros(4))

    def load_part(self, part: str, loaded: Tensor) -> None:
        self.shift.copy_(self.source)
        super().load_part(part, loaded)

    def process_weights_after_loading(self) -> None:
        self.weight = models.plain_parameter((self.weight + self.shift[:, None]).t().contiguous())


class Unknown(models.Layer):
    """A parameter that no checkpoint has, too large to be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(4, 3), "weight")
        self.add("positions", torch.arange(8192.0))

    def process_weights_after_loading(self) -> None:
        self.weight = models.plain_parameter(self.weight.t().contiguous())


class Scale(models.Layer):
    """Deferred, with a parameter of its own that processing changes."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        self.add("scale", torch.ones(4), "scale")

    def process_weights_after_loading(self) -> None:
        self.scale = models.plain_parameter(self.scale * 2)


KINDS = {**MORE, "live copy": LiveCopy, "unknown": Unknown, "scale": Scale}


def checkpoint_of(kinds: list[str], seed: int) -> dict[str, Tensor]:
    return models.Model(kinds, KINDS).checkpoint(seed)


def planned(kinds: list[str]) -> tuple[models.Model, loadplan.LoadPlan]:
    model = models.Model(kinds, KINDS)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(checkpoint_of(kinds, 0).items())
    model.process()
    loadplan.start_reload(model, mode="layerwise")
    plan = loadplan.plan_loads(model, checkpoint_of(kinds, 0))
    loadplan.abort_reload(model)
    return model, plan


def test_live_bytes_are_copied_before_a_layer_is_processed() -> None:
    model, plan = planned(["live copy"])
    checkpoint = checkpoint_of(["live copy"], 1)
    wanted = models.Model(["live copy"], KINDS)
    for one in (model, wanted):
        one.layers[0].source.add_(1)
    wanted.load_weights(checkpoint.items())
    wanted.process()
    loadplan.start_reload(model, mode="layerwise")
    loadplan.load_planned(model, plan, checkpoint.items())
    loadplan.finish_reload(model)
    assert models.different(wanted, model) == []


def test_bytes_that_nobody_knows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, plan = planned(["unknown", "norm"])
    for seed in (1, 2):
        with caplog.at_level(logging.WARNING, logger="loadplan"):
            loadplan.start_reload(model, mode="layerwise")
            loadplan.load_planned(model, plan, checkpoint_of(["unknown", "norm"], seed).items())
            loadplan.finish_reload(model)
    [record] = caplog.records  # once
    assert "`layers.0.positions` (32768 bytes)" in record.getMessage()
    loadplan.start_reload(model, mode="layerwise", required=["*"])
    with pytest.raises(RuntimeError, match=r"`layers.0.positions` \(32768 of 32768 bytes\)"):
        loadplan.load_planned(model, plan, [])


def test_a_deferred_layer_is_not_processed_twice() -> None:
    kinds = ["norm", "scale"]
    model, plan = planned(kinds)
    new = checkpoint_of(kinds, 1)
    loadplan.start_reload(model, mode="layerwise")
    loadplan.load_planned(model, plan, [("0.weight", new["0.weight"])])
    with pytest.raises(RuntimeError, match="the layer of `layers.1.scale` is processed in every"):
        loadplan.finish_reload(model, partial=["0.weight"])
    loadplan.load_planned(model, plan, [("1.scale", new["1.scale"])])
    loadplan.finish_reload(model, partial=["0.weight", "1.scale"])
    assert models.different(models.eager(kinds, new, KINDS), model) == []


def test_what_processing_wrote_is_told_by_the_names_of_the_kernel_format() -> None:
    kinds = ["scaled", "transposed", "norm"]
    model, plan = planned(kinds)
    before = memory_of(model)
    weights = {k: v for k, v in checkpoint_of(kinds, 1).items() if k.startswith("0.")}
    loadplan.start_reload(model, mode="layerwise")
    with pytest.raises(ValueError):
        loadplan.load_planned(model, plan, [*weights.items(), ("2.weight", torch.zeros(99))])
    now = memory_of(model)
    changed = {name for name, old in before.items() if now[name] != old}
    undefined = set(loadplan.state(model).undefined)
    assert "layers.0.weight_scale" in changed <= undefined
    # Layers that were not processed are not among them.
    assert all(name.startswith("layers.0.") for name in undefined)


def test_what_processing_writes_in_place_before_it_fails() -> None:
    model, plan = planned(["in place"])
    layer = model.layers[0]
    process = layer.process_weights_after_loading

    def fails() -> None:
        process()
        raise OverflowError

    layer.process_weights_after_loading = fails  # type: ignore[method-assign]
    before = layer.table.clone()
    loadplan.start_reload(model, mode="layerwise")
    with pytest.raises(RuntimeError, match="the weights are undefined"):
        loadplan.load_planned(model, plan, checkpoint_of(["in place"], 1).items())
    assert not torch.equal(layer.table, before)
    assert "layers.0.table" in loadplan.state(model).undefined


def test_the_call_of_the_loader_waits_for_room() -> None:
    """In any order of arrival: layers that have begun may hold the room that it needs."""
    kinds = ["experts", "looked", "padded"]
    model, plan = planned(kinds)
    chance = random.Random(1)
    for seed in range(1, 30):
        checkpoint = checkpoint_of(kinds, seed)
        items = list(checkpoint.items())
        chance.shuffle(items)
        loadplan.start_reload(model, mode="layerwise", max_staging_bytes=330)
        for item in items:
            loadplan.load_planned(model, plan, [item])
        receipt = loadplan.finish_reload(model)
        assert receipt.peak_staging_nbytes <= 330
        assert models.different(models.eager(kinds, checkpoint, KINDS), model) == []


def test_a_tie_to_a_deferred_layer_is_not_called_empty(caplog: pytest.LogCaptureFixture) -> None:
    model = models.Model(["tied"])
    model.layers[1].deferred = True
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(model.checkpoint(0).items())
    model.process()
    loadplan.start_reload(model, mode="layerwise")
    checkpoint = models.Model(["tied"]).checkpoint(1)
    plan = loadplan.plan_loads(model, checkpoint)
    with caplog.at_level(logging.WARNING, logger="loadplan"):
        loadplan.load_planned(model, plan, checkpoint.items())
        loadplan.finish_reload(model)
    assert caplog.records == []
    assert models.different(models.eager(["tied"], checkpoint), model) == []


@pytest.mark.parametrize("call", ["abort", "finish", "load"])
def test_hooks_have_no_say_in_the_reload(call: str) -> None:
    kinds = ["norm", "transposed", "padded"]
    model, plan = planned(kinds)

    def process() -> None:
        if call == "abort":
            loadplan.abort_reload(model)
        elif call == "finish":
            loadplan.finish_reload(model, partial=[])
        else:
            loadplan.load_planned(model, plan, [])

    model.layers[1].process_weights_after_loading = process  # type: ignore[method-assign]
    loadplan.start_reload(model, mode="layerwise")
    with pytest.raises(RuntimeError, match="while `load_planned` runs the hooks"):
        loadplan.load_planned(model, plan, checkpoint_of(kinds, 1).items())
    assert loadplan.state(model).state == "failed"


def test_sessions_of_two_models_do_not_meet() -> None:
    kinds = ["transposed", "looked", "mla"]
    both = [planned(kinds) for _ in range(2)]
    checkpoints = [checkpoint_of(kinds, seed) for seed in (1, 2)]
    for model, _ in both:
        loadplan.start_reload(model, mode="layerwise", atomic=True)

    def interleaved(index: int):
        other, plan = both[1 - index]
        for name, tensor in checkpoints[index].items():
            if index == 0:
                loadplan.load_planned(other, plan, [(name, checkpoints[1][name])])
            yield name, tensor

    loadplan.load_planned(*both[0], interleaved(0))
    for (model, _), checkpoint in zip(both, checkpoints, strict=True):
        loadplan.finish_reload(model)
        assert models.different(models.eager(kinds, checkpoint, KINDS), model) == []
