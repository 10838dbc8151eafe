"""Names that only do something together with one that goes through the loader.

A pass without that one cannot show it: each loader drops such a name when its partner is
missing, or does something else with it.  Two updates through one plan equal the eager load.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_loaders import Live, Loader, Weights, check, kinds
from torch import Tensor

import loadplan
from loadplan import ParamMeta, Targets

F32 = torch.float32


def metas(*names: str) -> list[ParamMeta]:
    return [ParamMeta(name, (2,), F32) for name in names]


def make() -> Live:
    return {
        "pair": torch.zeros(4),
        "other": torch.zeros(4),
        "c": torch.zeros(2),
        "scale": torch.zeros(2),
    }


def read(live: Live, w: Tensor) -> None:
    live["scale"].fill_(w[0].item())


def join(live: Live, first: Tensor, second: Tensor) -> None:
    live["pair"].copy_(torch.cat([first, second]))


def halves_by_suffix(live: Live, weights: Weights) -> None:
    halves = {name: w for name, w in weights if name != "c"}
    if "a" in halves:
        read(live, halves["a"])
    for name in list(halves):
        other = {"a": "b"}.get(name)
        if other in halves:
            join(live, halves[name], halves[other])


def dropped_at_once(live: Live, weights: Weights) -> None:
    held = None
    for name, w in weights:
        if name == "a":
            read(live, w)
            held = w
        elif name == "b" and held is not None:
            join(live, held, w)
        elif name == "c":
            live["c"].copy_(w)


def zipped_lists(live: Live, weights: Weights) -> None:
    ordered = sorted(weights)
    lefts = [w for name, w in ordered if name == "a"]
    rights = [w for name, w in ordered if name == "b"]
    for left, right in zip(lefts, rights, strict=False):
        read(live, left)
        join(live, left, right)
    for name, w in ordered:
        if name == "c":
            live["c"].copy_(w)


def state_machine(live: Live, weights: Weights) -> None:
    def writer() -> Iterator[None]:
        name, w = yield  # type: ignore[misc]
        while name != "a":
            name, w = yield  # type: ignore[misc]
        read(live, w)
        _, partner = yield  # type: ignore[misc]
        join(live, w, partner)
        while True:
            yield

    state = writer()
    next(state)
    for pair in weights:
        if pair[0] == "c":
            live["c"].copy_(pair[1])
        else:
            state.send(pair)  # type: ignore[arg-type]


def at_the_end(live: Live, weights: Weights) -> None:
    seen: dict[str, list[Tensor]] = {}
    for name, w in weights:
        if name == "c":
            live["c"].copy_(w)
            continue
        if name == "b" and "a" not in seen:
            continue
        if name == "a":
            read(live, w)
        seen.setdefault(name, []).append(w * 2)
    if len(seen) == 2:
        join(live, seen["a"][0], seen["b"][0])


@pytest.mark.parametrize(
    "load", [halves_by_suffix, dropped_at_once, zipped_lists, state_machine, at_the_end]
)
def test_a_name_that_is_dropped_without_its_partner_goes_with_it(load: Loader) -> None:
    plan = check(make, load, metas("a", "b", "c"))
    assert kinds(plan)["a"] == kinds(plan)["b"] == "fallback"
    assert kinds(plan)["c"] == ("unneeded" if load is halves_by_suffix else "direct")


def test_a_name_that_is_needed_without_its_partner_and_does_more_with_it() -> None:
    def load(live: Live, weights: Weights) -> None:
        held = None
        for name, w in weights:
            if name == "a":
                read(live, w)
                held = w
            elif name == "b":
                live["c"].copy_(w)
                if held is not None:
                    join(live, held, w)

    assert kinds(check(make, load, metas("a", "b"))) == dict.fromkeys("ab", "fallback")


def test_a_value_that_was_read_enters_the_arithmetic_of_another_name() -> None:
    def load(live: Live, weights: Weights) -> None:
        scale = 1.0
        for name, w in weights:
            if name == "a":
                scale = w[0].item()
            elif name == "b":
                live["other"].copy_((w * scale).repeat(2))
            else:
                live["c"].copy_(w)

    assert kinds(check(make, load, metas("a", "b", "c"))) == {
        "a": "fallback",
        "b": "fallback",
        "c": "direct",
    }


def test_a_partner_that_changes_which_constant_is_written() -> None:
    def load(live: Live, weights: Weights) -> None:
        seen = []
        for name, w in weights:
            if name == "a":
                read(live, w)
            seen.append(name)
            if seen == ["a", "b"]:
                live["other"].fill_(3)

    # Nothing of `b` is written, only in its turn: one call with all names is right.
    assert kinds(check(make, load, metas("a", "b"))) == dict.fromkeys("ab", "fallback")


def test_a_name_that_is_written_elsewhere_without_its_partner() -> None:
    def load(live: Live, weights: Weights) -> None:
        target = "c"
        for name, w in weights:
            if name == "a":
                read(live, w)
                target = "scale"
            else:
                live[target].copy_(w)

    assert kinds(check(make, load, metas("a", "b"))) == dict.fromkeys("ab", "fallback")


@pytest.mark.parametrize("threshold", [-5.0, 0.0, 0.5, 100.0])
def test_a_decision_by_value_that_drops_another_name(threshold: float) -> None:
    def load(live: Live, weights: Weights) -> None:
        value = None
        for name, w in weights:
            if name == "a":
                value = w[0].item()
                live["scale"].fill_(value)
            elif name == "b" and value is not None and value > threshold:
                live["c"].copy_(w)

    assert kinds(check(make, load, metas("a", "b"))) == dict.fromkeys("ab", "fallback")


def test_a_decision_by_a_tensor_that_drops_another_name() -> None:
    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        if "a" in found and (found["a"] > 0).any():
            live["c"].copy_(found["b"])

    assert kinds(check(make, load, metas("a", "b"))) == dict.fromkeys("ab", "fallback")


def test_a_check_of_values_costs_no_other_name_its_plan() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                value = w[0].item()
                if not -9 < value < 9:
                    raise ValueError(f"{value} is out of range")
                if (w.abs() > 100).any():
                    raise ValueError("too large")
                assert torch.isfinite(w).all()
                live["scale"].fill_(value)
            else:
                live["c"].copy_(w)

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "fallback", "b": "direct"}


@pytest.mark.parametrize("way", ["tolist", "numpy", "float", "nonzero", "mask", "equal"])
def test_every_kind_of_value_read_leaves_the_others_their_plan(way: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name != "a":
                live["c"].copy_(w)
            elif way == "tolist":
                live["scale"].fill_(sum(w.tolist()))
            elif way == "numpy":
                live["scale"].fill_(float(w.numpy().sum()))
            elif way == "float":
                live["scale"].fill_(float(w[0]))
            elif way == "nonzero":
                live["scale"].fill_(len((w > 0).nonzero()))
            elif way == "mask":
                live["scale"].fill_(w[w > 0].numel())
            else:
                live["scale"].fill_(2.0 if torch.equal(w, w.flip(0)) else 3.0)

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "fallback", "b": "direct"}


def test_a_loader_that_no_stand_in_satisfies_goes_through_as_a_whole() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                live["scale"].fill_({w[0].item(): 1.0}[w.tolist()[0]])
                if f"{w[1].item():.3f}" in ("-1009.000", "1013.000", "0.000", "1.000", "2.000"):
                    raise ValueError("unlikely")
            else:
                live["c"].copy_(w)

    plan = check(make, load, metas("a", "b"))
    assert kinds(plan) == dict.fromkeys("ab", "fallback")
    assert "ValueError: unlikely" in plan.entries["b"].reason


def test_many_names_that_read_a_value_cost_few_passes() -> None:
    calls = 0

    def load(live: Live, weights: Weights) -> None:
        nonlocal calls
        calls += 1
        for name, w in weights:
            if name.endswith("scale"):
                live["scale"].fill_(w[0].item())
            elif name == "w":
                live["c"].copy_(w)

    live = make()
    names = [*(f"layers.{i}.scale" for i in range(1000)), "w"]
    plan = loadplan.plan_loads(Targets(live, lambda w: load(live, w)), metas(*names))
    assert calls <= 8
    assert plan.entries["w"].kind == "direct"
