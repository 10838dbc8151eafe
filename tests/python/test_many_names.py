"""Many names in one call of `load_planned`: they wait for one another, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

import loadplan

NAMES = ("a", "b", "c", "d")
Weights = Iterable[tuple[str, Tensor]]


class Model:
    """Rows of ``live`` by name, cut by columns."""

    def __init__(self, columns: int = 6) -> None:
        self.live = {name: torch.full((5, columns), -1.0) for name in NAMES}
        self.columns = columns
        self.targets = loadplan.Targets(self.live, self.load_weights)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.live[name].copy_(weight[:, : self.columns])

    def plan(self, names: Iterable[str] = NAMES) -> loadplan.LoadPlan:
        shape = (5, self.columns + 2)
        return loadplan.plan_loads(self.targets, {name: (shape, torch.float32) for name in names})

    def holds(self, weights: Weights) -> bool:
        return all(torch.equal(self.live[n], w[:, : self.columns]) for n, w in weights)

    def is_old(self, *names: str) -> bool:
        return all(bool((self.live[name] == -1).all()) for name in names)


def full(model: Model) -> dict[str, Tensor]:
    return {name: torch.randn(5, model.columns + 2) for name in NAMES}


CALLS: dict[str, Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]] = {
    "a mapping": lambda weights: weights,  # type: ignore[dict-item,return-value]
    "items of one": lambda weights: weights.items(),
    "a list": lambda weights: list(weights.items()),
    "lists of two": lambda weights: [[n, w] for n, w in weights.items()],  # type: ignore[misc]
    "a generator": lambda weights: (item for item in weights.items()),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("columns", [6, 100_000])  # on one thread, and on several past the caches
def test_lands_whatever_the_pairs_come_in(how: str, columns: int) -> None:
    model = Model(columns)
    plan, weights = model.plan(), full(model)
    backwards = dict(reversed(weights.items()))
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, CALLS[how](backwards))
    receipt = loadplan.finish_reload(model.targets)
    assert model.holds(weights.items())
    assert receipt.names == ("d", "c", "b", "a")
    assert {(c.nbytes, c.total_nbytes) for c in receipt.coverage.values()} == {
        (20 * columns, 20 * columns)
    }


class Lazy(Mapping[str, Tensor]):
    """Reads each tensor as it is asked for, all into one memory."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._memory = torch.empty_like(weights["a"])

    def __getitem__(self, name: str) -> Tensor:
        return self._memory.copy_(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def test_a_mapping_may_use_its_memory_again() -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    for lazy in (Lazy(weights), Lazy(weights).items()):
        loadplan.start_reload(model.targets)
        loadplan.load_planned(model.targets, plan, lazy)
        loadplan.finish_reload(model.targets)
        assert model.holds(weights.items())


def test_coverage_of_a_part_is_not_that_of_the_whole() -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    for sent, partial in ((NAMES, None), (("b",), ["b"]), (NAMES, None)):
        loadplan.start_reload(model.targets)
        loadplan.load_planned(model.targets, plan, {name: weights[name] for name in sent})
        receipt = loadplan.finish_reload(model.targets, partial=partial)
        assert {n for n, c in receipt.coverage.items() if c.nbytes} == set(sent)


def test_names_before_a_bad_one_have_landed_and_those_after_it_have_not() -> None:
    bad: dict[str, tuple[list[tuple[str, Tensor]], str]] = {
        "undeclared": ([("x", torch.ones(1))], "`x` arrived but was not declared"),
        "another shape": ([("b", torch.ones(1))], r"`b` arrived with shape \[1\]"),
        "twice": ([("a", torch.ones(5, 8))], "`a` arrived twice"),
    }
    for items, words in bad.values():
        model = Model()
        plan, weights = model.plan(), full(model)
        loadplan.start_reload(model.targets)
        sent = [("a", weights["a"]), *items, ("c", weights["c"])]
        with pytest.raises(ValueError, match=words + ".*1 of 4 names had landed: `a`"):
            loadplan.load_planned(model.targets, plan, sent)
        assert loadplan.state(model.targets).landed == ("a",)
        assert model.holds([("a", weights["a"])])
        assert model.is_old("b", "c", "d")
        # Nor does anything go on, not even a call with nothing.
        with pytest.raises(RuntimeError, match="cannot go on after a failure"):
            loadplan.load_planned(model.targets, plan, [])


def test_no_name_of_an_atomic_update_that_fails_has_landed() -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    loadplan.start_reload(model.targets, atomic=True)
    with pytest.raises(ValueError, match="the old bytes are back"):
        loadplan.load_planned(model.targets, plan, [*weights.items(), ("x", torch.ones(1))])
    assert model.is_old(*NAMES)


@pytest.mark.parametrize(
    "item", [("b", 3), (3, torch.ones(5, 8)), ("b", None), ([], torch.ones(1))]
)
def test_what_is_no_pair_of_name_and_tensor_lands_nothing(item: tuple[object, object]) -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    loadplan.start_reload(model.targets)
    with pytest.raises(TypeError, match="expected pairs of a name and a tensor"):
        loadplan.load_planned(model.targets, plan, [("a", weights["a"]), item])  # type: ignore[list-item]
    assert loadplan.state(model.targets).state == "active"
    assert model.is_old(*NAMES)


@pytest.mark.parametrize("view", [lambda t: t, Tensor.t, torch._neg_view])
def test_live_tensors_are_read_in_their_turn(view: Callable[[Tensor], Tensor]) -> None:
    live = {name: torch.full((4, 4), -1.0) for name in ("a", "b")}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    targets = loadplan.Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {name: ((4, 4), torch.float32) for name in live})
    for first, second in (("a", "b"), ("b", "a")):
        new = torch.randn(4, 4)
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, [(first, new), (second, view(live[first]))])
        loadplan.finish_reload(targets)
        assert torch.equal(live[first], new)
        assert torch.equal(live[second], view(new))


