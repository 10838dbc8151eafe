"""Each public function of vLLM's `reload`, as its documentation has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import layerwise_models as models
import pytest
import torch
from torch import Tensor, nn

from loadplan.compat import vllm_reload as reload

KINDS = ["norm", "transposed", "tied", "repacked"]
CONFIG = SimpleNamespace(dtype=torch.bfloat16)
CPU = torch.device("cpu")


class Method:
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = models.plain_parameter(layer.weight.t().contiguous())


class AttentionLike(nn.Module):
    """Derives from its neighbour, in the dtype that it is given."""

    def __init__(self, neighbour: nn.Module) -> None:
        super().__init__()
        vars(self)["neighbour"] = neighbour

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.absorbed = (self.neighbour.weight * 2).to(act_dtype)


class Model(nn.Module):
    """Attention stands before the layer that it derives from."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(4, 6, bias=False).requires_grad_(False)
        self.attention = AttentionLike(linear)
        self.linear = linear
        self.linear.quant_method = Method()
        self.norm = nn.RMSNorm(4).requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


def checkpoint(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "linear.weight": torch.randn(6, 4, generator=generator),
        "norm.weight": torch.randn(4, generator=generator),
    }


def process(model: Model) -> None:
    with torch.no_grad():
        model.linear.quant_method.process_weights_after_loading(model.linear)
        model.attention.process_weights_after_loading(CONFIG.dtype)


def eager(weights: dict[str, Tensor]) -> Model:
    model = Model()
    model.load_weights(weights.items())
    process(model)
    return model


def ready() -> Model:
    model = Model()
    reload.record_metadata_for_reloading(model)
    model.load_weights(checkpoint(0).items())
    process(model)
    return model


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("VLLM_RELOAD_MODE", raising=False)
    return monkeypatch


