"""Loaders that reach live memory through pointers while they are traced."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import pytest
import torch
from test_loaders import check, kinds
from torch import Tensor

from loadplan import ParamMeta

Live = dict[str, Tensor]
Weights = Iterable[tuple[str, Tensor]]
METAS = [ParamMeta(name, (4,), torch.float32) for name in ("a", "b")]
POINTER = "through a raw pointer"


def make() -> Live:
    return {name: torch.full((4,), 7.0) for name in ("a", "b")}


def ties_by_address(live: Live, weights: Weights) -> None:
    names = {tensor.data_ptr(): name for name, tensor in live.items()}
    for name, w in weights:
        live[names[live[name].data_ptr()]].copy_(w)


def moves_memory(live: Live, weights: Weights) -> None:
    for name, w in weights:
        ctypes.memmove(live[name].data_ptr(), w.data_ptr(), w.nbytes)


def catches_the_error(live: Live, weights: Weights) -> None:
    for name, w in weights:
        try:
            live[name].data_ptr()
        except RuntimeError:
            continue
        live[name].copy_(w)


def catches_the_error_after_a_copy(live: Live, weights: Weights) -> None:
    for name, w in weights:
        live[name].copy_(w)
        try:
            live[name].data_ptr()
        except RuntimeError:
            live[name].zero_()


def writes_an_item_of_the_storage(live: Live, weights: Weights) -> None:
    for name, w in weights:
        live[name].copy_(w)
    live["a"].untyped_storage()[0] = 3


@pytest.mark.parametrize(
    "load",
    [
        ties_by_address,
        moves_memory,
        catches_the_error,
        catches_the_error_after_a_copy,
        writes_an_item_of_the_storage,
    ],
)
def test_a_pointer_to_a_target_sends_every_name_through_the_loader(
    load: Callable[[Live, Weights], None],
) -> None:
    plan = check(make, load, METAS)
    assert kinds(plan) == {"a": "fallback", "b": "fallback"}
    assert all(POINTER in entry.reason for entry in plan.entries.values())


def test_what_a_fallback_name_writes_is_no_premise() -> None:
    """The look at `a` shows old bytes in the pass without it, and new ones in every call."""

    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            live[name].copy_(w)
        live["a"].numpy().sum()

    assert kinds(check(make, load, METAS)) == {"a": "fallback", "b": "direct"}


def test_a_call_with_all_names_has_no_premises() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            live[name].copy_(w)
        live["a"].numpy()[0] = 3

    assert kinds(check(make, load, METAS)) == {"a": "fallback", "b": "fallback"}


def asks_whether_it_is_shared(live: Live, weights: Weights) -> None:
    for name, w in weights:
        live[name].copy_(w)
        if live[name].is_shared():
            live[name].zero_()


def test_a_written_target_is_asked_whether_it_is_shared() -> None:
    """torch would end the process: it looks at the memory where nothing may be raised."""
    plan = check(make, asks_whether_it_is_shared, METAS)
    assert all("is shared" in entry.reason for entry in plan.entries.values())
