"""The bug reports of ``tests/cases`` against the package: every case, and the probes of the device.

``harness.py`` holds the format, the truth (the eager loader) and the checker; this file says how a
case reaches ``loadplan``, and which cases wait for a feature.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loadplan

sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

import cases_a  # noqa: E402
import harness  # noqa: E402

Items = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
Load = Callable[[Mapping[str, Tensor], Iterator[tuple[str, Tensor]]], None]


def metas_of(items: Items) -> list[loadplan.ParamMeta]:
    """A list, not a mapping: a name that is declared twice must reach the package twice."""
    return [loadplan.ParamMeta(name, shape, dtype) for name, shape, dtype in items]


def label_of(kind: str) -> str:
    """The cases know no derived names; for them `fallback` means "not direct"."""
    return "fallback" if kind == "derived" else kind


@dataclass
class Planned:
    """What a case calls its plan: the plan with the targets and names that it was made for."""

    targets: loadplan.Targets
    metas: list[loadplan.ParamMeta]
    token: list[Any]  # one cell that the placement hook reads
    plan: loadplan.LoadPlan = field(init=False)

    def make(self) -> None:
        self.plan = loadplan.plan_loads(self.targets, self.metas)


@contextlib.contextmanager
def session(targets: loadplan.Targets, required: Iterable[str] = ()) -> Iterator[None]:
    """A reload session that is over when the block is, whatever happens in it."""
    loadplan.start_reload(targets, required=list(required))
    try:
        yield
    except BaseException:
        loadplan.abort_reload(targets)
        raise


class LoadplanProduct(harness.Product):
    def plan(self, targets: Mapping[str, Tensor], items: Items, load: Load, token: Any = None):
        cell = [token]
        live = loadplan.Targets(
            targets,
            load_weights=lambda weights: load(targets, weights),
            placement=lambda: cell[0],
        )
        planned = Planned(live, metas_of(items), cell)
        with session(live):
            planned.make()
            loadplan.abort_reload(live)
        return planned

    def kind(self, plan: Planned, name: str) -> str:
        return label_of(plan.plan.entries[name].kind)

    def boxes(self, plan: Planned, name: str) -> list[tuple[tuple[int, int], ...]]:
        reads = plan.plan.entries[name].reads
        return [tuple((int(start), int(stop)) for start, stop in box) for box in reads]

    def update(self, plan: Planned, targets, chunks, load, token=None, required=()) -> None:
        if token != plan.token[0]:
            self._refuses_other_placement(plan, targets, token)
        with session(plan.targets, required):
            for chunk in chunks:
                loadplan.load_planned(plan.targets, plan.plan, chunk)
            loadplan.finish_reload(plan.targets)

    def _refuses_other_placement(self, plan: Planned, targets, token: Any) -> None:
        """The old plan must be refused before any write; then plan again, as an engine would."""
        plan.token[0] = token
        before = harness.snapshot(targets)
        with pytest.raises(Exception, match="(?i)placement"), session(plan.targets):
            meta = plan.metas[0]
            weight = torch.zeros(meta.shape, dtype=meta.dtype)
            loadplan.load_planned(plan.targets, plan.plan, [(meta.name, weight)])
        assert harness.same(before, harness.snapshot(targets)) == []  # names that differ
        with session(plan.targets):
            plan.make()
            loadplan.abort_reload(plan.targets)

    def update_from_shards(self, plan: Planned, targets, shards, load, required=()) -> None:
        with session(plan.targets, required):
            loadplan.load_shards(plan.targets, plan.plan, shards)
            loadplan.finish_reload(plan.targets)

    def update_from_file(self, plan: Planned, targets, path, load, required=()) -> None:
        with session(plan.targets, required):
            loadplan.load_files(plan.targets, plan.plan, [path])
            loadplan.finish_reload(plan.targets)


class LoadplanApi(harness.Api):
    @contextlib.contextmanager
    def tracing(self, targets: Mapping[str, Tensor], items: Items) -> Iterator[None]:
        with loadplan.trace(targets, metas_of(items)) as self._pass:
            yield

    def trace(self, name: str) -> Tensor:
        return self._pass.tensor(name)

    def kind(self, name: str) -> str:
        return label_of(self._pass.kind(name))

    def reason(self, name: str) -> str:
        return self._pass.reason(name)

    def register_again(self) -> None:
        ours = [p for p in torch.ops.loaded_libraries if "loadplan" in os.path.basename(p)]
        assert ours, "the library is loaded through torch.ops"
        for path in ours:
            torch.ops.load_library(path)
        importlib.reload(loadplan)


CASES = harness.cases(cases_a)
PROBES = harness.probes(cases_a)


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.removeprefix("case_"))
def test_case_is_sound(name: str) -> None:
    """The eager loader runs, and its byte provenance agrees with the case's labels and boxes."""
    assert harness.check_eager(CASES[name]) == []
    assert harness.check_labels(CASES[name]) == []


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.removeprefix("case_"))
def test_case(name: str) -> None:
    failures = harness.run_case(CASES[name], LoadplanProduct())
    assert failures == []


@pytest.mark.parametrize("name", PROBES, ids=lambda name: name.removeprefix("probe_"))
def test_probe(name: str) -> None:
    PROBES[name](LoadplanApi())
