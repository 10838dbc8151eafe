"""Names that only do something together with one that goes through the loader.

A pass without that one cannot show it: each loader drops such a name when its partner is
missing, or does something else with it.  Two updates through one plan equal the eager load.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial

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


IN_ANOTHER_ORDER = (
    "the loader writes the same bytes more than once, in another order once names that go through "
    "the loader are there"
)


def in_order(write: Callable[[Live, dict[str, Tensor]], list[Callable[[], object]]]) -> Loader:
    """Runs the steps of ``write`` backwards where the value of ``a`` is above 0."""

    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        late = "a" in found and found["a"][0].item() > 0
        if "a" in found:
            live["scale"].copy_(found["a"])
        steps = write(live, found)
        for step in reversed(steps) if late else steps:
            step()

    return load


@pytest.mark.parametrize("value", [5.0, -5.0])
@pytest.mark.parametrize("overlaps", ["fallback", "last_wins"])
@pytest.mark.parametrize("what", ["a constant", "one name", "two names"])
def test_a_value_that_decides_the_order_of_writes(what: str, overlaps: str, value: float) -> None:
    def write(live: Live, found: dict[str, Tensor]) -> list[Callable[[], object]]:
        c = live["c"]
        if what == "a constant":
            return [lambda: c.copy_(found["b"]), c.zero_] if "b" in found else []
        if what == "one name":
            halves = found["b"].view(2, 1).expand(2, 2) if "b" in found else []
            return [partial(c.copy_, half) for half in halves]
        return [partial(c.copy_, found[name]) for name in ("b", "d") if name in found]

    load = in_order(write)
    live, eager = make(), make()
    targets = Targets(live, lambda weights: load(live, weights))
    weights = {
        "a": torch.full((2,), value),
        "b": torch.tensor([1.0, 2.0]),
        "d": torch.tensor([3.0, 4.0]),
        "other": torch.zeros(2),
    }
    if what != "two names":
        del weights["d"]
    plan = loadplan.plan_loads(targets, weights, overlaps=overlaps)
    assert plan.entries["b"].kind == "fallback"
    # A constant over a fallback name is right in one whole call only.
    assert plan.entries["other"].kind == ("fallback" if what == "a constant" else "unneeded")
    if what != "two names" or overlaps == "last_wins":
        assert plan.entries["b"].reason == IN_ANOTHER_ORDER
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, weights.items())
    loadplan.finish_reload(targets)
    load(eager, weights.items())
    assert {name: t.tolist() for name, t in live.items()} == {
        name: t.tolist() for name, t in eager.items()
    }


def test_writes_that_share_no_byte_stay_planned_in_any_order() -> None:
    def write(live: Live, found: dict[str, Tensor]) -> list[Callable[[], object]]:
        if "b" not in found:
            return []
        steps = [partial(live["other"][i].copy_, found["b"][i]) for i in range(2)]
        return [live["other"][3:].zero_, partial(live["c"].copy_, found["b"]), *steps]

    assert kinds(check(make, in_order(write), metas("a", "b")))["b"] == "direct"


def test_the_presence_of_a_planned_name_decides_the_order_of_the_call() -> None:
    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        steps: list[Callable[[], object]] = []
        if "a" in found:
            read(live, found["a"])
            steps = [partial(live["c"].copy_, found["a"]), lambda: live["c"].fill_(3)]
        if "b" in found:
            steps.reverse()
            live["pair"][:2].copy_(found["b"])
        for step in steps:
            step()

    plan = check(make, load, metas("a", "b"))
    assert kinds(plan) == dict.fromkeys("ab", "fallback")
    assert plan.entries["b"].reason == (
        "the loader writes the same bytes more than once, in an order that only one whole call of "
        "it keeps"
    )


def test_the_absence_of_a_planned_name_makes_the_call_write_more() -> None:
    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        if "a" in found:
            read(live, found["a"])
            if "b" not in found:
                live["other"].fill_(3)
        if "b" in found:
            live["c"].copy_(found["b"])

    plan = check(make, load, metas("a", "b"))
    assert kinds(plan) == dict.fromkeys("ab", "fallback")
    assert "writes bytes that it does not write with all names" in plan.entries["b"].reason


def random_order(rng: random.Random) -> Loader:
    """Up to five writes into four elements, whose order or number names and a value decide."""
    steps = []
    for _ in range(rng.randint(2, 5)):
        start, size = rng.randint(0, 2), rng.randint(1, 2)
        steps.append((rng.choice(["b", "c", "a", rng.randint(1, 3)]), start, size))
    orders = [rng.sample(range(len(steps)), rng.randint(1, len(steps))) for _ in range(4)]
    if rng.random() < 0.7:  # the same writes, often those of one name last
        orders = [rng.sample(range(len(steps)), len(steps)) for _ in range(4)]
    decides = rng.choice(["value", "presence", "both"])
    partner = rng.choice(["a", "b", "c"])
    owner = rng.choice(["b", "c", None])

    def load(live: Live, weights: Weights) -> None:
        found = dict(weights)
        high = "a" in found and found["a"][0].item() > 0
        if "a" in found:
            live["scale"].copy_(found["a"])
        if owner in found:
            live["pair"][:2].copy_(found[owner])
        which = (high if decides != "presence" else 0) + 2 * (
            partner in found if decides != "value" else 0
        )
        for step in orders[which]:
            what, start, size = steps[step]
            to = live["other"][start : start + size]
            if isinstance(what, int):
                if owner is None or owner in found:
                    to.fill_(what)
            elif what in found:
                to.copy_(found[what][:size])

    return load


def test_random_orders_of_writes() -> None:
    seed = os.environ.get("LOADPLAN_TEST_SEED") or str(random.SystemRandom().getrandbits(32))
    num_planned = 0
    for index in range(int(os.environ.get("LOADPLAN_PROGRAMS", 200))):
        rng = random.Random(f"{seed}/{index}")
        load = random_order(rng)
        live, eager = make(), make()
        targets = Targets(live, partial(load, live))
        overlaps = rng.choice(["fallback", "last_wins"])
        plan = loadplan.plan_loads(targets, metas("a", "b", "c"), overlaps=overlaps)
        num_planned += plan.entries["b"].kind in ("direct", "derived")
        for value in (5.0, -5.0):
            weights = {name: torch.rand(2) + 4 for name in "bc"}
            weights = {"a": torch.full((2,), value), **weights}
            loadplan.start_reload(targets)
            loadplan.load_planned(targets, plan, weights.items())
            loadplan.finish_reload(targets)
            load(eager, list(weights.items()))
            for name in live:
                assert torch.equal(live[name], eager[name]), (
                    f"{name} by {plan.report()}; LOADPLAN_TEST_SEED={seed}, program {index}"
                )
    assert num_planned
