"""What the tests of sessions load into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import loadplan
from loadplan import Targets

F32 = torch.float32
Weights = Iterable[tuple[str, Tensor]]
Bytes = dict[str, Tensor]


def bytes_of(targets: Targets) -> Bytes:
    return {name: tensor.detach().clone() for name, tensor in targets.named().items()}


def differing(targets: Targets, before: Bytes) -> list[str]:
    now = targets.named()
    return [
        name
        for name, old in before.items()
        if not torch.equal(now[name].detach().view(torch.uint8), old.view(torch.uint8))
    ]


class Everything:
    """A loader with a name of every kind: direct, cast, combined, fallback, constants, a mirror."""

    def __init__(self, **hooks: Any) -> None:
        rand = torch.Generator().manual_seed(3)
        self.live = {
            "q": torch.rand(4, 6, generator=rand),
            "half": torch.rand(6, generator=rand).to(torch.bfloat16),
            "scaled": torch.rand(3, generator=rand),
            "padded": torch.rand(5, generator=rand),
            "looked": torch.rand(4, generator=rand),
            "free": torch.rand(2, generator=rand),  # no name writes it
        }
        self.mirror = torch.rand(4, generator=rand)
        self.fail_in_loader = ""
        self.targets = Targets(self.live, self.load_weights, **hooks)
        self.metas = {
            "q": ((4, 6), F32),
            "half": ((6,), F32),
            "scale": ((3,), F32),
            "base": ((3,), F32),
            "padded": ((3,), F32),
            "looked": ((4,), F32),
        }

    def load_weights(self, weights: Weights) -> None:
        held: dict[str, Tensor] = {}
        for name, weight in weights:
            if name in ("scale", "base"):
                held[name] = weight
                if len(held) == 2:
                    self.live["scaled"].copy_(held["scale"] * held["base"])
                    held.clear()
            elif name == "padded":
                self.live[name][:3].copy_(weight)
                self.live[name][3:].zero_()
            elif name == "looked":
                factor = 1.0 if weight.sum().item() > 0 else -1.0
                self.live[name][:2].copy_(weight[:2] * factor)
                if self.fail_in_loader == "half way":
                    raise OverflowError("half way")
                self.live[name][2:].copy_(weight[2:] * factor)
                self.mirror.copy_(weight)
                if self.fail_in_loader == "at the end":
                    raise OverflowError("at the end")
            else:
                self.live[name].copy_(weight)

    def plan(self) -> loadplan.LoadPlan:
        if self.targets.restore is None:
            return loadplan.plan_loads(self.targets, self.metas)
        loadplan.start_reload(self.targets)
        plan = loadplan.plan_loads(self.targets, self.metas)
        loadplan.abort_reload(self.targets)
        return plan

    def weights(self, seed: int) -> Bytes:
        rand = torch.Generator().manual_seed(seed)
        return {name: torch.rand(shape, generator=rand) for name, (shape, _) in self.metas.items()}

    def eager(self, weights: Bytes) -> Bytes:
        """What the loader leaves, on live tensors that are put back."""
        before = bytes_of(self.targets)
        mirror = self.mirror.clone()
        self.load_weights((name, weight.clone()) for name, weight in weights.items())
        after = bytes_of(self.targets)
        for name, old in before.items():
            self.live[name].copy_(old)
        self.mirror.copy_(mirror)
        return after


def kinds(plan: loadplan.LoadPlan) -> dict[str, str]:
    return {name: entry.kind for name, entry in plan.entries.items()}
