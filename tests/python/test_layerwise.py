"""Layerwise reloads against a fresh model that is loaded eagerly and processed."""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import weakref
from pathlib import Path

import layerwise_models as models
import pytest
import torch
from torch import Tensor, nn

import loadplan

SEED = int(os.environ.get("LOADPLAN_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
ALL = ["norm", "mla", "padded", "repacked", "tied", "scaled", "experts"]


def ready(kinds: list[str], seed: int = 0) -> models.Model:
    """As an engine has it when the first update comes: recorded, loaded, processed."""
    model = models.Model(kinds)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(model_checkpoint(kinds, seed).items())
    model.process()
    return model


def model_checkpoint(kinds: list[str], seed: int) -> dict[str, Tensor]:
    return models.Model(kinds).checkpoint(seed)


def start(model: nn.Module, **options: object) -> None:
    loadplan.start_reload(model, mode="layerwise", **options)


def plan_of(model: nn.Module, checkpoint: dict[str, Tensor]) -> loadplan.LoadPlan:
    start(model)
    plan = loadplan.plan_loads(model, checkpoint)
    loadplan.abort_reload(model)
    return plan


def update(
    model: nn.Module, plan: loadplan.LoadPlan, items: list[tuple[str, Tensor]], **options: object
) -> loadplan.Receipt:
    start(model, **options)
    loadplan.load_planned(model, plan, items)
    return loadplan.finish_reload(model)


def test_an_update_leaves_what_a_fresh_model_has() -> None:
    model = ready(ALL)
    places = models.addresses(model)
    checkpoint = model_checkpoint(ALL, 1)
    start(model)
    assert model.layers[0].weight.is_meta
    plan = loadplan.plan_loads(model, checkpoint)
    loadplan.load_planned(model, plan, checkpoint.items())
    receipt = loadplan.finish_reload(model)
    assert models.different(models.eager(ALL, checkpoint), model) == []
    assert models.addresses(model) == places
    assert set(receipt.names) == set(checkpoint)
    assert receipt.peak_staging_nbytes > 0
    assert receipt.peak_held_nbytes == 0


def test_the_load_format_comes_back_with_class_and_attributes() -> None:
    model = ready(["transposed"])
    layer = model.layers[0]
    assert type(layer.weight) is nn.Parameter
    start(model)
    weight = layer.weight
    assert type(weight) is models.LoaderParameter
    assert weight.is_meta
    assert (weight.shape, weight.stride(), weight.dtype) == ((12, 8), (8, 1), torch.bfloat16)
    assert weight.parts == ("q", "k", "v")
    assert weight.weight_loader.__self__ is layer
    loadplan.abort_reload(model)
    assert type(layer.weight) is nn.Parameter and not layer.weight.is_meta


@pytest.mark.parametrize("kind", [*models.KINDS, "mla", "tied"])
def test_each_kind_of_layer(kind: str) -> None:
    model = ready([kind])
    places = models.addresses(model)
    plan = plan_of(model, model_checkpoint([kind], 0))
    for seed in (1, 2):
        checkpoint = model_checkpoint([kind], seed)
        update(model, plan, list(checkpoint.items()))
        assert models.different(models.eager([kind], checkpoint), model) == []
    assert models.addresses(model) == places


def test_random_models_in_random_order() -> None:
    chance = random.Random(SEED)
    for _ in range(12):
        kinds = [chance.choice([*models.KINDS, "mla", "tied"]) for _ in range(chance.randint(1, 7))]
        model = ready(kinds)
        places = models.addresses(model)
        plan = plan_of(model, model_checkpoint(kinds, 0))
        needed = max(
            sum(p.nbytes for p in layer.parameters()) for layer in models.Model(kinds).layers
        )
        for seed in range(3):
            checkpoint = model_checkpoint(kinds, seed)
            items = list(checkpoint.items())
            chance.shuffle(items)
            bound = chance.choice([None, 4 * needed])
            start(model, defer_processing=chance.random() < 0.2, max_staging_bytes=bound)
            while items:
                bucket = [items.pop() for _ in range(min(len(items), chance.randint(1, 5)))]
                loadplan.load_planned(model, plan, bucket)
            receipt = loadplan.finish_reload(model)
            where = f"LOADPLAN_TEST_SEED={SEED}: {kinds}"
            assert models.different(models.eager(kinds, checkpoint), model) == [], where
            assert models.addresses(model) == places, where
            assert bound is None or receipt.peak_staging_nbytes <= bound, where


def test_a_layer_is_processed_as_soon_as_its_bytes_are_there() -> None:
    model = ready(["transposed", "padded"])
    plan = plan_of(model, model_checkpoint(["transposed", "padded"], 0))
    checkpoint = model_checkpoint(["transposed", "padded"], 1)
    start(model)
    loadplan.load_planned(model, plan, [("0.v", checkpoint["0.v"]), ("0.q", checkpoint["0.q"])])
    assert model.layers[0].weight.is_meta
    loadplan.load_planned(model, plan, [("0.k", checkpoint["0.k"])])
    assert not model.layers[0].weight.is_meta
    assert model.layers[1].weight.is_meta
    loadplan.load_planned(model, plan, [("1.weight", checkpoint["1.weight"])])
    receipt = loadplan.finish_reload(model)
    # One layer at a time; the bias of the first is staged when it is processed.
    assert receipt.peak_staging_nbytes == max((12 * 8 + 12) * 2, 6 * 10 * 4)


def test_processing_can_wait_for_the_end() -> None:
    model = ready(ALL)
    plan = plan_of(model, model_checkpoint(ALL, 0))
    checkpoint = model_checkpoint(ALL, 1)
    start(model, defer_processing=True)
    loadplan.load_planned(model, plan, checkpoint.items())
    assert model.layers[0].weight.is_meta
    loadplan.finish_reload(model)
    assert models.different(models.eager(ALL, checkpoint), model) == []


def test_staging_is_bounded_in_any_order() -> None:
    kinds = ["transposed"] * 6
    model = ready(kinds)
    plan = plan_of(model, model_checkpoint(kinds, 0))
    checkpoint = model_checkpoint(kinds, 1)
    # All q, then all k, then all v: no layer is complete before the end.
    items = sorted(checkpoint.items(), key=lambda item: item[0].split(".")[1])
    one = (12 * 8 + 12) * 2
    receipt = update(model, plan, items, max_staging_bytes=2 * one)
    assert models.different(models.eager(kinds, checkpoint), model) == []
    assert receipt.peak_staging_nbytes <= 2 * one
    assert receipt.peak_held_nbytes == 4 * 2 * 4 * 8 * 2
    assert update(model, plan, items).peak_staging_nbytes > 2 * one


def test_a_bound_below_the_largest_layer_is_refused() -> None:
    model = ready(["norm", "padded"])
    places = models.addresses(model)
    checkpoint = model_checkpoint(["norm", "padded"], 0)
    plan = plan_of(model, checkpoint)
    start(model, max_staging_bytes=100)
    with pytest.raises(
        RuntimeError,
        match=r"the layer of `layers.1.weight` needs 240 staged bytes, more than max_staging_bytes="
        r"100; start_reload with max_staging_bytes=240 or more, or without a bound",
    ):
        loadplan.load_planned(model, plan, checkpoint.items())
    assert loadplan.state(model).state == "active"
    loadplan.abort_reload(model)
    assert loadplan.state(model).state == "idle"
    assert models.addresses(model) == places


def test_held_bytes_need_not_stay_with_the_sender() -> None:
    kinds = ["experts", "transposed", "transposed"]
    model = ready(kinds)
    plan = plan_of(model, model_checkpoint(kinds, 0))
    checkpoint = model_checkpoint(kinds, 1)
    names = sorted(checkpoint, key=lambda name: name[::-1])
    start(model, max_staging_bytes=400)
    for name in names:
        sent = checkpoint[name].clone()
        loadplan.load_planned(model, plan, [(name, sent)])
        sent.zero_()
    loadplan.finish_reload(model)
    assert models.different(models.eager(kinds, checkpoint), model) == []


def test_layers_that_get_nothing_keep_their_kernel_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = ["norm", "transposed", "mla"]
    model = ready(kinds)
    before = copy.deepcopy(model)
    places = models.addresses(model)
    checkpoint = {k: v for k, v in model_checkpoint(kinds, 1).items() if k.startswith("0.")}
    plan = plan_of(model, checkpoint)
    with caplog.at_level(logging.WARNING, logger="loadplan"):
        update(model, plan, list(checkpoint.items()))
    assert [r.args[0] for r in caplog.records] == ["layers.1", "layers.3"]
    assert models.addresses(model) == places
    assert models.different(before, model) == ["layers.0.weight"]


def test_a_selective_update_has_whole_layers() -> None:
    kinds = ["transposed", "padded"]
    model = ready(kinds)
    plan = plan_of(model, model_checkpoint(kinds, 0))
    checkpoint = model_checkpoint(kinds, 1)
    start(model)
    loadplan.load_planned(model, plan, [("0.q", checkpoint["0.q"])])
    with pytest.raises(RuntimeError, match=r"the layer of `layers.0.weight` got 64 of 192 bytes"):
        loadplan.finish_reload(model, partial=["0.q"])
    rest = [(name, checkpoint[name]) for name in ("0.k", "0.v")]
    loadplan.load_planned(model, plan, rest)
    loadplan.finish_reload(model, partial=["0.q", "0.k", "0.v"])
    old = model_checkpoint(kinds, 0) | {k: v for k, v in checkpoint.items() if k[0] == "0"}
    assert models.different(models.eager(kinds, old), model) == []


def test_a_name_that_did_not_come_is_an_error() -> None:
    model = ready(["transposed"])
    before = copy.deepcopy(model)
    plan = plan_of(model, model_checkpoint(["transposed"], 0))
    checkpoint = model_checkpoint(["transposed"], 1)
    start(model)
    loadplan.load_planned(model, plan, [("0.q", checkpoint["0.q"])])
    with pytest.raises(RuntimeError, match="2 planned name"):
        loadplan.finish_reload(model)
    loadplan.abort_reload(model)
    # Nothing was processed: the old bytes are all there.
    assert loadplan.state(model).state == "idle"
    assert models.different(before, model) == []


def test_an_error_of_processing_is_told_and_mended() -> None:
    kinds = ["norm", "transposed", "padded"]
    model = ready(kinds)
    places = models.addresses(model)
    plan = plan_of(model, model_checkpoint(kinds, 0))
    checkpoint = model_checkpoint(kinds, 1)

    def fails() -> None:
        raise ValueError("no kernel for this")

    model.layers[1].process_weights_after_loading = fails
    start(model)
    words = r"post-processing of layer `layers.1` \(Transposed\) failed: ValueError: no kernel"
    with pytest.raises(RuntimeError, match=words):
        loadplan.load_planned(model, plan, checkpoint.items())
    now = loadplan.state(model)
    assert now.state == "failed" and "no kernel for this" in now.error
    assert models.addresses(model).keys() == places.keys()
    del model.layers[1].process_weights_after_loading
    update(model, plan, list(checkpoint.items()))
    assert models.different(models.eager(kinds, checkpoint), model) == []
    assert models.addresses(model) == places


@pytest.mark.parametrize("broken", range(7))
def test_a_hook_that_fails_anywhere(broken: int) -> None:
    """Kernel tensors are on the model, of the old or the new weights; the next update mends all."""
    model = ready(ALL)
    places = models.addresses(model)
    old = models.eager(ALL, model_checkpoint(ALL, 0))
    new = models.eager(ALL, model_checkpoint(ALL, 1))
    plan = plan_of(model, model_checkpoint(ALL, 0))
    layers = [m for m in model.modules() if hasattr(m, "process_weights_after_loading")]
    hook = layers[broken]
    name = next(n for n, m in model.named_modules() if m is hook)

    def fails() -> None:
        raise ValueError("broken")

    hook.process_weights_after_loading = fails
    with pytest.raises(RuntimeError, match=f"layer `{name}` .* failed: ValueError: broken"):
        update(model, plan, list(model_checkpoint(ALL, 1).items()))
    state = loadplan.state(model)
    assert state.state == "failed" and "broken" in state.error and state.undefined
    assert models.addresses(model) == places
    # Each layer has all of its old or all of its new bytes; buffers are written as they come.
    changed = {n.rpartition(".")[0].partition("[")[0] for n in models.different(old, model)}
    missing = {n.rpartition(".")[0].partition("[")[0] for n in models.different(new, model)}
    assert {n for n in changed & missing if "correction" not in n} <= {"layers.7"}
    del hook.process_weights_after_loading
    update(model, plan, list(model_checkpoint(ALL, 2).items()))
    assert models.different(models.eager(ALL, model_checkpoint(ALL, 2)), model) == []
    assert loadplan.state(model).state == "idle"


@pytest.mark.parametrize("index", range(0, 17, 4))
def test_a_name_that_is_wrong_anywhere(index: int) -> None:
    model = ready(ALL)
    places = models.addresses(model)
    plan = plan_of(model, model_checkpoint(ALL, 0))
    items = list(model_checkpoint(ALL, 1).items())
    name = items[index % len(items)][0]
    items[index % len(items)] = (name, torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match=f"`{name}`"):
        update(model, plan, items)
    assert loadplan.state(model).state == "failed"
    assert models.addresses(model) == places
    update(model, plan, list(model_checkpoint(ALL, 2).items()))
    assert models.different(models.eager(ALL, model_checkpoint(ALL, 2)), model) == []


def test_a_failed_arrival_leaves_kernel_tensors() -> None:
    model = ready(["norm", "padded"])
    places = models.addresses(model)
    plan = plan_of(model, model_checkpoint(["norm", "padded"], 0))
    start(model)
    with pytest.raises(ValueError, match=r"`1.weight`"):
        loadplan.load_planned(model, plan, [("1.weight", torch.zeros(3))])
    assert loadplan.state(model).state == "failed"
    assert models.addresses(model) == places


def test_a_result_of_another_shape_names_both() -> None:
    model = ready(["transposed"])
    plan = plan_of(model, model_checkpoint(["transposed"], 0))
    before = copy.deepcopy(model)
    layer = model.layers[0]

    def other() -> None:
        layer.weight = models.plain_parameter(layer.weight[:4].t())

    layer.process_weights_after_loading = other
    start(model)
    words = (
        r"layer `layers.0` .*`weight`: processing made \[8, 4\] torch.bfloat16, the kept kernel "
        r"tensor is \[8, 12\] torch.bfloat16"
    )
    with pytest.raises(RuntimeError, match=words):
        loadplan.load_planned(model, plan, model_checkpoint(["transposed"], 1).items())
    del layer.process_weights_after_loading
    assert models.different(before, model) == []


def test_a_first_load_on_meta_is_processed_in_place() -> None:
    kinds = ["norm", "transposed", "scaled", "repacked"]
    with torch.device("meta"):
        model = models.Model(kinds)
    loadplan.record_metadata_for_reloading(model)
    places = None
    for seed in (1, 2):
        checkpoint = model_checkpoint(kinds, seed)
        start(model)
        # Buffers are in memory from the first load on: another plan.
        plan = loadplan.plan_loads(model, checkpoint)
        loadplan.load_planned(model, plan, checkpoint.items())
        loadplan.finish_reload(model)
        places = places or models.addresses(model)
        assert models.addresses(model) == places
    # What was never in memory has no initial value: those of the scale and order are not known.
    wrong = models.different(models.eager(kinds, checkpoint), model)
    assert {name.split(".")[1] for name in wrong} <= {"2", "3"}


def test_what_an_engine_bound_later_stays() -> None:
    model = ready(["tables"])
    layer = model.layers[0]
    layer.cache = torch.ones(7)
    layer.tables.append(torch.ones(2))
    tables, cache = layer.tables, layer.cache
    plan = plan_of(model, model_checkpoint(["tables"], 0))
    update(model, plan, list(model_checkpoint(["tables"], 1).items()))
    assert layer.tables is tables and layer.cache is cache
    assert torch.equal(cache, torch.ones(7)) and torch.equal(tables[2], torch.ones(2))
    assert torch.equal(tables[0], model_checkpoint(["tables"], 1)["0.weight"].sum(1))


def test_a_repeated_start_skips_what_is_started() -> None:
    model = ready(["norm", "transposed"])
    start(model)
    weight = model.layers[1].weight
    with pytest.raises(RuntimeError, match="start_reload"):
        start(model)
    assert model.layers[1].weight is weight
    loadplan.abort_reload(model)


class InPlace(models.Layer):
    """Multiplies tensors in plain attributes in place, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(3), "weight")
        self.scale = torch.full((3,), 1.5)
        self.unseen = torch.full((3,), 1.5)
        self.items = [torch.ones(3), {"a": torch.ones(3)}]
        self.replaced = [torch.ones(3)]
        self.pair = torch.ones(6).split(3)
        self.many = torch.full((5000,), 2.0)
        self.cache = torch.zeros(3)

    def process_weights_after_loading(self) -> None:
        self.scale.mul_(2)
        self.unseen.data.mul_(self.weight.sum())  # no version tells of it
        self.items[0].add_(self.scale)
        self.items[1]["a"].neg_()
        self.replaced[0] = self.replaced[0] * 2
        self.pair[1].mul_(self.pair[0].mul_(2))
        self.many.mul_(2)
        self.weight = models.plain_parameter((self.weight * self.scale).double())


def in_place_model(layer: type, checkpoint: dict[str, Tensor], ready: bool) -> models.Model:
    model = models.Model(["layer"], {"layer": layer})
    if ready:
        loadplan.record_metadata_for_reloading(model)
    model.load_weights(checkpoint.items())
    model.process()
    return model


@pytest.mark.parametrize("copied", [False, True])
def test_what_processing_changes_in_place_is_changed_once(copied: bool) -> None:
    checkpoints = [{"0.weight": torch.rand(3)} for _ in range(4)]
    model = in_place_model(InPlace, checkpoints[0], ready=True)
    if copied:
        model = copy.deepcopy(model)
    places = models.addresses(model)
    plan = plan_of(model, checkpoints[0])
    for checkpoint in checkpoints:
        model.layers[0].cache.fill_(7)
        update(model, plan, list(checkpoint.items()))
        assert torch.equal(model.layers[0].cache, torch.full((3,), 7.0))
        model.layers[0].cache.zero_()
        assert models.different(in_place_model(InPlace, checkpoint, ready=False), model) == []
    assert models.addresses(model) == places


class InPlaceLarge(models.Layer):
    """Its table is too large to be kept, and no value repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(3), "weight")
        self.table = torch.arange(5000.0)

    def process_weights_after_loading(self) -> None:
        self.table.data.mul_(2)
        self.weight = models.plain_parameter(self.weight.double())


SHARED = torch.ones(3)


class InPlaceShared(models.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(3), "weight")
        self.table = SHARED

    def process_weights_after_loading(self) -> None:
        self.table.mul_(2)
        self.weight = models.plain_parameter(self.weight.double())


@pytest.mark.parametrize(
    ("layer", "why"),
    [(InPlaceLarge, "of 20000 bytes, too many to keep"), (InPlaceShared, "that other layers have")],
)
@pytest.mark.parametrize("atomic", [False, True])
def test_what_cannot_be_changed_once_is_refused(layer: type, why: str, atomic: bool) -> None:
    model = models.Model(["layer", "layer"], {"layer": layer})
    loadplan.record_metadata_for_reloading(model)
    checkpoint = model.checkpoint(0)
    model.load_weights(checkpoint.items())
    model.process()
    before = copy.deepcopy(model)
    plan = plan_of(model, checkpoint)
    words = rf"processing of layer `layers.0` .* changes `table` in place, .* {why}"
    with pytest.raises(RuntimeError, match=words):
        update(model, plan, list(model.checkpoint(1).items()), atomic=atomic)
    assert torch.equal(model.layers[0].table, before.layers[0].table)
    assert not atomic or models.different(before, model) == []


def test_large_tensors_that_processing_only_reads_stay() -> None:
    class Reads(InPlaceLarge):
        def process_weights_after_loading(self) -> None:
            self.weight = models.plain_parameter((self.weight + self.table[-1]).double())

    model = in_place_model(Reads, {"0.weight": torch.rand(3)}, ready=True)
    checkpoint = {"0.weight": torch.rand(3)}
    update(model, plan_of(model, checkpoint), list(checkpoint.items()))
    assert models.different(in_place_model(Reads, checkpoint, ready=False), model) == []


def test_nothing_recorded_is_refused() -> None:
    model = models.Model(["norm"])
    with pytest.raises(RuntimeError, match="record_metadata_for_reloading"):
        start(model)
    assert loadplan.state(model).state == "idle"


def test_a_processed_model_in_direct_mode_is_told_of_the_other() -> None:
    model = ready(["repacked"])
    checkpoint = model_checkpoint(["repacked"], 1)
    plan = plan_of(model, checkpoint)
    with pytest.raises(RuntimeError, match="`verify` runs the loader on the live tensors, which"):
        loadplan.verify(model, plan, checkpoint)
    loadplan.start_reload(model)
    with pytest.raises(RuntimeError, match='kernel format; .* `start_reload.model, mode="layerw'):
        loadplan.plan_loads(model, checkpoint)


def test_a_mapping_has_no_layers() -> None:
    targets = loadplan.Targets({"w": torch.zeros(2)}, lambda weights: None)
    with pytest.raises(TypeError, match="needs a module"):
        start(targets)


def test_options_of_layerwise_belong_to_it() -> None:
    with pytest.raises(ValueError, match="mode='layerwise'"):
        loadplan.start_reload(ready(["norm"]), mode="direct", max_staging_bytes=5)


def test_destinations_on_meta_are_not_given_out() -> None:
    model = ready(["norm"])
    plan = plan_of(model, model_checkpoint(["norm"], 0))
    assert plan.get_dest("0.weight") is None
    start(model)
    with pytest.raises(ValueError, match="has no destination"):
        plan.delivered("0.weight")


class Reads(models.Transposed):
    """Looks at values: its names go through the loader."""

    def load(self, parameter: Tensor, part: str, loaded: Tensor) -> None:
        if part == "k" and loaded.sum() > 0:
            loaded = -loaded
        super().load(parameter, part, loaded)


@pytest.mark.parametrize("bound", [None, 700])
def test_fallback_names_go_through_the_loader(bound: int | None) -> None:
    more = {"reads": Reads}
    kinds = ["transposed", "reads", "padded"]
    model = models.Model(kinds, more)
    checkpoint = model.checkpoint(0)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(checkpoint.items())
    model.process()
    places = models.addresses(model)
    plan = plan_of(model, checkpoint)
    assert [n for n, e in plan.entries.items() if e.kind == "fallback"] == ["1.k"]
    for seed in (1, 2):
        checkpoint = (
            model.checkpoint(seed) if seed == 0 else models.Model(kinds, more).checkpoint(seed)
        )
        update(model, plan, list(reversed(checkpoint.items())), max_staging_bytes=bound)
        assert models.different(models.eager(kinds, checkpoint, more), model) == []
        assert models.addresses(model) == places


def test_a_record_holds_no_model() -> None:
    model = ready(["norm", "transposed"])
    checkpoint = model_checkpoint(["norm", "transposed"], 1)
    update(model, plan_of(model, checkpoint), list(checkpoint.items()))
    start(model)
    gone = weakref.ref(model), weakref.ref(model.layers[1])
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_copied_model_has_its_own_record() -> None:
    kinds = [kind for kind in ALL if kind != "padded"]  # a copy of it is packed
    model = ready(kinds)
    other = copy.deepcopy(model)
    checkpoint = model_checkpoint(kinds, 1)
    plan = plan_of(other, checkpoint)
    update(other, plan, list(checkpoint.items()))
    assert models.different(models.eager(kinds, checkpoint), other) == []
    assert models.different(models.eager(kinds, model_checkpoint(kinds, 0)), model) == []


def test_many_updates_in_random_order() -> None:
    """Short by default; LOADPLAN_SOAK=1000 for the long one."""
    chance = random.Random(SEED)
    model = ready(ALL)
    places = models.addresses(model)
    plan = plan_of(model, model_checkpoint(ALL, 0))
    checkpoints = [model_checkpoint(ALL, seed) for seed in range(4)]
    objects = []
    count = int(os.environ.get("LOADPLAN_SOAK", "30"))
    for number in range(count):
        checkpoint = chance.choice(checkpoints)
        items = list(checkpoint.items())
        chance.shuffle(items)
        start(model, max_staging_bytes=chance.choice([None, 1200]))
        middle = chance.randint(0, len(items))
        loadplan.load_planned(model, plan, items[:middle])
        loadplan.load_planned(model, plan, items[middle:])
        loadplan.finish_reload(model)
        if number in (5, count - 1):  # the first updates fill caches
            gc.collect()
            objects.append(len(gc.get_objects()))
        if number + 1 in (50, 500, 1000):
            status = Path("/proc/self/status").read_text()
            print(number + 1, next(line for line in status.splitlines() if "VmRSS" in line))
    assert models.different(models.eager(ALL, checkpoint), model) == []
    assert models.addresses(model) == places
    assert objects[1] <= objects[0] + 50


def test_verify_is_for_direct_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(["norm"])
    plan = plan_of(model, model_checkpoint(["norm"], 0))
    monkeypatch.setenv("LOADPLAN_RELOAD_MODE", "layerwise")
    with pytest.raises(RuntimeError, match="not in load format in mode layerwise"):
        loadplan.verify(model, plan, model_checkpoint(["norm"], 1))


def memory_of(model: torch.nn.Module) -> dict[str, bytes]:
    """Whole storages, with what lies between rows."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: bytes(tensor.untyped_storage().tolist()) for name, tensor in named.items()}


@pytest.mark.parametrize("fault", ["layer 0", "layer 1", "layer 3", "arrival", "abort"])
def test_an_atomic_reload_that_ends_badly_leaves_the_old_bytes(fault: str) -> None:
    kinds = ALL
    model = ready(kinds)
    before, places = memory_of(model), models.addresses(model)
    plan = plan_of(model, model_checkpoint(kinds, 0))
    items = list(model_checkpoint(kinds, 1).items())

    def fails() -> None:
        raise ValueError("no kernel for this")

    layers = [layer for layer in model.modules() if hasattr(layer, "process_weights_after_loading")]
    if fault.startswith("layer"):
        layers[int(fault[-1])].process_weights_after_loading = fails
    elif fault == "arrival":
        items[-1] = (items[-1][0], torch.zeros(99))
    start(model, atomic=True)
    if fault == "abort":
        loadplan.load_planned(model, plan, items)
        loadplan.abort_reload(model)
    else:
        with pytest.raises((RuntimeError, ValueError), match="idle as before"):
            loadplan.load_planned(model, plan, items)
            loadplan.finish_reload(model)
    assert loadplan.state(model).state == "idle"
    assert memory_of(model) == before
    assert models.addresses(model) == places
    for layer in layers:
        vars(layer).pop("process_weights_after_loading", None)
    checkpoint = model_checkpoint(kinds, 2)
    receipt = update(model, plan, list(checkpoint.items()), atomic=True)
    assert models.different(models.eager(kinds, checkpoint), model) == []
    covered = receipt.coverage["layers.0.weight"]
    assert covered.nbytes == covered.total_nbytes > 0
