"""An exception at each step of an update: what the error and `state` say is true, byte for byte."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fault_programs as programs
import layerwise_models as layers
import pytest
import torch
from fault_programs import Injected, Interrupted
from torch import Tensor, nn

import loadplan

SEED = int(os.environ.get("LOADPLAN_TEST_SEED") or random.SystemRandom().randrange(1 << 20))
MODELS = int(os.environ.get("LOADPLAN_FAULT_MODELS", "3"))


@dataclass
class Subject:
    """A planned model, and how one update of it goes."""

    model: Any
    targets: Any
    plan: loadplan.LoadPlan
    options: dict[str, Any]
    chance: random.Random
    eager: Callable[[dict[str, Tensor]], None]  # loads a reference, of which
    expected: Callable[[], dict[str, bytes]]  # the bytes are
    seed: int = 0

    def checkpoint(self) -> dict[str, Tensor]:
        self.seed += 1
        items = list(self.model.checkpoint(self.seed).items())
        self.chance.shuffle(items)
        return dict(items)

    def update(self, checkpoint: dict[str, Tensor], atomic: bool) -> None:
        loadplan.start_reload(self.targets, atomic=atomic, **self.options)
        names = list(checkpoint)
        while names:
            bucket = [(name, checkpoint[name]) for name in names[: self.chance.randint(1, 3)]]
            names = names[len(bucket) :]
            sent = self.chance.choice([list, iter])(bucket)
            loadplan.load_planned(self.targets, self.plan, sent)
        loadplan.finish_reload(self.targets)


def direct(seed: int, hooked: bool) -> Subject:
    model, reference = programs.Program(seed, hooked), programs.Program(seed, hooked)
    metas = {name: (tensor.shape, tensor.dtype) for name, tensor in model.checkpoint(0).items()}
    loadplan.start_reload(model.targets)
    plan = loadplan.plan_loads(model.targets, metas)
    loadplan.abort_reload(model.targets)

    def eager(checkpoint: dict[str, Tensor]) -> None:
        reference.load_eagerly({name: checkpoint[name] for name in metas}, model)

    def expected() -> dict[str, bytes]:
        return programs.memory_of(reference)

    return Subject(model, model.targets, plan, {}, random.Random(seed), eager, expected)


def layerwise(seed: int) -> Subject:
    chance = random.Random(seed)
    kinds = [chance.choice(programs.LAYERS) for _ in range(chance.randint(2, 5))]
    model = programs.Stepped(kinds)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(model.checkpoint(0).items())
    model.process()
    metas = model.checkpoint(0)
    loadplan.start_reload(model, mode="layerwise")
    plan = loadplan.plan_loads(model, metas)
    loadplan.abort_reload(model)
    sizes = [
        sum(p.nbytes for p in layer.parameters())
        for layer in layers.Model(kinds, programs.MORE).layers
    ]
    options = {
        "mode": "layerwise",
        "defer_processing": chance.random() < 0.2,
        "max_staging_bytes": chance.choice([None, sum(sizes), 2 * max(sizes) + sum(sizes) // 2]),
    }
    fresh: list[nn.Module] = []

    def eager(checkpoint: dict[str, Tensor]) -> None:
        declared = {name: checkpoint[name] for name in metas}
        fresh[:] = [layers.eager(kinds, declared, programs.MORE)]

    return Subject(model, model, plan, options, chance, eager, lambda: programs.memory_of(fresh[0]))


KINDS: dict[str, Callable[[int], Subject]] = {
    "direct": lambda seed: direct(seed, hooked=False),
    "hooked": lambda seed: direct(seed, hooked=True),
    "layerwise": layerwise,
}


def changed_bytes(tensor: Tensor, before: bytes) -> list[int]:
    now = bytes(layers.raw(tensor).tolist())
    return [at for at, pair in enumerate(zip(now, before, strict=True)) if pair[0] != pair[1]]


def check_truth(subject: Subject, before: dict[str, bytes]) -> None:
    """Every byte that changed is told, by each name that shows it."""
    state = loadplan.state(subject.targets)
    told = {name.replace("'", ""): told for name, told in state.undefined.items()}
    changed = {
        name: changed_bytes(tensor, before[name])
        for name, tensor in layers.kernel_tensors(subject.model).items()
        # What the loader alone writes, outside the targets, no session knows.
        if name in before and not name.endswith(".mirror")
    }
    changed = {name: where for name, where in changed.items() if where}
    for name, where in changed.items():
        assert name in told, (name, state)
        ranges = told[name].ranges
        assert all(any(a <= at < b for a, b in ranges) for at in where), (name, ranges, where)
    assert state.state == "failed" or not (state.undefined or changed), state
    if state.state == "failed":
        words = "the weights are undefined" if state.undefined else "no byte of the model"
        assert words in state.error, state.error


def run(subject: Subject, checkpoint: dict[str, Tensor], atomic: bool) -> BaseException | None:
    try:
        subject.update(checkpoint, atomic)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def faults(subject: Subject, count: int) -> Iterator[tuple[str, int | None, int | None]]:
    """Each statement of user code; each name in another shape."""
    for step in range(count):
        yield f"step {step}", step, None
    for name in range(len(subject.plan.entries)):
        yield f"arrival {name}", None, name


def inject(kind: str, seed: int, atomic: bool) -> int:
    subject = KINDS[kind](seed)
    places = layers.addresses(subject.model)
    subject.model.steps.arm(None)
    assert run(subject, subject.checkpoint(), atomic) is None
    number = 0
    for what, step, name in faults(subject, subject.model.steps.count):
        number += 1
        try:
            if not fails_truthfully(subject, atomic, step, name, interrupts=number % 3 == 0):
                continue
            assert not atomic or layers.addresses(subject.model) == places
            checkpoint = subject.checkpoint()
            subject.model.left = not atomic
            subject.eager(checkpoint)
            error = run(subject, checkpoint, atomic)
            if "load the model anew" in str(error) and not atomic:
                subject = KINDS[kind](seed)  # its plan reads what it had before
                places = layers.addresses(subject.model)
                continue
            assert error is None
            assert layers.addresses(subject.model) == places
            wanted, found = subject.expected(), programs.memory_of(subject.model)
            assert [name for name in wanted if wanted[name] != found[name]] == []
            assert loadplan.state(subject.targets).state == "idle"
        except BaseException as wrong:
            words = f"{kind}, model {seed}, atomic={atomic}, {what}"
            raise AssertionError(f"LOADPLAN_TEST_SEED={SEED}: {words}") from wrong
    return number


def fails_truthfully(
    subject: Subject, atomic: bool, step: int | None, name: int | None, interrupts: bool
) -> bool:
    """False where this order of arrival has fewer steps than the first."""
    before = programs.memory_of(subject.model)
    checkpoint = subject.checkpoint()
    if name is not None:
        checkpoint[list(checkpoint)[name]] = torch.zeros(99)
    subject.model.steps.arm(step, Interrupted if interrupts else Injected)
    error = run(subject, checkpoint, atomic)
    subject.model.steps.disarm()
    if error is None:
        assert step is not None
        return False
    if step is None:
        assert isinstance(error, ValueError) and "arrived" in str(error)
    else:
        assert isinstance(error, Interrupted if interrupts else (Injected, RuntimeError))
        assert f"step {step}," in str(error), error
    if loadplan.state(subject.targets).state == "active":
        # The placement was asked for before anything was written.
        loadplan.abort_reload(subject.targets)
    if atomic:
        state = loadplan.state(subject.targets)
        assert state.state == "idle" and state.undefined == {}
        assert programs.memory_of(subject.model) == before
    else:
        check_truth(subject, before)
    return True


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_each_step(kind: str, atomic: bool) -> None:
    for index in range(MODELS):
        assert inject(kind, SEED * 100 + index, atomic) > 0
