"""Plans in files: what another process gets, and the words in which it is refused."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import layerwise_models
import pytest
import torch
from torch import Tensor, nn

import loadplan
from loadplan import LoadPlan, ParamMeta, Targets

F32, BF16 = torch.float32, torch.bfloat16
Weights = Iterable[tuple[str, Tensor]]

# Imported by both processes of a test, too.
METAS = [
    ParamMeta("q", (4, 6), BF16),
    ParamMeta("k", (2, 6), BF16),
    ParamMeta("a", (3,), F32),
    ParamMeta("gate", (3,), F32),
    ParamMeta("extra", (5,), F32),
]


class Model(nn.Module):
    """A fused parameter, a computed one, padding, a tie, a name that is read by its value."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((7, 6), 7.0))
        self.tied = self.qk
        self.A = nn.Parameter(torch.full((3,), 7.0))
        self.gate = nn.Parameter(torch.full((3,), 7.0))
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "q":
                self.qk.data[:4].copy_(weight)
                self.qk.data[6:].zero_()
            elif name == "k":
                self.qk.data[4:6].copy_(weight.flip(0))
            elif name == "a":
                self.A.data.copy_(-weight.exp())
            elif name == "gate":
                self.gate.data.fill_(weight.sum().item())


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {m.name: torch.randn(m.shape, generator=generator).to(m.dtype) for m in METAS}


def planned(model: Model | Targets, metas: Any = METAS) -> LoadPlan:
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas)
    loadplan.abort_reload(model)
    return plan


