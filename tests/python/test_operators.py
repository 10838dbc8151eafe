"""Operators with something of their own: results that are lists, outputs that get their size,
arguments that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loaders import Live, Weights, check, kinds
from torch import Tensor

import loadplan
from loadplan import ParamMeta, Targets

F32 = torch.float32
METAS = [ParamMeta("w", (4, 6), F32), ParamMeta("v", (6,), F32)]


def make() -> Live:
    return {"w": torch.arange(24.0).view(4, 6), "v": torch.zeros(6)}


def loading(write: Callable[[Live, Tensor], Any]) -> Any:
    """``write`` in the turn of `w`; `v` is copied."""

    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "v":
                live["v"].copy_(w)
            else:
                write(live, w)

    return load


def reason_of(write: Callable[[Live, Tensor], Any]) -> str:
    plan = check(make, loading(write), METAS)
    assert plan.entries["w"].kind == "fallback"
    return str(plan.entries["w"].reason)


# ------------------------------------------------------------------ lists
def test_tensors_that_travel_as_one_flat_tensor_are_direct() -> None:
    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        flat = torch._utils._flatten_dense_tensors(list(found.values()))
        parts = torch._utils._unflatten_dense_tensors(flat, list(found.values()))
        for tensor, part in zip(live.values(), parts, strict=False):
            tensor.copy_(part)

    metas = [ParamMeta("a", (4,), torch.float32), ParamMeta("b", (4,), torch.float32)]
    plan = check(lambda: {"a": torch.zeros(4), "b": torch.zeros(4)}, load, metas)
    assert kinds(plan) == {"a": "direct", "b": "direct"}


@pytest.mark.parametrize("device", ["of w", "cpu"])
def test_copies_into_lists_are_planned(device: str) -> None:
    def write(live: Live, w: Tensor) -> None:
        halves = [torch.empty(2, 6, device=w.device if device == "of w" else device) for _ in "ab"]
        torch.split_copy(w, 2, out=halves)
        live["w"][:2].copy_(halves[1])
        live["w"][2:].copy_(halves[0])
        live["w"][0].copy_(torch.unbind_copy(w, 0)[3])
        live["w"][1].copy_(torch.split_copy(halves[0], 1)[1][0])

    assert kinds(check(make, loading(write), METAS)) == {"w": "direct", "v": "direct"}


# ------------------------------------------------------------------ outputs without a size
@pytest.mark.parametrize("device", ["of w", "cpu"])
def test_an_empty_output_gets_its_size(device: str) -> None:
    def write(live: Live, w: Tensor) -> None:
        out = torch.empty(0, device=w.device if device == "of w" else device)
        torch.mul(w.t(), 3, out=out)
        assert out.shape == (6, 4)
        live["w"].copy_(out.t())

    assert kinds(check(make, loading(write), METAS)) == {"w": "derived", "v": "direct"}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_that_has_memory_is_not_resized() -> None:
    def write(live: Live, w: Tensor) -> None:
        out = torch.empty(2)
        torch.mul(w, 3, out=out)
        live["w"].copy_(out)

    assert "`aten::mul.out` resizes a tensor that holds memory at test_operators.py" in reason_of(
        write
    )


# ------------------------------------------------------------------ quantised
QUANTISED: dict[str, Callable[[Tensor], Tensor]] = {
    "quantize_per_tensor": lambda w: torch.quantize_per_tensor(w, 0.1, 2, torch.qint8).int_repr(),
    "dequantize": lambda w: torch.quantize_per_tensor(w, 0.1, 2, torch.quint8).dequantize(),
    "fake_quantize_per_tensor_affine": lambda w: torch.fake_quantize_per_tensor_affine(
        w, 0.1, 2, -128, 127
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_tensors_go_through_the_loader_by_operator_and_line(name: str) -> None:
    reason = reason_of(lambda live, w: live["w"].copy_(QUANTISED[name](w)))
    operator = {"quantize_per_tensor": "int_repr"}.get(name, name)
    assert reason.startswith(f"`aten::{operator}") and " at test_operators.py:" in reason


# ------------------------------------------------------------------ overlaps
OVERLAPS: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda p: p[:, 0:3].add_(p[:, 2:5]),
    "index_put_": lambda p: p[0:3].index_put_((torch.tensor([2, 0, 1]),), p[1:4]),
    "out": lambda p: torch.add(p[0:2], 1, out=p[1:3]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_bytes_that_an_operator_reads_and_writes_elsewhere_are_not_planned(name: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for key, w in weights:
            live[key].copy_(w)
            if key == "w":
                OVERLAPS[name](live["w"])

    live = make()
    targets = Targets(live, load_weights=lambda weights: load(live, weights))
    plan = loadplan.plan_loads(targets, METAS)
    assert kinds(plan) == {"w": "fallback", "v": "direct"}
    assert "writes bytes that it also reads elsewhere" in plan.entries["w"].reason


def test_bytes_that_an_operator_reads_where_it_writes_are_planned() -> None:
    def write(live: Live, w: Tensor) -> None:
        live["w"].copy_(w)
        live["w"].add_(live["w"])
        live["w"][:, ::2].mul_(live["w"][:, 1::2])

    assert kinds(check(make, loading(write), METAS)) == {"w": "derived", "v": "direct"}
