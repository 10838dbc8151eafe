"""More bug reports of ``tests/cases`` against the package, each in many ways.

Beside what `harness.run_case` does with a case: names arrive one by one, in the reversed order, in
two buckets, from a file; atomically; by a plan that was saved and loaded. After each of two updates
whole storages are compared with those of the eager loader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_cases import Items, Load, LoadplanProduct, Planned, metas_of, session
from torch import Tensor

import loadplan

sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

import cases_b  # noqa: E402
import harness  # noqa: E402

CASES = harness.cases(cases_b)
Weights = list[tuple[str, Tensor]]


class Product(LoadplanProduct):
    """Hands over the module where the targets are those of one."""

    def plan(self, targets: Mapping[str, Tensor], items: Items, load: Load, token: Any = None):
        module = getattr(targets, "module", None)
        if module is None:
            return super().plan(targets, items, load, token)
        planned = Planned(module, metas_of(items), [token])
        with session(module):
            planned.make()
            loadplan.abort_reload(module)
        return planned


def plan_of(case: dict[str, Any]) -> Planned:
    items = [(n, tuple(w.shape), w.dtype) for n, w in harness.stream_of(case)]
    return Product().plan(case["targets"], items, case["load"])


def succeeds(case: dict[str, Any]) -> bool:
    """Whether every update of a case ends well, in whatever order names arrive."""
    expect = case["expect"]
    words = ("plan", "finish", "overlap", "rebind")
    return not any(expect.get(word) for word in words) and "arrive" not in case


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.removeprefix("case_"))
def test_case_is_sound(name: str) -> None:
    """The eager loader runs, and its byte provenance agrees with the case's labels and boxes."""
    assert harness.check_eager(CASES[name]) == []
    assert harness.check_labels(CASES[name]) == []


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.removeprefix("case_"))
def test_case(name: str) -> None:
    assert harness.run_case(CASES[name], Product()) == []


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.removeprefix("case_"))
def test_what_the_plan_computes_itself(name: str) -> None:
    """No name goes through the loader that need not."""
    case = CASES[name]()
    if case["expect"].get("plan") == "error" or case["expect"].get("rebind"):
        return
    entries = plan_of(case).plan.entries
    derived = [name for name, entry in entries.items() if entry.kind == "derived"]
    assert derived == [name for name in entries if name in case.get("derived", ())]


# ------------------------------------------------------------------ ways to update
@dataclass(frozen=True)
class Way:
    cut: Callable[[Weights], Iterator[Weights]]
    atomic: bool = False
    saved: bool = False


def whole(weights: Weights) -> Iterator[Weights]:
    yield weights


def one_by_one(weights: Weights) -> Iterator[Weights]:
    for item in weights:
        yield [item]


def backwards(weights: Weights) -> Iterator[Weights]:
    yield from one_by_one(weights[::-1])


def in_halves(weights: Weights) -> Iterator[Weights]:
    yield weights[1::2]
    yield weights[::2]


WAYS = {
    "one by one, atomic": Way(one_by_one, atomic=True),
    "backwards, saved": Way(backwards, saved=True),
    "in halves": Way(in_halves),
    "whole, atomic, saved": Way(whole, atomic=True, saved=True),
}
ORDERLY = [name for name in CASES if succeeds(CASES[name]())]


def rounds(case: dict[str, Any]) -> Iterator[Weights]:
    """What arrives in each update, with what happens before it done."""
    for index, weights in enumerate([harness.stream_of(case), *case["updates"]]):
        if index:
            case.get("between", harness.nothing)(case["targets"])
        yield list(weights.items()) if isinstance(weights, dict) else weights


def whole_storages(targets: Mapping[str, Tensor]) -> list[Tensor]:
    return [memory.clone() for memory in harness.storages(targets).values()]


def same_storages(ours: list[Tensor], eager: list[Tensor]) -> bool:
    return len(ours) == len(eager) and all(map(Tensor.equal, ours, eager))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ORDERLY, ids=lambda name: name.removeprefix("case_"))
def test_updates(name: str, way: str, tmp_path: Path) -> None:
    case, eager = CASES[name](), CASES[name]()
    how = WAYS[way]
    planned = plan_of(case)
    model, plan = planned.targets, planned.plan
    if how.saved and not case.get("saves", True):
        with pytest.raises(RuntimeError, match="cannot be saved: its loader read a tensor"):
            plan.save(tmp_path / "plan")
    elif how.saved:
        plan.save(tmp_path / "plan")
        plan = loadplan.load_plan(tmp_path / "plan", model)
    addresses = [tensor.data_ptr() for tensor in case["targets"].values()]
    for ours, theirs in zip(rounds(case), rounds(eager), strict=True):
        loadplan.start_reload(model, atomic=how.atomic, required=case.get("required", []))
        for bucket in how.cut(ours):
            loadplan.load_planned(model, plan, [(n, w.clone()) for n, w in bucket])
        loadplan.finish_reload(model)
        case.get("process", harness.nothing)(case["targets"])
        harness.eager(eager, theirs)
        assert same_storages(whole_storages(case["targets"]), whole_storages(eager["targets"]))
    assert addresses == [tensor.data_ptr() for tensor in case["targets"].values()]


@pytest.mark.parametrize("name", ORDERLY, ids=lambda name: name.removeprefix("case_"))
def test_atomic_update_given_up_half_way(name: str) -> None:
    case = CASES[name]()
    planned = plan_of(case)
    before = whole_storages(case["targets"])
    weights = harness.stream_of(case)
    loadplan.start_reload(planned.targets, atomic=True)
    loadplan.load_planned(planned.targets, planned.plan, weights[: len(weights) // 2 + 1])
    loadplan.abort_reload(planned.targets)
    assert same_storages(whole_storages(case["targets"]), before)


@pytest.mark.parametrize("name", ORDERLY, ids=lambda name: name.removeprefix("case_"))
def test_verify_finds_no_difference(name: str) -> None:
    case = CASES[name]()
    planned = plan_of(case)
    before = whole_storages(case["targets"])
    weights = [(n, w.clone()) for n, w in harness.stream_of(case)]
    assert not loadplan.verify(planned.targets, planned.plan, weights)
    assert same_storages(whole_storages(case["targets"]), before)


@pytest.mark.parametrize("name", ORDERLY, ids=lambda name: name.removeprefix("case_"))
def test_from_a_file(name: str, tmp_path: Path) -> None:
    case, eager = CASES[name](), CASES[name]()
    planned = plan_of(case)
    path = str(tmp_path / "model.safetensors")
    for ours, theirs in zip(rounds(case), rounds(eager), strict=True):
        harness.st_write(path, dict(ours))
        with session(planned.targets):
            loadplan.load_files(planned.targets, planned.plan, [path])
            loadplan.finish_reload(planned.targets)
        case.get("process", harness.nothing)(case["targets"])
        harness.eager(eager, theirs)
        assert same_storages(whole_storages(case["targets"]), whole_storages(eager["targets"]))
