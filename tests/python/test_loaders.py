"""What real loaders do to checkpoint tensors, each reduced to a few lines.

Every loader is planned, and two updates with new weights go through the one plan; all live bytes
equal those of the eager load.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

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


class LanguageHead(nn.Module):
    """The bias exists only once a checkpoint has one; each load makes it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.register_parameter("bias", None)

    def load_weights(self, weights: Weights) -> None:
        for name, w in weights:
            if name == "bias":
                self.bias = nn.Parameter(torch.empty(4), requires_grad=False)
            getattr(self, name).data.copy_(w)


@pytest.mark.parametrize("loaded_before", [True, False])
def test_a_parameter_that_every_load_makes_anew(loaded_before: bool) -> None:
    metas = [ParamMeta("weight", (4, 3), F32), ParamMeta("bias", (4,), F32)]
    model, eager = LanguageHead(), LanguageHead()
    if loaded_before:
        model.load_weights(random_weights(metas, 0))
    pointer = model.bias.data_ptr() if loaded_before else 0
    bias = model.bias
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas)
    assert model.bias is bias
    # Where it has a place already, what the loader makes anew is copied there.
    assert kinds(plan) == {"weight": "direct", "bias": "direct" if loaded_before else "fallback"}
    reason = "" if loaded_before else "`bias = ...` puts it into memory that no plan knows"
    assert plan.entries["bias"].reason == reason
    loadplan.abort_reload(model)
    for seed in (1, 2):
        loadplan.start_reload(model)
        loadplan.load_planned(model, plan, random_weights(metas, seed))
        loadplan.finish_reload(model)
        eager.load_weights(random_weights(metas, seed))
        assert bytes_of(model.state_dict()) == bytes_of(eager.state_dict())
        assert not loaded_before or model.bias.data_ptr() == pointer


def test_vllm_is_not_imported_with_the_package() -> None:
    program = "import sys, loadplan.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def make_scaled() -> Live:
    return {"a": torch.zeros(3), "b": torch.zeros(3), "scale": torch.zeros(2)}


def load_one(live: Live, name: str, w: Tensor) -> None:
    if name == "scale":
        live[name].fill_(w.item())
    else:
        live[name].copy_(w)


SCALED = [ParamMeta("a", (3,), F32), ParamMeta("scale", (), F32), ParamMeta("b", (3,), F32)]


def test_a_loader_that_lists_its_weights_first_keeps_its_plan_beside_a_value_read() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in list(weights):
            load_one(live, name, w)

    plan = check(make_scaled, load, SCALED)
    assert kinds(plan) == {"a": "direct", "scale": "fallback", "b": "direct"}


def test_the_variables_of_nested_generators_keep_no_name_from_its_plan() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, group in itertools.groupby(weights, key=lambda item: item[0] == "scale"):
            for name, w in ((name, w) for name, w in group):
                load_one(live, name, w)

    plan = check(make_scaled, load, SCALED)
    assert kinds(plan) == {"a": "direct", "scale": "fallback", "b": "direct"}


def test_a_copy_of_live_bytes_in_the_turn_of_a_name_that_is_not_needed() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                live["x"][1:3] = w
            if name == "b":
                live["z"].fill_(w[0].item())
            if name == "c":
                live["y"].copy_(live["x"][:4])  # nothing of `c`, and only in its turn

    def make() -> Live:
        return {"x": torch.arange(9.0), "y": torch.zeros(4), "z": torch.zeros(3)}

    metas = [ParamMeta(name, (2,), F32) for name in "abc"]
    plan = check(make, load, metas)
    assert kinds(plan) == dict.fromkeys("abc", "fallback")


def test_a_destination_never_lies_over_bytes_that_are_read_before() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                live["y"].copy_(live["x"])  # as they were before the update
                live["x"].copy_(w)
            else:
                live["z"].copy_(w)

    def make() -> Live:
        return {name: torch.full((2,), float(i)) for i, name in enumerate("xyz")}

    metas = [ParamMeta(name, (2,), F32) for name in "ab"]
    plan = check(make, load, metas)
    # An engine that writes there first would have `y` filled with new bytes.
    assert plan.get_dest("a") is None and plan.get_boxes("a") == (((0, 2),),)
    assert plan.get_dest("b")


def test_a_trace_by_hand_ends_well_after_a_read_that_it_refused() -> None:
    live = {"x": torch.zeros(2)}
    with loadplan.trace(live, [ParamMeta("a", (2,), F32), ParamMeta("b", (2,), F32)]) as trace:
        live["x"].copy_(trace.tensor("b"))
        try:
            trace.tensor("a")[0].item()
        except RuntimeError as error:
            assert "`a`" in str(error)
    assert trace.kind("a") == "fallback" and "aten::item" in trace.reason("a")
    assert trace.kind("b") == "direct"


def test_a_constant_beside_names_that_all_fall_back() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            live["x"].fill_(w[0].item())
            live["y"].fill_(2)

    plan = check(
        lambda: {"x": torch.zeros(3), "y": torch.zeros(3)}, load, [ParamMeta("a", (2,), F32)]
    )
    assert kinds(plan) == {"a": "fallback"}


def test_names_that_all_fall_back_because_of_one_turn() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "c":
                live["y"].copy_(live["x"])  # in the turn of a name that is not needed
            else:
                live["x"].copy_(w)  # `a` and `b` overlap

    def make() -> Live:
        return {"x": torch.zeros(3), "y": torch.zeros(3)}

    plan = check(make, load, [ParamMeta(name, (3,), F32) for name in "abc"])
    assert kinds(plan) == dict.fromkeys("abc", "fallback")
