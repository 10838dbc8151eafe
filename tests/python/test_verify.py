"""`verify`: the loader and the plan on the live model, and its bytes put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import loadplan
from loadplan import Difference, ParamMeta, Targets

Loader = Callable[[Iterable[tuple[str, Tensor]]], None]


def model(
    instead: dict[str, Loader] | None = None,
) -> tuple[dict[str, Tensor], Targets, list[ParamMeta]]:
    """A model whose loader does something else from when `instead` gets one."""
    shared = torch.arange(8.0)
    live = {"a": shared, "tied": shared.view(2, 4), "b": torch.zeros(4, 4)}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        if instead:
            return instead["loader"](weights)
        for name, weight in weights:
            if name == "a":
                live["a"][:4].copy_(weight)
            else:
                live["b"][:, 1:3].copy_(weight)

    metas = [ParamMeta("a", (4,), torch.float32), ParamMeta("b", (4, 2), torch.float32)]
    return live, Targets(live, load_weights), metas


def test_equal_bytes_are_no_difference_and_old_bytes_come_back() -> None:
    live, targets, metas = model()
    plan = loadplan.plan_loads(targets, metas)
    before = {name: tensor.clone() for name, tensor in live.items()}
    weights = {"a": torch.randn(4), "b": torch.randn(4, 2)}
    assert loadplan.verify(targets, plan, weights) == ()
    assert all(torch.equal(before[name], live[name]) for name in live)
    assert loadplan.state(targets).state == "idle"


def test_differences_are_listed_by_storage_and_range() -> None:
    instead: dict[str, Loader] = {}
    live, targets, metas = model(instead)
    plan = loadplan.plan_loads(targets, metas)

    def fill(weights: Iterable[tuple[str, Tensor]]) -> None:
        live["b"].fill_(1)

    instead["loader"] = fill
    ones = {"a": torch.arange(4.0), "b": torch.ones(4, 2)}
    [difference] = loadplan.verify(targets, plan, lambda: ones.items())
    # 1.0 is 00 00 80 3f: two bytes differ from 0.0, columns 0 and 3 of each row.
    assert difference == Difference(
        ("b",),
        ((2, 4), (14, 16), (18, 20), (30, 32), (34, 36), (46, 48), (50, 52), (62, 64)),
        16,
    )


def test_old_bytes_come_back_where_the_loader_raises() -> None:
    instead: dict[str, Loader] = {}
    live, targets, metas = model(instead)
    plan = loadplan.plan_loads(targets, metas)

    def broken(weights: Iterable[tuple[str, Tensor]]) -> None:
        live["a"].fill_(7)
        raise OSError("gone")

    instead["loader"] = broken
    with pytest.raises(OSError, match="gone"):
        loadplan.verify(targets, plan, {"a": torch.randn(4), "b": torch.randn(4, 2)})
    assert torch.equal(live["a"], torch.arange(8.0))


def test_the_loader_gets_contiguous_tensors_whatever_is_sent() -> None:
    """As in the eager call that a plan stands for: it may look at strides."""
    live = {"p": torch.zeros(6)}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            live["p"].copy_(weight.view(6) if weight.is_contiguous() else 7 * weight.reshape(6))

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, [ParamMeta("p", (2, 3), torch.float32)])
    weights = {"p": torch.arange(6.0).view(3, 2).t().requires_grad_()}
    assert loadplan.verify(targets, plan, weights) == ()


def test_an_iterator_cannot_be_used_twice() -> None:
    live, targets, metas = model()
    plan = loadplan.plan_loads(targets, metas)
    with pytest.raises(TypeError, match="used once"):
        loadplan.verify(targets, plan, iter([("a", torch.zeros(4))]))


def test_an_active_reload_is_refused() -> None:
    live, targets, metas = model()
    plan = loadplan.plan_loads(targets, metas)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="idle model"):
        loadplan.verify(targets, plan, {})
    loadplan.abort_reload(targets)


@pytest.mark.parametrize("way", ["data", "parameter"])
def test_a_loader_that_moves_a_target_is_compared_too(way: str) -> None:
    """Its name is a fallback, and an update brings the bytes back to where they belong."""
    model = torch.nn.Linear(2, 2, bias=False)

    def load_weights(weights):
        for _, w in weights:
            if way == "data":
                model.weight.data = w.clone()
            else:
                model.weight = torch.nn.Parameter(w.clone())

    model.load_weights = load_weights
    before, address = model.weight.detach().clone(), model.weight.data_ptr()
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, {"w": ((2, 2), torch.float32)})
    loadplan.abort_reload(model)
    assert loadplan.verify(model, plan, {"w": torch.ones(2, 2)}) == ()
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == address
