"""Full-precision weights into a model that torchao has quantised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import layerwise_models as models
import pytest
import torch
from torch import Tensor, nn

import loadplan

torchao = pytest.importorskip("torchao.quantization")

CONFIGS = {
    "int8": torchao.Int8WeightOnlyConfig,
    "float8": torchao.Float8WeightOnlyConfig,
}


class Quantise:
    """The post-processing of one linear layer."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        torchao.quantize_(layer, self.config())


class Block(nn.Module):
    """Fused projections and an output, in bfloat16."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, dtype=torch.bfloat16)
        self.qkv = nn.Linear(64, 192, bias=True, dtype=torch.bfloat16)
        self.out = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        for layer in (self.qkv, self.out):
            layer.quant_method = Quantise(config)
        self.requires_grad_(False)

    @loadplan.reload_from_high_precision
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            part, _, kind = name.partition(".")
            if part in "qkv":
                getattr(self.qkv, kind).data.narrow(0, "qkv".index(part) * 64, 64).copy_(tensor)
            else:
                getattr(getattr(self, part), kind).data.copy_(tensor)
            loaded.add(name)
        return loaded


def checkpoint(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    names = {"norm.weight": make(64), "out.weight": make(64, 64)}
    for part in "qkv":
        names |= {f"{part}.weight": make(64, 64), f"{part}.bias": make(64)}
    return names


def process(model: nn.Module) -> None:
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)


def quantised(config: Any, weights: dict[str, Tensor]) -> Block:
    model = Block(config)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(weights.items())
    process(model)
    return model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_quantised_model_takes_full_precision_weights(config: Any) -> None:
    model = quantised(config, checkpoint(0))
    assert type(model.qkv.weight.data) is not Tensor and type(model.qkv.weight) is not nn.Parameter
    places = models.addresses(model)
    for seed in (1, 2, 3):
        loaded = model.load_weights(iter(checkpoint(seed).items()))
        assert loaded == set(checkpoint(seed))
        assert models.different(quantised(config, checkpoint(seed)), model) == []
        assert models.addresses(model) == places
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(model.qkv(x), quantised(config, checkpoint(3)).qkv(x))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_same_by_plan(config: Any) -> None:
    model = quantised(config, checkpoint(0))
    places = models.addresses(model)
    loadplan.start_reload(model, mode="layerwise")
    plan = loadplan.plan_loads(model, checkpoint(0))
    assert {entry.kind for entry in plan.entries.values()} == {"direct"}
    loadplan.load_planned(model, plan, checkpoint(1).items())
    loadplan.finish_reload(model)
    assert models.different(quantised(config, checkpoint(1)), model) == []
    assert models.addresses(model) == places


def test_a_sender_may_reuse_its_memory() -> None:
    model = quantised(CONFIGS["int8"], checkpoint(0))

    def sent(seed: int) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(64 * 64, dtype=torch.bfloat16)
        for name, tensor in checkpoint(seed).items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)

    for seed in (1, 2):
        model.load_weights(sent(seed))
        assert models.different(quantised(CONFIGS["int8"], checkpoint(seed)), model) == []


def test_an_incomplete_iterator_is_an_error_and_leaves_the_kernel_tensors() -> None:
    model = quantised(CONFIGS["int8"], checkpoint(0))
    places = models.addresses(model)
    model.load_weights(checkpoint(1).items())
    some = [item for item in checkpoint(2).items() if item[0] != "k.bias"]
    with pytest.raises(RuntimeError, match="`k.bias`"):
        model.load_weights(iter(some))
    assert models.addresses(model) == places
    model.load_weights(checkpoint(3).items())
    assert models.different(quantised(CONFIGS["int8"], checkpoint(3)), model) == []


class Loader:
    """As vLLM's AutoWeightsLoader: a loader with a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, prefix: str) -> list[str]:
        self.calls += 1
        return sorted(self.load(weights, prefix))

    def load(self, weights: Iterable[tuple[str, Tensor]], prefix: str) -> Iterator[str]:
        for name, tensor in weights:
            self.module.weight.data.copy_(tensor)
            yield prefix + name


def test_a_loader_with_a_module_is_wrapped() -> None:
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model.quant_method = Quantise(CONFIGS["int8"])
    loadplan.record_metadata_for_reloading(model)
    loader = Loader(model)
    load = loadplan.reload_from_high_precision(loader.load_weights)
    first, second = torch.randn(2, 8, 8).to(torch.bfloat16)
    assert load([("w", first)], prefix="a.") == ["a.w"]
    assert loader.calls == 1
    process(model)
    assert load([("w", second)], prefix="a.") == ["a.w"]
    wanted = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    wanted.weight.copy_(second)
    torchao.quantize_(wanted, CONFIGS["int8"]())
    assert torch.equal(wanted.weight.dequantize(), model.weight.dequantize())


class Turned(nn.Module):
    """A loader with an option, whose values depend on it; no library quantises it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], turned: bool = False, options: Any = None
    ) -> None:
        for _, tensor in weights:
            self.weight.copy_(tensor.t() if turned or (options or {}).get("turned") else tensor)

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.to(torch.float64), requires_grad=False)


def turned() -> Turned:
    model = Turned()
    loadplan.record_metadata_for_reloading(model)
    model.process_weights_after_loading()
    return model


def test_a_call_with_other_arguments_is_planned_anew() -> None:
    model = turned()
    load = loadplan.reload_from_high_precision(model.load_weights)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    options = {"turned": False}
    for positional, named, wanted in (
        ((), {}, weight),
        ((True,), {}, weight.t()),
        ((), {"turned": True}, weight.t()),
        ((), {"turned": False}, weight),
        ((), {"options": options}, weight),
        # The same object by now says something else.
        ((), {"options": options}, weight.t()),
    ):
        load([("w", weight)], *positional, **named)
        assert torch.equal(model.weight, wanted.double()), (positional, named)
        options["turned"] = "options" in named


def test_another_loader_of_the_model_is_planned_anew() -> None:
    model = turned()
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def negated(model: Turned, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            model.weight.copy_(-tensor)

    loadplan.reload_from_high_precision(model.load_weights)([("w", weight)])
    loadplan.reload_from_high_precision(negated)(model, [("w", weight)])
    assert torch.equal(model.weight, -weight.double())


def test_the_same_call_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = turned()
    planned = []
    plan_loads = loadplan.plan.plan_loads
    monkeypatch.setattr(
        loadplan.plan, "plan_loads", lambda *a, **k: planned.append(1) or plan_loads(*a, **k)
    )
    for value in (1.0, 2.0):
        load = loadplan.reload_from_high_precision(model.load_weights)
        load([("w", torch.full((2, 2), value))], turned=True)
        assert torch.equal(model.weight, torch.full((2, 2), value, dtype=torch.float64))
    assert len(planned) == 1


def test_a_call_without_weights_is_an_error() -> None:
    with pytest.raises(TypeError, match="called without weights; give them first"):
        loadplan.reload_from_high_precision(turned().load_weights)()


def test_no_model_is_an_error() -> None:
    load = loadplan.reload_from_high_precision(lambda weights: None)
    with pytest.raises(TypeError, match="found no model in list"):
        load([])