def test_tensors_that_are_no_plain_memory_land_with_the_others() -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    loadplan.start_reload(model.targets)
    sent = dict(weights)
    sent["b"] = weights["b"].t().contiguous().t()
    sent["c"] = torch._neg_view(weights["c"].neg())
    sent["d"] = torch.nn.Parameter(weights["d"])
    loadplan.load_planned(model.targets, plan, sent)
    loadplan.finish_reload(model.targets)
    assert model.holds(weights.items())


def test_an_update_goes_on_by_its_plan_after_another_was_made() -> None:
    model = Model()
    plan, weights = model.plan(), full(model)
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, {"c": weights["c"]})
    model.plan(["d", "c"])
    loadplan.load_planned(model.targets, plan, {n: w for n, w in weights.items() if n != "c"})
    receipt = loadplan.finish_reload(model.targets)
    assert receipt.names == ("c", "a", "b", "d")
    assert model.holds(weights.items())


def test_fallback_names_go_first() -> None:
    live = {name: torch.zeros(2) for name in NAMES}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if name == "c":
                assert float(weight[0]) > 0
            live[name].copy_(weight)

    targets = loadplan.Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {name: ((2,), torch.float32) for name in NAMES})
    assert [name for name, entry in plan.entries.items() if entry.kind == "fallback"] == ["c"]
    weights = {name: torch.full((2,), float(i + 1)) for i, name in enumerate(NAMES)}
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, weights)
    assert loadplan.finish_reload(targets).names == ("c", "a", "b", "d")
    assert all(torch.equal(live[name], weight) for name, weight in weights.items())
    # What only the loader can say fails before other names have landed.
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="AssertionError"):
        loadplan.load_planned(targets, plan, {n: -w for n, w in weights.items()})
    assert torch.equal(live["a"], weights["a"])