SIGNATURES = {
    "record_metadata_for_reloading": ["model"],
    "initialize_layerwise_reload": ["model", "*defer_processing"],
    "finalize_layerwise_processing": ["model", "model_config"],
    "start_reload": ["model"],
    "finish_reload": ["model", "model_config", "device"],
    "check_plannable": ["model"],
    "plan_loads": ["model", "metadata"],
    "load_planned": ["model", "plan", "weights"],
    "support_quantized_model_reload_from_hp_weights": ["original_load_weights"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(reload, name)).parameters.values()
    names = [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in parameters]
    assert names == SIGNATURES[name]
    assert name in reload.__all__


def test_record_metadata_for_reloading_keeps_parameters_for_restoration() -> None:
    model = ready()
    assert model.linear.weight.shape == (4, 6)
    reload.initialize_layerwise_reload(model)
    assert model.linear.weight.shape == (6, 4) and model.linear.weight.is_meta


def test_initialize_and_finalize_around_load_weights() -> None:
    model = ready()
    places = models.addresses(model)
    for seed in (1, 2, 3):
        reload.initialize_layerwise_reload(model)
        assert model.norm.weight.is_meta
        items = list(checkpoint(seed).items())
        assert model.load_weights(items[:1]) >= {"linear.weight"}
        model.load_weights(iter(items[1:]))
        reload.finalize_layerwise_processing(model, CONFIG)
        assert models.different(eager(checkpoint(seed)), model) == []
        assert models.addresses(model) == places
        assert "load_weights" not in vars(model)
    assert model.attention.absorbed.dtype == torch.bfloat16


def test_initialize_skips_layers_that_are_initialised() -> None:
    model = ready()
    reload.initialize_layerwise_reload(model)
    weight = model.linear.weight
    reload.initialize_layerwise_reload(model)
    assert model.linear.weight is weight
    model.load_weights(checkpoint(1).items())
    reload.finalize_layerwise_processing(model, CONFIG)
    assert models.different(eager(checkpoint(1)), model) == []


def test_defer_processing_leaves_it_to_finalize() -> None:
    model = ready()
    for seed in (1, 2):
        reload.initialize_layerwise_reload(model, defer_processing=True)
        model.load_weights(checkpoint(seed).items())
        assert model.norm.weight.is_meta
        reload.finalize_layerwise_processing(model, CONFIG)
        assert models.different(eager(checkpoint(seed)), model) == []


def test_finalize_gives_layers_without_weights_their_kernel_tensors() -> None:
    model = ready()
    before = eager(checkpoint(0))
    reload.initialize_layerwise_reload(model)
    model.load_weights([("norm.weight", checkpoint(1)["norm.weight"])])
    reload.finalize_layerwise_processing(model, CONFIG)
    assert models.different(before, model) == ["norm.weight"]
    # The plan of one name does not keep all from coming.
    for names in (["norm.weight", "linear.weight"], ["linear.weight"]):
        reload.initialize_layerwise_reload(model)
        model.load_weights([(name, checkpoint(2)[name]) for name in names])
        reload.finalize_layerwise_processing(model, CONFIG)
        assert models.different(eager(checkpoint(2)), model) == []


def test_start_and_finish_in_layerwise_mode() -> None:
    model = ready()
    reload.start_reload(model)
    assert model.linear.weight.is_meta
    model.load_weights(checkpoint(1).items())
    reload.finish_reload(model, CONFIG, CPU)
    assert models.different(eager(checkpoint(1)), model) == []


def test_start_and_finish_in_direct_mode(mode: pytest.MonkeyPatch) -> None:
    mode.setenv("VLLM_RELOAD_MODE", "direct")
    model = Model()
    model.linear.quant_method = None
    reload.start_reload(model)
    assert reload.direct_reload_active(model)
    plan = reload.plan_loads(model, metadata(checkpoint(1)))
    reload.load_planned(model, plan, checkpoint(1).items())
    reload.finish_reload(model, CONFIG, CPU)
    assert not reload.direct_reload_active(model)
    assert torch.equal(model.linear.weight, checkpoint(1)["linear.weight"])
    # Post-processing has run again.
    assert torch.equal(model.attention.absorbed, (model.linear.weight * 2).bfloat16())


def metadata(weights: dict[str, Tensor]) -> list[reload.ParamMeta]:
    return [reload.ParamMeta(n, tuple(t.shape), t.dtype) for n, t in weights.items()]


def test_plan_loads_and_load_planned() -> None:
    model = ready()
    reload.start_reload(model)
    plan = reload.plan_loads(model, metadata(checkpoint(0)))
    assert isinstance(plan, reload.LoadPlan)
    assert plan.get_boxes("linear.weight") == (((0, 6), (0, 4)),)
    reload.load_planned(model, plan, checkpoint(1).items())
    reload.finish_reload(model, CONFIG, CPU)
    assert models.different(eager(checkpoint(1)), model) == []
    # "The plan holds for every later update of the same model."
    reload.start_reload(model)
    reload.load_planned(model, plan, checkpoint(2).items())
    reload.finish_reload(model, CONFIG, CPU)
    assert models.different(eager(checkpoint(2)), model) == []


def test_plan_loads_outside_a_reload_raises() -> None:
    with pytest.raises(RuntimeError, match="between start_reload and finish_reload"):
        reload.plan_loads(ready(), metadata(checkpoint(0)))


def test_plan_loads_of_a_name_declared_twice_raises() -> None:
    model = ready()
    reload.start_reload(model)
    with pytest.raises(ValueError, match="twice"):
        reload.plan_loads(model, metadata(checkpoint(0)) * 2)


def test_get_dest_and_get_boxes(mode: pytest.MonkeyPatch) -> None:
    mode.setenv("VLLM_RELOAD_MODE", "direct")
    model = Model()
    reload.start_reload(model)
    plan = reload.plan_loads(model, metadata(checkpoint(0)))
    full = checkpoint(1)["norm.weight"]
    for box, tensor in plan.get_dest("norm.weight"):
        tensor.copy_(full[tuple(slice(*part) for part in box)].reshape(tensor.shape))
    assert torch.equal(model.norm.weight, full)


def test_check_plannable_refuses_rebalanced_experts() -> None:
    model = ready()
    reload.check_plannable(model)
    parallel = SimpleNamespace(enable_eplb=True)
    model.linear.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    with pytest.raises(RuntimeError, match="`linear`"):
        reload.check_plannable(model)


class AutoWeightsLoader:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @reload.support_quantized_model_reload_from_hp_weights
    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, mapper: Any = None
    ) -> set[str]:
        mapped = weights if mapper is None else ((name, mapper(t)) for name, t in weights)
        return Model.load_weights(self.module, mapped)


def test_support_quantized_model_reload_from_hp_weights() -> None:
    model = Model()
    reload.record_metadata_for_reloading(model)
    model._model_config = CONFIG
    loader = AutoWeightsLoader(model)
    # Not yet quantised: the loader itself.
    loader.load_weights(checkpoint(0).items())
    assert torch.equal(model.linear.weight, checkpoint(0)["linear.weight"])
    process(model)
    model._do_torchao_reload = True
    places = models.addresses(model)
    for seed in (1, 2):
        loaded = loader.load_weights(weights=iter(checkpoint(seed).items()), mapper=None)
        assert loaded == set(checkpoint(seed))
        assert model._do_torchao_reload is True
        assert models.different(eager(checkpoint(seed)), model) == []
        assert models.addresses(model) == places


def test_another_mapper_is_planned_anew() -> None:
    model = ready()
    model._model_config = CONFIG
    model._do_torchao_reload = True
    for seed, mapper in ((1, None), (2, torch.neg), (3, torch.neg), (4, None)):
        # Engines make a loader for each call.
        AutoWeightsLoader(model).load_weights(checkpoint(seed).items(), mapper=mapper)
        wanted = {name: t if mapper is None else mapper(t) for name, t in checkpoint(seed).items()}
        assert models.different(eager(wanted), model) == []


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = ready()
    places = models.addresses(model)
    reload.initialize_layerwise_reload(model)
    model.load_weights([("no.such", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="no.such"):
        reload.finalize_layerwise_processing(model, CONFIG)
    assert models.addresses(model) == places
    reload.initialize_layerwise_reload(model)
    model.load_weights(checkpoint(1).items())
    reload.finalize_layerwise_processing(model, CONFIG)
    assert models.different(eager(checkpoint(1)), model) == []