def update(model: Any, plan: LoadPlan, tensors: dict[str, Tensor]) -> None:
    loadplan.start_reload(model)
    loadplan.load_planned(model, plan, tensors.items())
    loadplan.finish_reload(model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_loaded_plan_answers_as_the_one_that_was_saved(tmp_path: Path) -> None:
    model = Model()
    plan = planned(model)
    plan.save(tmp_path / "p.loadplan")
    other = Model()
    again = loadplan.load_plan(tmp_path / "p.loadplan", other)
    assert {name: entry.kind for name, entry in again.entries.items()} == {
        "q": "derived",
        "k": "derived",
        "a": "derived",
        "gate": "fallback",
        "extra": "unneeded",
    }
    assert dict(again.entries) == dict(plan.entries)
    assert again.report() == plan.report()
    assert again.uncovered == plan.uncovered
    assert again.overlaps == plan.overlaps
    assert again.has_fallbacks and again.trace_seconds == plan.trace_seconds
    assert [again.get_boxes(m.name) for m in METAS] == [plan.get_boxes(m.name) for m in METAS]
    expected = Model()
    expected.load_weights(weights().items())
    update(other, again, weights())
    assert all(torch.equal(state_of(expected)[n], t) for n, t in state_of(other).items())
    assert loadplan.verify(other, again, weights()) == ()


def test_a_destination_of_a_loaded_plan_lies_in_the_model_at_hand(tmp_path: Path) -> None:
    live = {"p": torch.full((4, 2), 7.0)}

    def targets(live: dict[str, Tensor]) -> Targets:
        return Targets(live, load_weights=lambda ws: [live["p"].copy_(w[2:6]) for _, w in ws])

    loadplan.plan_loads(targets(live), {"w": ((8, 2), F32)}).save(tmp_path / "p")
    other = {"p": torch.full((4, 2), 7.0)}
    model = targets(other)
    plan = loadplan.load_plan(tmp_path / "p", model)
    loadplan.start_reload(model)
    [(box, dest)] = plan.get_dest("w") or []
    assert box == ((2, 6), (0, 2))
    dest.copy_(torch.ones(4, 2).reshape(dest.shape))
    plan.delivered("w")
    loadplan.finish_reload(model)
    assert torch.equal(other["p"], torch.ones(4, 2)) and live["p"][0, 0] == 7


def test_another_process_loads_it(tmp_path: Path) -> None:
    plan = planned(Model())
    plan.save(tmp_path / "p.loadplan")
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, loadplan
from test_plan_files import Model, update, weights
model = Model()
update(model, loadplan.load_plan({str(tmp_path / "p.loadplan")!r}, model), weights())
torch.save(model.state_dict(), {str(tmp_path / "state.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    expected = Model()
    expected.load_weights(weights().items())
    got = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(tensor, got[name]) for name, tensor in state_of(expected).items())


def mapped(order: list[int]) -> Targets:
    live = {"p": torch.full((3,), 7.0), "map": torch.tensor(order)}

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            for i in range(3):
                live["p"][i].copy_(weight[live["map"][i].item()])

    return Targets(live, load_weights)


def test_a_value_that_the_loader_read_is_still_a_premise(tmp_path: Path) -> None:
    loadplan.plan_loads(mapped([2, 0, 1]), {"w": ((3,), F32)}).save(tmp_path / "p")
    same = mapped([2, 0, 1])
    update(same, loadplan.load_plan(tmp_path / "p", same), {"w": torch.arange(3.0)})
    assert same.named()["p"].tolist() == [2, 0, 1]
    other = mapped([0, 1, 2])
    plan = loadplan.load_plan(tmp_path / "p", other)
    with pytest.raises(RuntimeError, match="`map`, which the loader read .* has changed"):
        update(other, plan, {"w": torch.arange(3.0)})
    assert bool((other.named()["p"] == 7).all())


def test_a_tensor_outside_of_the_model_cannot_be_found_again(tmp_path: Path) -> None:
    live = {"p": torch.full((3,), 7.0)}
    outside = torch.tensor([2, 0, 1])

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            live["p"].copy_(weight[outside])

    plan = loadplan.plan_loads(Targets(live, load_weights), {"w": ((3,), F32)})
    with pytest.raises(RuntimeError, match=r"shape \[3\] and dtype int64 that is no target"):
        plan.save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def bound(token: Any) -> Targets:
    live = {"p": torch.full((3,), 7.0)}
    return Targets(live, lambda ws: [live["p"].copy_(w) for _, w in ws], placement=lambda: token)


def test_the_placement_is_part_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "p"
    token = ("epoch", 3, (0, 1, None))
    loadplan.plan_loads(bound(token), {"w": ((3,), F32)}).save(path)
    loadplan.load_plan(path, bound(token))
    with pytest.raises(RuntimeError, match=r"placement \('epoch', 3, .*, and now it is 4"):
        loadplan.load_plan(path, bound(4))
    with pytest.raises(ValueError, match="placement token <object .* cannot be put into a file"):
        loadplan.plan_loads(bound(object()), {"w": ((3,), F32)}).save(path)


def test_equal_layouts_do_not_make_two_ranks_one(tmp_path: Path) -> None:
    path = tmp_path / "p"
    loadplan.plan_loads(bound(0), {"w": ((3,), F32)}).save(path, tag="tp 1 of 8")
    loadplan.load_plan(path, bound(0), tag="tp 1 of 8")
    with pytest.raises(RuntimeError, match="with the tag `tp 1 of 8`, and is loaded with `tp 3 of"):
        loadplan.load_plan(path, bound(0), tag="tp 3 of 8")
    with pytest.raises(RuntimeError, match="is loaded with ``"):
        loadplan.load_plan(path, bound(0))


def test_the_rank_is_the_tag_where_there_is_one(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        loadplan.plan_loads(bound(0), {"w": ((3,), F32)}).save(tmp_path / "p")
        loadplan.load_plan(tmp_path / "p", bound(0))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match="the tag `rank 0 of 1`"):
        loadplan.load_plan(tmp_path / "p", bound(0))


def test_other_metadata_is_refused_where_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "p"
    loadplan.plan_loads(bound(0), {"w": ((3,), F32)}).save(path)
    loadplan.load_plan(path, bound(0), metas={"w": ((3,), F32)})
    with pytest.raises(RuntimeError, match=r"`w` of shape \[3\] .* `w` of shape \[4\]"):
        loadplan.load_plan(path, bound(0), metas={"w": ((4,), F32)})
    with pytest.raises(RuntimeError, match=r"torch.float32, and here `w` .* torch.float16"):
        loadplan.load_plan(path, bound(0), metas={"w": ((3,), torch.float16)})
    with pytest.raises(RuntimeError, match="1 names and 2 are declared; `v` is new"):
        loadplan.load_plan(path, bound(0), metas={"w": ((3,), F32), "v": ((3,), F32)})


def test_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    planned(Model()).save(path)
    other = Model()
    other.tied = nn.Parameter(other.qk.data.clone())
    with pytest.raises(RuntimeError, match="target `tied`: .* storage shared with `qk`"):
        loadplan.load_plan(path, other)


def layerwise_model(kinds: list[str], seed: int) -> layerwise_models.Model:
    """As an engine has it when the first update comes: recorded, loaded, processed."""
    model = layerwise_models.Model(kinds)
    loadplan.record_metadata_for_reloading(model)
    model.load_weights(layerwise_models.Model(kinds).checkpoint(seed).items())
    model.process()
    return model


def test_a_plan_of_a_layerwise_reload_is_loaded_inside_of_one(tmp_path: Path) -> None:
    kinds = ["norm", "repacked", "experts"]
    checkpoint = layerwise_models.Model(kinds).checkpoint(1)
    model = layerwise_model(kinds, 0)
    loadplan.start_reload(model, mode="layerwise")
    loadplan.plan_loads(model, checkpoint).save(tmp_path / "p")
    loadplan.abort_reload(model)
    other = layerwise_model(kinds, 2)
    # The kernel format is another layout.
    with pytest.raises(RuntimeError, match='target.*.*call `start_reload.model, mode="layerwise"'):
        loadplan.load_plan(tmp_path / "p", other)
    loadplan.start_reload(other, mode="layerwise")
    plan = loadplan.load_plan(tmp_path / "p", other)
    loadplan.load_planned(other, plan, checkpoint.items())
    loadplan.finish_reload(other)
    eager = layerwise_models.eager(kinds, checkpoint)
    assert layerwise_models.different(eager, other) == []


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        loadplan.load_plan(tmp_path / "none", bound(0))
    path = tmp_path / "p"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="p`: this is no plan file"):
        loadplan.load_plan(path, bound(0))
    loadplan.plan_loads(bound(0), {"w": ((3,), F32)}).save(path)
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    with pytest.raises(ValueError, match="is damaged: it was written with"):
        loadplan.load_plan(path, bound(0))
    rng = random.Random(5)
    for _ in range(200):
        changed = bytearray(good)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError):
            loadplan.load_plan(path, bound(0))


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    plan = loadplan.plan_loads(bound(0), {"w": ((3,), F32)})
    plan.save(path)
    before = path.read_bytes()
    plan._placement = object()
    with pytest.raises(ValueError):
        plan.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["p"]
