"""Meta kernels of torch in C++, which take the place of those in Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from test_loaders import Live, Weights, check, kinds
from torch import Tensor

import loadplan
from loadplan import ParamMeta

F32 = torch.float32
METAS = [ParamMeta("w", (4, 6), F32)]

NATIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda w: w.clamp(-1, 2),
    "clamp below": lambda w: w.clamp(max=0.5),
    "clamp_": lambda w: w.clone().clamp_(0),
    "clamp_min": lambda w: w.clamp_min(0),
    "clamp_max": lambda w: w.clamp_max(0),
    "clamp_min_": lambda w: (w + 1).clamp_min_(0),
    "clamp_max_": lambda w: (w + 1).clamp_max_(0),
    "clamp of integers": lambda w: w.int().clamp(0.5, 3),
    "maximum": lambda w: torch.maximum(w, w.flip(0)),
    "minimum": lambda w: torch.minimum(w, w.new_zeros(())),
    "pow": lambda w: w**2,
    "amax": lambda w: w.amax(0),
    "amax of all": lambda w: w.amax(),
    "amin": lambda w: w.amin((0, 1), keepdim=True),
    "mean": lambda w: w.mean(),
    "mean of some": lambda w: w.mean(-1, keepdim=True),
    "mean in double": lambda w: w.mean(0, dtype=torch.float64),
    "sum": lambda w: w.sum(),
    "sum of some": lambda w: w.sum(-1),
    "sum of none": lambda w: w.sum(()),
    "sum of integers": lambda w: w.int().sum(0),
    "softmax": lambda w: w.softmax(0),
    "softmax of half": lambda w: w.half().softmax(-1),
    "softmax in float": lambda w: w.bfloat16().softmax(-1, dtype=torch.float32),
    "round": lambda w: w.round(),
    "sigmoid": lambda w: w.sigmoid(),
    "tanh": lambda w: w.tanh(),
    "rounding": lambda w: torch.div(w, 0.3, rounding_mode="floor"),
    "truncating": lambda w: torch.div(w.int(), 2, rounding_mode="trunc"),
    "true": lambda w: torch.div(w.int(), 2, rounding_mode=None),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda w: w,
    "turned": lambda w: w.t(),
    "with gaps": lambda w: w[:, 1:5:2],
    "repeated": lambda w: w[:, :1].expand(4, 5),
    "deep": lambda w: w.view(2, 2, 3, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NATIVE)
def test_a_meta_kernel_in_cpp_lays_results_out_as_eager_does(name: str, layout: str) -> None:
    if layout == "deep" and name == "amin":
        pytest.skip("two of four dimensions")
    expected = NATIVE[name](LAYOUTS[layout](torch.rand(4, 6)))
    with loadplan.trace({"p": torch.zeros(4)}, METAS) as trace:
        got = NATIVE[name](LAYOUTS[layout](trace.tensor("w")))
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("name", NATIVE)
def test_what_a_meta_kernel_in_cpp_sizes_is_derived(name: str) -> None:
    shape = NATIVE[name](torch.zeros(4, 6)).shape
    dtype = NATIVE[name](torch.zeros(4, 6)).dtype

    def make() -> Live:
        return {"w": torch.zeros(shape, dtype=dtype)}

    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            live["w"].copy_(NATIVE[name](w))

    assert kinds(check(make, load, METAS)) == {"w": "derived"}


def test_the_commonest_operators_import_no_compiler() -> None:
    program = """
import sys, torch, loadplan
def load(weights):
    for _, w in weights:
        p.copy_((w / w.amax(-1, keepdim=True))
                .clamp(-1, 1).softmax(0).sum(-1) * w.mean() + w.amin())
p = torch.zeros(4)
targets = loadplan.Targets({"p": p}, load_weights=load)
plan = loadplan.plan_loads(targets, [loadplan.ParamMeta("w", (4, 6), torch.float32)])
assert plan.entries["w"].kind == "derived"
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr
