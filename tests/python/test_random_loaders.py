"""Random loaders through the package: what a plan leaves is, byte for byte, what eager leaves.

LOADPLAN_TEST_SEED repeats a run, LOADPLAN_PROGRAMS sets how many programs run, and
LOADPLAN_FIRST_PROGRAM where they begin.
"""

from __future__ import annotations

import collections
import gc
import importlib
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import loader_programs
import pytest
import torch
from loader_programs import Program
from torch import Tensor, nn

import loadplan
from loadplan import LoadPlan, ParamMeta, Targets

PLANNED, FALLBACK, REFUSED, INVALID, FAILED = "planned", "fallback", "refused", "invalid", "failed"
UPDATES = 2
SCRATCH = tempfile.TemporaryDirectory()
SCRATCH_FILE = os.path.join(SCRATCH.name, "plan.loadplan")

Live = dict[str, Tensor]
Weights = list[tuple[str, Tensor]]


@dataclass
class Outcome:
    kind: str
    detail: str = ""
    kinds: dict[str, int] = field(default_factory=dict)
    from_file: bool = False


def bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().as_strided(
        (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
    )
    return flat.view(torch.uint8)


def difference(expected: list[Tensor], got: list[Tensor]) -> str:
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        a, b = bytes_of(want), bytes_of(have)
        if not torch.equal(a, b):
            first = int((a != b).nonzero()[0])
            return (
                f"byte {first} (element {first // want.itemsize}) of storage {index} is "
                f"{int(b[first])}, eager left {int(a[first])}"
            )
    return ""


def compile_loader(program: Program) -> Callable[[Live, Any], None]:
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "ThreadPoolExecutor": ThreadPoolExecutor}
    exec(compile(loader_programs.render(program), "random_loader.py", "exec"), scope)
    load: Callable[[Live, Any], None] = scope["load_weights"]
    return load


class BothWays:
    """One program eagerly and by plan."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rng = random.Random(program.values)
        self.generator = torch.Generator().manual_seed(program.values)
        self.load = compile_loader(program)
        self.storages = [self.values((numel,), dtype) for numel, dtype in program.storages]
        self.live = loader_programs.target_views(program, self.storages)
        self.weights = [
            {
                name: self.values(shape, dtype)
                for name, (shape, dtype) in zip(program.names(), program.sources, strict=True)
            }
            for _ in range(UPDATES)
        ]

    def declared(self) -> list[str]:
        """Names of the targets.  What the others show is mirrored: no target, and it stays."""
        by_storage: dict[int, list[str]] = collections.defaultdict(list)
        for name, tensor in self.live.items():
            by_storage[tensor.untyped_storage()._cdata].append(name)
        names = list(by_storage.values())
        if self.rng.random() < 0.3:
            names = self.rng.sample(names, self.rng.randint(1, len(names)))
        return [name for group in names for name in group]

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return loader_programs.random_values(self.generator, shape, dtype)

    def run(self) -> Outcome:
        try:
            expected = self.eagerly()
        except Exception as error:
            return Outcome(INVALID, f"{type(error).__name__}: {error}")
        before = [storage.clone() for storage in self.storages]
        declared = {name: self.live[name] for name in self.declared()}
        targets = Targets(declared, load_weights=lambda weights: self.load(self.live, weights))
        plan, outcome = self.plan(targets)
        if changed := difference(before, self.storages):
            return Outcome(FAILED, f"while tracing, {changed}")
        if plan is None:
            return outcome
        if self.rng.random() < 0.4:
            plan = self.through_file(targets, plan, outcome)
        for index in range(UPDATES):
            before = [storage.clone() for storage in self.storages]
            try:
                self.update(targets, plan, index)
            except RuntimeError as error:
                return self.stopped(f"update {index}: {error}", before)
            if wrong := difference(expected[index], self.storages):
                return Outcome(FAILED, f"update {index}: {wrong}")
        return outcome

    def stopped(self, text: str, before: list[Tensor]) -> Outcome:
        """An update that raised: before the first write, or for a reason that only it can see."""
        loud = ("that the plan writes", "destinations were written without `load_planned`")
        if any(words in text for words in loud):
            return Outcome(REFUSED, text)
        # A changed premise, say, is refused before anything is written.
        if difference(before, self.storages) or "INTERNAL" in text:
            return Outcome(FAILED, text)
        return Outcome(REFUSED, text)

    def eagerly(self) -> list[list[Tensor]]:
        storages = [storage.clone() for storage in self.storages]
        live = loader_programs.target_views(self.program, storages)
        expected = []
        for weights in self.weights:
            self.load(live, iter([(name, tensor.clone()) for name, tensor in weights.items()]))
            expected.append([storage.clone() for storage in storages])
        return expected

    def plan(self, targets: Targets) -> tuple[LoadPlan | None, Outcome]:
        metas = [
            ParamMeta(name, shape, dtype)
            for name, (shape, dtype) in zip(self.program.names(), self.program.sources, strict=True)
        ]
        try:
            plan = loadplan.plan_loads(targets, metas, overlaps=self.program.overlaps)
        except RuntimeError as error:
            kind = FAILED if "INTERNAL" in str(error) else REFUSED
            return None, Outcome(kind, str(error))
        entries = list(plan.entries.values())
        outcome = Outcome(PLANNED, "", collections.Counter(entry.kind for entry in entries))
        for entry in entries:
            if entry.kind == "fallback":
                outcome.kind, outcome.detail = FALLBACK, entry.reason
        return plan, outcome

    def through_file(self, targets: Targets, plan: LoadPlan, outcome: Outcome) -> LoadPlan:
        """The plan that stands in a file, where a file can hold it."""
        try:
            plan.save(SCRATCH_FILE)
        except RuntimeError as error:
            if "is no target, and another process" not in str(error):
                raise
            return plan
        outcome.from_file = True
        loaded = loadplan.load_plan(SCRATCH_FILE, targets)
        assert loaded.report() == plan.report()
        return loaded

    def update(self, targets: Targets, plan: LoadPlan, index: int) -> None:
        loadplan.start_reload(targets)
        order = self.program.names()
        # Where names overlap and go through the loader, the order of arrival is part of the truth.
        if self.program.overlaps == "last_wins" or not plan.overlaps:
            self.rng.shuffle(order)
        weights = []
        for name in order:
            tensor = self.weights[index][name]
            if index > 0:
                tensor = self.only_reads(plan, name, tensor)
                if self.rng.random() < 0.3 and self.land_raw(plan, name, tensor):
                    continue
            weights.append((name, tensor.clone()))
        while weights:
            count = self.rng.randint(1, len(weights))
            bucket, weights = weights[:count], weights[count:]
            if self.rng.random() < 0.5:
                loadplan.load_planned(targets, plan, bucket)
                for _, tensor in bucket:
                    self.overwrite(tensor)
            else:
                loadplan.load_planned(targets, plan, self.reused(bucket))
        loadplan.finish_reload(targets)

    def reused(self, bucket: Weights) -> Iterator[tuple[str, Tensor]]:
        """A sender with one receive buffer: what it yielded is garbage as soon as it goes on."""
        buffer = torch.zeros(max(t.numel() * t.itemsize for _, t in bucket) + 8, dtype=torch.uint8)
        for name, tensor in bucket:
            received = buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
            received = received.view(tensor.shape)
            received.copy_(tensor)
            yield name, received
            buffer.fill_(77)

    def overwrite(self, tensor: Tensor) -> None:
        tensor.fill_(77)

    def only_reads(self, plan: LoadPlan, name: str, tensor: Tensor) -> Tensor:
        """The tensor where the plan says that it reads it, other values elsewhere."""
        entry = plan.entries[name]
        if entry.kind == "fallback":
            return tensor
        sent = self.values(tuple(tensor.shape), tensor.dtype)
        for box in entry.reads:
            place = tuple(slice(*bounds) for bounds in box)
            sent[place] = tensor[place]
        return sent

    def land_raw(self, plan: LoadPlan, name: str, tensor: Tensor) -> bool:
        """As an engine that receives into the destinations."""
        pairs = plan.get_dest(name)
        if not pairs:
            return False
        for box, dest in pairs:
            assert dest.dtype == tensor.dtype
            dest.copy_(tensor[tuple(slice(*bounds) for bounds in box)].reshape(dest.shape))
        plan.delivered(name)
        return True


def run(program: Program) -> Outcome:
    try:
        return BothWays(program).run()
    except Exception as error:  # what must not be raised at all
        return Outcome(FAILED, f"{type(error).__name__}: {error}")


def failure_text(program: Program, seed: str, index: int) -> str:
    small = loader_programs.shrink(program, lambda candidate: run(candidate).kind == FAILED)
    return (
        f"{run(small).detail}\n{loader_programs.describe(small)}\n"
        f"replay: LOADPLAN_TEST_SEED={seed} LOADPLAN_FIRST_PROGRAM={index} LOADPLAN_PROGRAMS=1 "
        f"python -m pytest -s tests/python/test_random_loaders.py"
    )


def folded(reason: str) -> str:
    """Reasons that differ in names and numbers only are one."""
    return re.sub(r"\d+", "#", reason.split("\n")[0])[:150]


class Tally:
    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.from_file = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        self.from_file += outcome.from_file
        self.kinds.update(outcome.kinds)
        if outcome.detail:
            self.reasons[f"{outcome.kind}: {folded(outcome.detail)}"] += 1

    def print(self, seconds: float) -> None:
        print(f"\n{sum(self.outcomes.values())} programs in {seconds:.1f} s: {dict(self.outcomes)}")
        print(f"{self.from_file} of them by a plan out of a file; names: {dict(self.kinds)}")
        for reason, count in self.reasons.most_common(int(os.environ.get("LOADPLAN_REASONS", 12))):
            print(f"  {count} x {reason}")


@pytest.fixture(autouse=True)
def as_fast_as_possible() -> Iterator[None]:
    """Tiny tensors: torch's own threads only cost.

    A pass asks the garbage collector who holds a tensor; torch's own objects need no look, nor do
    those of what it imports later.
    """
    importlib.import_module("torch._dynamo")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


def test_a_plan_leaves_what_the_loader_leaves() -> None:
    seed = os.environ.get("LOADPLAN_TEST_SEED") or str(random.SystemRandom().getrandbits(32))
    first = int(os.environ.get("LOADPLAN_FIRST_PROGRAM", 0))
    count = int(os.environ.get("LOADPLAN_PROGRAMS", 2000))
    tally = Tally()
    start = time.monotonic()
    for index in range(first, first + count):
        program = loader_programs.generate(f"{seed}/{index}")
        outcome = run(program)
        tally.add(outcome)
        if outcome.kind in (FAILED, INVALID):
            pytest.fail(
                failure_text(program, seed, index)
                if outcome.kind == FAILED
                else f"eager refuses: {outcome.detail}\n{loader_programs.describe(program)}"
            )
    tally.print(time.monotonic() - start)
    assert tally.outcomes[REFUSED] * 10 <= max(count, 50), "more than a tenth is refused"
