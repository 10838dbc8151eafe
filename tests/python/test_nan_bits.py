"""NaN through casts: the bits that the eager call leaves, by whatever way an item is moved.

torch leaves other bits for a NaN that it converts in a row than for one that it converts alone
(backend/cast_bits.h), so that a plan has to know how the loader converted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import loadplan
from loadplan import Targets

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Step = Callable[[Tensor, torch.dtype], Tensor]

WAYS: dict[str, Step] = {
    "in_copy": lambda w, d: w,
    "in_copy_transposed": lambda w, d: w.t(),
    "in_copy_stepped": lambda w, d: w[:, ::3],
    "in_copy_column": lambda w, d: w[:, 4],
    "before": lambda w, d: w.to(d),
    "before_transposed": lambda w, d: w.to(d).t(),
    "before_stepped": lambda w, d: w.to(d)[::2, 1::4],
    "before_narrowed": lambda w, d: w.to(d)[3:11, 2:9],
    "before_one": lambda w, d: w.to(d)[3, 5],
    "of_a_transposed": lambda w, d: w.t().to(d)[1:4],
    "of_a_stepped": lambda w, d: w[:, ::3].to(d).t().contiguous(),
    "of_a_column": lambda w, d: w[:, 4:5].to(d),
    "of_one": lambda w, d: w[2:3, 4].to(d),
    "of_a_scalar": lambda w, d: w[2, 4].to(d),
    "joined": lambda w, d: torch.cat([w[:2], w[5:7]]).to(d)[1:],
    "joined_columns": lambda w, d: torch.cat([w[:, :3].to(d), w[:, 5:7].to(d)], 1).t(),
    "there_and_back": lambda w, d: w.to(d).to(w.dtype).t().to(d),
    "flipped": lambda w, d: w.to(d).flip(1),
    "reduced": lambda w, d: w.sum(1).to(d)[2:9],
}
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.bfloat16),
]


def checkpoint(dtype: torch.dtype) -> Tensor:
    """Half of the items are NaN of random bits, the others numbers."""
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(13, 9, generator=generator).to(dtype)
    bits = w.view(BITS[dtype.itemsize])
    width = 8 * dtype.itemsize
    payload = {torch.float32: 23, torch.float64: 52, torch.bfloat16: 7, torch.float16: 10}.get(
        dtype, 2
    )
    infinity = ((1 << (width - 1 - payload)) - 1) << payload
    random = torch.randint(1, 1 << payload, w.shape, generator=generator)
    nan = (random | infinity).to(bits.dtype)
    chosen = torch.rand(w.shape, generator=generator) < 0.5
    bits.copy_(torch.where(chosen, nan, bits))
    assert w.to(torch.float64).isnan().any()
    return w


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
def test_plan_leaves_the_bits_of_the_eager_call(
    way: str, pair: tuple[torch.dtype, torch.dtype], column_major: bool
) -> None:
    source, dtype = pair
    if (way == "reduced" and source.itemsize == 1) or (way == "flipped" and dtype.itemsize == 1):
        pytest.skip("torch has no sum and no flip of float8")
    w = checkpoint(source)
    shape = WAYS[way](w, dtype).shape
    p = torch.zeros(shape[::-1], dtype=dtype).permute(list(reversed(range(len(shape)))))
    if not column_major:
        p = p.contiguous()

    def load(weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            p.copy_(WAYS[way](tensor, dtype))

    bits = BITS[dtype.itemsize]
    load([("w", w.clone())])
    want = p.view(bits).clone()
    p.zero_()
    model = Targets({"p": p}, load)
    plan = loadplan.plan_loads(model, {"w": w})
    assert plan.entries["w"].kind in ("direct", "derived"), plan.entries["w"].reason
    loadplan.start_reload(model)
    loadplan.load_planned(model, plan, [("w", w)])
    loadplan.finish_reload(model)
    assert torch.equal(p.view(bits), want)


def test_items_that_were_scattered_are_converted_so_one_at_a_time() -> None:
    """With AVX512 a single half is converted in another way than one among scattered ones."""
    p = torch.zeros(5, 5)

    def load(weights: object) -> None:
        for _, w in weights:  # type: ignore[attr-defined]
            s = w.to(torch.half).sum(0, keepdim=True)
            p[:2, 3:4].copy_(torch.stack([s, s]))

    w = torch.tensor([1 << 30, -(1 << 30)], dtype=torch.int32)
    load([("w", w)])
    want = p.view(torch.int32).clone()
    assert p.isnan().any()
    p.zero_()
    model = Targets({"p": p}, load)
    plan = loadplan.plan_loads(model, {"w": w})
    loadplan.start_reload(model)
    loadplan.load_planned(model, plan, [("w", w)])
    loadplan.finish_reload(model)
    assert torch.equal(p.view(torch.int32), want)
