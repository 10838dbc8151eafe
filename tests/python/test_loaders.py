"""What real loaders do to checkpoint tensors, each reduced to a few lines.

Every loader is planned, and two updates with new weights go through the one plan; all live bytes
equal those of the eager load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import loadplan
from loadplan import LoadPlan, ParamMeta, Targets

F32, BF16 = torch.float32, torch.bfloat16
Weights = Iterable[tuple[str, Tensor]]
Live = dict[str, Tensor]
Loader = Callable[[Live, Weights], None]


def random_weights(metas: list[ParamMeta], seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(m.name, torch.randn(m.shape, generator=generator).to(m.dtype)) for m in metas]


def bytes_of(live: Live) -> dict[str, bytes]:
    return {
        name: bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in live.items()
    }


def check(make: Callable[[], Live], load: Loader, metas: list[ParamMeta]) -> LoadPlan:
    """Plans ``load`` and compares two updates with the eager load."""
    live, eager = make(), make()
    targets = Targets(live, load_weights=lambda weights: load(live, weights))
    before = bytes_of(live)
    plan = loadplan.plan_loads(targets, metas)
    assert bytes_of(live) == before
    for seed in (1, 2):
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, random_weights(metas, seed))
        loadplan.finish_reload(targets)
        load(eager, random_weights(metas, seed))
        assert bytes_of(live) == bytes_of(eager)
    return plan


def kinds(plan: LoadPlan) -> dict[str, str]:
    return {name: entry.kind for name, entry in plan.entries.items()}


# Expert parallelism: a map in a buffer says which experts this rank holds.
def make_experts() -> Live:
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    return {"w13": torch.zeros(2, 3, 5), "scale": torch.zeros(2), "expert_map": expert_map}


def test_an_index_made_of_a_live_expert_map_is_moved_to_the_weight() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            local = (live["expert_map"] != -1).nonzero().flatten().to(w.device)
            first = local[0].item()
            live["w13"].copy_(w.transpose(1, 2)[local])
            assert first == 2

    plan = check(make_experts, load, [ParamMeta("w", (4, 5, 3), F32)])
    assert kinds(plan) == {"w": "direct"}
    assert plan.get_boxes("w") == (((2, 4), (0, 5), (0, 3)),)
