"""Loaders that put new tensors, parameters or modules where others were."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import loadplan
from loadplan import LoadPlan

Weights = Iterable[tuple[str, Tensor]]


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.up = nn.Linear(3, 4)
        self.down = nn.Sequential(nn.Linear(4, 4))
        self.scale = torch.ones(2)
        self.cache: dict[str, Tensor] = {"old": torch.zeros(2)}
        self.parts: list[Tensor] = [torch.zeros(2)]
        self.inner: dict[str, dict[str, Tensor]] = {"a": {"b": torch.zeros(2)}}
        with torch.no_grad():
            for index, tensor in enumerate(self.state_dict().values()):
                tensor.fill_(index)

    def load_weights(self, weights: Weights) -> None:
        self.program(self, dict(weights))

    def state(self) -> dict[str, list[float]]:
        tensors = {**self.state_dict(), "scale": self.scale, "parts": self.parts[0], **self.cache}
        tensors["inner"] = self.inner["a"]["b"]
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.state_dict().values()]


Program = Callable[[Model, dict[str, Tensor]], None]
NAMES = {"up.weight": (4, 3), "up.bias": (4,), "down.0.weight": (4, 4), "down.0.bias": (4,)}


def new_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def copy_all(model: Model, found: dict[str, Tensor]) -> None:
    for name, w in found.items():
        model.get_parameter(name).data.copy_(w)


def plan_of(model: Model) -> LoadPlan:
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, {n: (s, torch.float32) for n, s in NAMES.items()})
    loadplan.abort_reload(model)
    return plan


def check(program: Program) -> LoadPlan:
    """Two updates by plan and eagerly, byte for byte; no address moves, tracing changes nothing."""
    model, eager = Model(program), Model(program)
    before, addresses, objects = model.state(), model.addresses(), list(model.parameters())
    plan = plan_of(model)
    assert model.state() == before and model.addresses() == addresses
    assert all(map(lambda a, b: a is b, model.parameters(), objects))
    for seed in (1, 2):
        loadplan.start_reload(model)
        for item in new_weights(seed).items():
            loadplan.load_planned(model, plan, [item])
        loadplan.finish_reload(model)
        eager.load_weights(new_weights(seed).items())
        assert model.state() == eager.state()
        assert model.addresses()[: len(addresses)] == addresses
    before = model.state()
    assert not loadplan.verify(model, plan, new_weights(3))
    assert model.state() == before
    return plan


# ------------------------------------------------------------------ what stands in a target's place
def parameters(model: Model, found: dict[str, Tensor]) -> None:
    for name, w in found.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(w.clone(), requires_grad=False))


def filled_parameters(model: Model, found: dict[str, Tensor]) -> None:
    for name, w in found.items():
        owner, _, leaf = name.rpartition(".")
        new = nn.Parameter(torch.empty(w.shape))
        new.data.copy_(w)
        setattr(model.get_submodule(owner), leaf, new)


def data(model: Model, found: dict[str, Tensor]) -> None:
    for name, w in found.items():
        model.get_parameter(name).data = w


def assigned(model: Model, found: dict[str, Tensor]) -> None:
    model.load_state_dict(found, assign=True)


def swapped(model: Model, found: dict[str, Tensor]) -> None:
    for name, w in found.items():
        torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(w))


def without(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: w for name, w in found.items() if not name.startswith(prefix)}


def a_module(model: Model, found: dict[str, Tensor]) -> None:
    copy_all(model, without(found, "up."))
    model.up = nn.Linear(3, 4)
    model.up.load_state_dict({"weight": found["up.weight"], "bias": found["up.bias"]})


def a_module_of_a_sequence(model: Model, found: dict[str, Tensor]) -> None:
    copy_all(model, without(found, "down."))
    model.down[0] = nn.Linear(4, 4)
    model.down[0].load_state_dict({"weight": found["down.0.weight"], "bias": found["down.0.bias"]})


def a_clone_of_itself(model: Model, found: dict[str, Tensor]) -> None:
    copy_all(model, found)
    model.up.weight = nn.Parameter(model.up.weight.data.clone())


def its_own_memory(model: Model, found: dict[str, Tensor]) -> None:
    copy_all(model, found)
    model.up.weight = nn.Parameter(model.up.weight.data, requires_grad=False)


@pytest.mark.parametrize(
    "program",
    [
        parameters,
        filled_parameters,
        data,
        assigned,
        swapped,
        a_module,
        a_module_of_a_sequence,
        a_clone_of_itself,
        its_own_memory,
    ],
)
def test_what_stands_in_a_targets_place_is_copied_there(program: Program) -> None:
    plan = check(program)
    assert {entry.kind for entry in plan.entries.values()} == {"direct"}


def test_two_targets_that_change_places_in_the_call_of_the_loader() -> None:
    def swap(model: Model, found: dict[str, Tensor]) -> None:
        for name, w in found.items():
            model.get_parameter(name).data.copy_(w * w.sum().item())
        up, down = model.up.bias, model.down[0].bias
        up.data, down.data = down.data, up.data

    assert {entry.kind for entry in check(swap).entries.values()} == {"fallback"}


def test_a_module_that_is_new_sends_its_names_through_the_loader() -> None:
    def add(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, found)
        model.extra = nn.Linear(4, 4)
        model.extra.load_state_dict(
            {"weight": found["down.0.weight"], "bias": found["down.0.bias"]}
        )

    plan = check(add)
    reason = plan.entries["down.0.weight"].reason
    assert reason == "`extra.weight = ...` puts it into memory that no plan knows"


# ------------------------------------------------------------------ attributes
def test_an_attribute_that_gets_another_tensor_sends_every_name_through_the_loader() -> None:
    def rescale(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, found)
        model.scale = torch.full((2,), 2.0)

    reasons = {entry.reason for entry in check(rescale).entries.values()}
    assert reasons == {"the loader gives `scale` another tensor, with other bytes"}


def test_an_attribute_that_gets_equal_bytes_costs_nothing() -> None:
    def rescale(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, found)
        model.scale = torch.ones(2)

    assert {entry.kind for entry in check(rescale).entries.values()} == {"direct"}


def put_into_a_dict(model: Model, w: Tensor) -> None:
    model.cache["old"] = w.clone()
    model.cache["new"] = w * 2


def put_into_a_list(model: Model, w: Tensor) -> None:
    model.parts[0] = w.clone()


def put_into_an_attribute(model: Model, w: Tensor) -> None:
    model.scale = w.clone()


def put_into_an_inner_dict(model: Model, w: Tensor) -> None:
    model.inner["a"]["b"] = w.clone()


def replace_a_dict(model: Model, w: Tensor) -> None:
    model.cache = {"old": w.clone()}


def replace_a_list(model: Model, w: Tensor) -> None:
    model.parts = [w.clone()]


@pytest.mark.parametrize(
    "put",
    [
        put_into_a_dict,
        put_into_a_list,
        put_into_an_attribute,
        put_into_an_inner_dict,
        replace_a_dict,
        replace_a_list,
    ],
)
def test_a_name_that_is_kept_goes_through_the_loader(put: Callable[[Model, Tensor], None]) -> None:
    def load(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, found)
        if "up.bias" in found:
            put(model, found["up.bias"])

    plan = check(load)
    falling = [name for name, entry in plan.entries.items() if entry.kind == "fallback"]
    assert falling == ["up.bias"]
    assert "puts it into memory that no plan knows" in plan.entries["up.bias"].reason


def test_a_list_of_other_real_tensors_sends_every_name_through_the_loader() -> None:
    def replace(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, found)
        model.parts = [torch.full((2,), 5.0)]

    reasons = {entry.reason for entry in check(replace).entries.values()}
    assert reasons == {"the loader gives `parts` another tensor, with other bytes"}


# ------------------------------------------------------------------ refused, and put back
def show_old_memory(model: Model, found: dict[str, Tensor]) -> None:
    copy_all(model, without(found, "up.bias"))
    model.up.bias.data = found["up.bias"]


def test_memory_that_an_attribute_shows_is_not_replaced() -> None:
    """Eagerly the attribute keeps the old bytes; in the old place it would get the new ones."""
    model = Model(show_old_memory)
    model.scale = model.up.bias.data[:2]
    before = model.state()
    with pytest.raises(RuntimeError, match="`up.bias`.*while something else shows the old memory"):
        plan_of(model)
    assert model.state() == before


def test_a_module_that_is_taken_out_of_a_list_is_back_after_the_refusal() -> None:
    def take(model: Model, found: dict[str, Tensor]) -> None:
        copy_all(model, without(found, "down."))
        del model.down[0]
        model.down.append(nn.Linear(4, 4))

    model = Model(take)
    before, layer = model.state(), model.down[0]
    with pytest.raises(RuntimeError):
        plan_of(model)
    assert model.state() == before and model.down[0] is layer


def test_data_that_stays_where_it_is_meets_no_planned_bytes() -> None:
    """`p.data = p.data.contiguous()` at the end of a loader, with a name that falls back."""

    def load(model: Model, found: dict[str, Tensor]) -> None:
        if "up.bias" in found and found["up.bias"].sum().item() != 0:
            model.up.bias.data.copy_(found["up.bias"])
        copy_all(model, without(found, "up.bias"))
        for p in model.parameters():
            p.data = p.data.contiguous()

    assert check(load).entries["up.bias"].kind == "fallback"


# ------------------------------------------------------------------ by hand
@pytest.mark.parametrize("raises", [False, True])
def test_a_pass_by_hand_puts_back_what_is_given_other_memory(raises: bool) -> None:
    target, other = torch.zeros(2), torch.ones(2)
    try:
        with loadplan.trace({"p": target}, {"a": ((2,), torch.float32)}) as t:
            target.data = t.tensor("a")
            other.data = t.tensor("a")
            assert not raises, "on purpose"
    except AssertionError:
        assert raises
    assert target.tolist() == [0, 0] and other.tolist() == [1, 1]
    if not raises:
        assert t.kind("a") == "fallback"


def test_a_lazy_module_is_told_by_name() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.LazyLinear(2)

        def load_weights(self, weights: Weights) -> None:
            self.load_state_dict(dict(weights))

    with pytest.raises(ValueError, match="target `out.weight` of a lazy module has no memory yet"):
        loadplan.plan_loads(loadplan.Targets(Lazy()), {"out.weight": ((2, 3), torch.float32)})
