"""The package: metadata, targets, plans and sessions, and the words of every error."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import loadplan
from loadplan import ParamMeta, Targets

F32, BF16 = torch.float32, torch.bfloat16
Weights = Iterable[tuple[str, Tensor]]


def copy_by_name(targets: Mapping[str, Tensor]) -> Callable[[Weights], None]:
    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if name in targets:
                targets[name].data.copy_(weight)

    return load_weights


def simple(**shapes: tuple[int, ...]) -> Targets:
    """Targets full of sevens, each filled by the checkpoint tensor of its own name."""
    live = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
    return Targets(live, load_weights=copy_by_name(live))


def metas_of(**shapes: tuple[int, ...]) -> list[ParamMeta]:
    return [ParamMeta(name, shape, F32) for name, shape in shapes.items()]


def update(model: Any, plan: loadplan.LoadPlan, weights: Weights) -> loadplan.Receipt:
    loadplan.start_reload(model)
    loadplan.load_planned(model, plan, weights)
    return loadplan.finish_reload(model)


class Model(nn.Module):
    """A parameter, a tied one, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 7.0))
        self.tied = self.weight
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)


# ------------------------------------------------------------------ metadata
def test_metadata_of_a_mapping() -> None:
    metas = loadplan.metadata({"a": torch.zeros(2, 3, dtype=BF16), "b": ((4,), F32)})
    assert [meta[:3] for meta in metas] == [("a", (2, 3), BF16), ("b", (4,), F32)]
    assert loadplan.metadata(metas) == metas


def test_metadata_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"b": torch.zeros(3, dtype=BF16), "a": torch.zeros(2, 2), "c": torch.tensor(1)}, file)
    metas = {meta.name: meta[1:3] for meta in loadplan.metadata(file)}
    assert metas == {"a": ((2, 2), F32), "b": ((3,), BF16), "c": ((), torch.int64)}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_metadata_of_a_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    assert [meta.name for meta in loadplan.metadata(tmp_path)] == ["a", "b"]
    write_index(tmp_path, {"b": "two.safetensors", "a": "one.safetensors"})
    assert [meta.name for meta in loadplan.metadata(tmp_path)] == ["b", "a"]
    write_index(tmp_path, {"b": "two.safetensors", "z": "one.safetensors"})
    with pytest.raises(ValueError, match="places `z` in `one.safetensors`, which does not hold"):
        loadplan.metadata(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index"):
        loadplan.metadata(tmp_path)


def test_metadata_refuses_names_declared_twice(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match="`a` is declared twice"):
        loadplan.metadata(tmp_path)
    with pytest.raises(ValueError, match="`w` is declared twice"):
        loadplan.metadata([*metas_of(w=(2,)), *metas_of(w=(2,))])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, -3), "`w` has the negative extent -3"),
        (
            (1 << 62, 8),
            r"`w` has a shape whose bytes cannot be counted: \[4611686018427387904",
        ),
        ((1 << 63,), r"`w` is declared with the shape \(9223372036854775808,\)"),
        ((2.0,), r"`w` is declared with the shape \(2.0,\); expected whole numbers"),
    ],
)
def test_shapes_that_no_tensor_has(shape: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loadplan.plan_loads(simple(w=(2,)), [loadplan.ParamMeta("w", shape, torch.float32)])


def raw_file(path: Path, header: str, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
    return path


BAD_HEADERS = {
    "no json": ("{nothing", "has a header that is no JSON"),
    "no object": ("[1, 2]", "no JSON object"),
    "twice": (
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        ' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        "`a` is declared twice",
    ),
    "no shape": ('{"a": {"dtype": "F32"}}', "`a` lacks one of"),
    "beyond the end": (
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        "`a` has `data_offsets` that are no range within the 4 bytes",
    ),
    "wrong size": (
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        "`a` has 4 bytes of data, expected 8",
    ),
    "a dtype of no torch": (
        '{"a": {"dtype": "F4", "shape": [8, 1], "data_offsets": [0, 4]}}',
        r"holds `a` as F4 of shape \[8, 1\], for which torch has no dtype",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_metadata_says_what_is_wrong_with_a_file(case: str, tmp_path: Path) -> None:
    header, words = BAD_HEADERS[case]
    file = raw_file(tmp_path / "bad.safetensors", header, b"1234")
    with pytest.raises(ValueError, match=words) as error:
        loadplan.metadata(file)
    assert "bad.safetensors" in str(error.value)


def test_metadata_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither"):
        loadplan.metadata(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        loadplan.metadata(tmp_path / "none.safetensors")
    short = tmp_path / "short.safetensors"
    short.write_bytes(b"123")
    with pytest.raises(ValueError, match="is no safetensors file"):
        loadplan.metadata(short)
    with pytest.raises(TypeError, match="expected a ParamMeta"):
        loadplan.metadata([("a", (2,), F32)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="`a` is declared as int"):
        loadplan.metadata({"a": 3})  # type: ignore[dict-item]


# ------------------------------------------------------------------ targets
def test_targets_of_a_module_are_all_its_tensors() -> None:
    assert list(Targets(Model()).named()) == ["weight", "tied", "scale"]


def test_targets_say_what_they_are_not() -> None:
    with pytest.raises(TypeError, match="expected a mapping or a module"):
        Targets([torch.zeros(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a list of patterns"):
        Targets({}, required="w")
    with pytest.raises(TypeError, match="no `load_weights`"):
        loadplan.plan_loads(Targets({"w": torch.zeros(2)}), metas_of(w=(2,)))
    with pytest.raises(TypeError, match="target `w` is int"):
        loadplan.plan_loads(Targets({"w": 3}, load_weights=list), [])  # type: ignore[dict-item]


# ------------------------------------------------------------------ plans
def test_plan_entries_are_a_mapping() -> None:
    targets = simple(w=(2, 3))
    plan = loadplan.plan_loads(targets, metas_of(w=(2, 3), other=(4,)))
    assert list(plan.entries) == ["w", "other"] and len(plan.entries) == 2
    assert "w" in plan.entries and "z" not in plan.entries
    entry = plan.entries["w"]
    assert (entry.kind, entry.shape, entry.dtype, entry.nbytes) == ("direct", (2, 3), F32, 24)
    assert entry.reads == (((0, 2), (0, 3)),) and entry is plan.entries["w"]
    assert entry.writes[0].target == "w" and entry.writes[0].casts == ()
    assert plan.entries["other"].kind == "unneeded"
    for lookup in (plan.entries.__getitem__, plan.get_boxes, plan.get_dest):
        with pytest.raises(KeyError, match="`z` was not declared"):
            lookup("z")


def test_plan_boxes_and_destinations() -> None:
    live = {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=BF16)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if name == "w":
                live["w"].copy_(weight.narrow(0, 2, 2))
            elif name == "b":
                live["b"].copy_(weight)

    metas = metas_of(w=(4, 3), b=(3,), other=(4,))
    plan = loadplan.plan_loads(Targets(live, load_weights=load_weights), metas)
    assert plan.get_boxes("w") == (((2, 4), (0, 3)),)
    [(box, dest)] = plan.get_dest("w") or []
    full = torch.randn(4, 3)
    dest.copy_(full[tuple(slice(*pair) for pair in box)].reshape(dest.shape))
    assert torch.equal(live["w"], full[2:])
    assert plan.get_boxes("b") == (((0, 3),),) and plan.get_dest("b") is None
    assert plan.get_boxes("other") is None and plan.get_dest("other") == []
    assert plan.entries["b"].kind == "derived"
    assert plan.entries["b"].writes[0].casts == (F32, BF16)


def test_plan_lists_what_it_leaves_uncovered() -> None:
    plan = loadplan.plan_loads(simple(w=(2,), v=(3,)), metas_of(w=(2,)))
    assert {name: item.nbytes for name, item in plan.uncovered.items()} == {"v": 12}
    assert "`v`" in plan.report()


def test_plan_arguments() -> None:
    with pytest.raises(ValueError, match="overlaps is 'first'; expected one of fallback"):
        loadplan.plan_loads(simple(w=(2,)), [], overlaps="first")
    with pytest.raises(ValueError, match="no torch dtype"):
        loadplan.plan_loads(simple(w=(2,)), [ParamMeta("w", (2,), "float")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        loadplan.plan_loads(simple(w=(2,)), metas_of(w=(-2,)))


def test_a_module_is_planned_inside_a_session() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="needs an active reload"):
        loadplan.plan_loads(model, metas_of(weight=(2, 3)))
    with pytest.raises(RuntimeError, match="needs an active reload"):
        loadplan.plan_loads(Targets(model, restore=lambda layer: None), metas_of(weight=(2, 3)))
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas_of(weight=(2, 3)))
    loadplan.abort_reload(model)
    update(model, plan, {"weight": torch.ones(2, 3)}.items())
    assert torch.equal(model.tied, torch.ones(2, 3))


def test_a_loader_that_fails_is_told_with_its_own_words() -> None:
    targets = simple(w=(2,))

    def load_weights(weights: Weights) -> None:
        for name, _ in weights:
            {}[f"missing {name}"]

    with pytest.raises(
        RuntimeError, match="`v`.*KeyError: 'missing v' at test_package.py"
    ) as error:
        loadplan.plan_loads(Targets(targets.targets, load_weights), metas_of(v=(2,), w=(2,)))
    assert isinstance(error.value.__cause__, KeyError)
    assert "\n" not in str(error.value)


def test_a_read_that_torch_refuses_makes_a_fallback() -> None:
    live = {"w": torch.zeros(2), "v": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live[name].copy_(torch.from_numpy(weight.numpy() * 2) if name == "w" else weight)

    plan = loadplan.plan_loads(Targets(live, load_weights), metas_of(v=(2,), w=(2,)))
    assert plan.entries["w"].kind == "fallback" and plan.entries["v"].kind == "direct"
    assert "numpy" in plan.entries["w"].reason and "test_package.py" in plan.entries["w"].reason


def test_a_wrong_index_is_the_loaders_error_and_no_fallback() -> None:
    live = {"w": torch.zeros(2)}
    targets = Targets(
        live, lambda weights: [live["w"].copy_(w.narrow(0, 3, 2)) for _, w in weights]
    )
    with pytest.raises(RuntimeError, match="`w`"):
        loadplan.plan_loads(targets, metas_of(w=(4,)))


def test_threads_of_the_loader_take_part() -> None:
    live = {f"w{index}": torch.zeros(3) for index in range(8)}

    def load_weights(weights: Weights) -> None:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda item: live[item[0]].copy_(item[1]), list(weights)))

    plan = loadplan.plan_loads(Targets(live, load_weights), {n: ((3,), F32) for n in live})
    assert {entry.kind for entry in plan.entries.values()} == {"direct"}
    assert not any(tensor.any() for tensor in live.values())
    assert threading.Thread.start.__qualname__ == "Thread.start"


def test_what_a_loader_rebinds_is_put_back() -> None:
    class Rebinds(Model):
        loaded = False

        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.loaded = True
            self.extra = 3
            self.weight.note = "kept by the loader"

    model = Rebinds()
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas_of(weight=(2, 3)))
    assert not model.loaded and not hasattr(model, "extra") and not hasattr(model.weight, "note")
    assert "loaded" in plan.report() and "put back" in plan.report()


@pytest.mark.parametrize("rebind", ["data", "parameter"])
def test_a_loader_that_replaces_a_target_by_another_kind_is_refused(rebind: str) -> None:
    class Replaces(Model):
        def load_weights(self, weights: Weights) -> None:
            list(weights)
            if rebind == "data":
                self.weight.data = torch.zeros(3, 2)
            else:
                self.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))

    model = Replaces()
    before, place = model.weight, model.weight.data_ptr()
    loadplan.start_reload(model)
    with pytest.raises(RuntimeError, match="replaces the memory of target `weight`"):
        loadplan.plan_loads(model, metas_of(weight=(2, 3)))
    assert model.weight is before and model.weight.data_ptr() == place
    assert (model.weight == 7).all()


def test_a_loader_that_moves_a_target_within_its_memory_is_refused() -> None:
    rows = torch.full((3, 3), 7.0)
    live = {"w": rows[:2]}

    def load_weights(weights: Weights) -> None:
        list(weights)
        live["w"].data = rows[1:]

    with pytest.raises(RuntimeError, match="replaces the memory of target `w`"):
        loadplan.plan_loads(Targets(live, load_weights), metas_of(w=(2, 3)))
    assert live["w"].storage_offset() == 0


# ------------------------------------------------------------------ sessions
def test_states_of_a_session() -> None:
    targets = simple(w=(2,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    assert loadplan.state(targets).state == "idle"
    for call, words in (
        (lambda: loadplan.load_planned(targets, plan, []), "needs an active reload"),
        (lambda: loadplan.finish_reload(targets), "nothing to finish"),
        (lambda: loadplan.abort_reload(targets), "nothing to abort"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    loadplan.start_reload(targets)
    assert loadplan.state(targets).state == "active"
    with pytest.raises(RuntimeError, match="called before"):
        loadplan.start_reload(targets)
    loadplan.abort_reload(targets)
    assert loadplan.state(targets).state == "idle"


def test_modes_that_are_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = simple(w=(2,))
    with pytest.raises(TypeError, match="mode='layerwise' needs a module"):
        loadplan.start_reload(targets, mode="layerwise")
    with pytest.raises(ValueError, match="'fast'; expected one of direct, layerwise"):
        loadplan.start_reload(targets, mode="fast")
    with pytest.raises(TypeError, match="list of patterns"):
        loadplan.start_reload(targets, required="w")
    monkeypatch.setenv("LOADPLAN_RELOAD_MODE", "layerwise")
    with pytest.raises(TypeError, match="needs a module"):
        loadplan.start_reload(targets)


def test_a_receipt_tells_what_was_done() -> None:
    targets = simple(w=(2,), v=(3,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,), v=(3,)))
    receipt = update(targets, plan, {"v": torch.ones(3), "w": torch.ones(2)}.items())
    assert receipt.names == ("v", "w") and receipt.nbytes == 20 and receipt.seconds >= 0
    covered = {name: (item.nbytes, item.total_nbytes) for name, item in receipt.coverage.items()}
    assert covered == {"w": (8, 8), "v": (12, 12)}


BAD_ARRIVALS: dict[str, tuple[str, Tensor, str]] = {
    "shape": ("v", torch.ones(4), r"`v` arrived with shape \[4\], expected \[3\]"),
    "dtype": ("v", torch.ones(3, dtype=BF16), "`v` arrived as bfloat16, expected float32"),
    "undeclared": ("z", torch.ones(3), "`z` arrived but was not declared"),
    "twice": ("w", torch.zeros(2), "`w` arrived twice"),
    "sparse": ("v", torch.ones(3).to_sparse(), "`v` is sparse"),
    "meta": ("v", torch.ones(3, device="meta"), "`v` arrived on meta"),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["list", "iterator"])
@pytest.mark.parametrize("case", BAD_ARRIVALS)
def test_a_bad_arrival_fails_and_lists_what_landed(case: str, streamed: bool) -> None:
    name, tensor, words = BAD_ARRIVALS[case]
    targets = simple(w=(2,), v=(3,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,), v=(3,)))
    loadplan.start_reload(targets)
    weights = [("w", torch.ones(2)), (name, tensor)]
    with pytest.raises(ValueError, match=words) as error:
        loadplan.load_planned(targets, plan, iter(weights) if streamed else weights)
    assert "1 of 2 names had landed: `w`" in str(error.value)
    assert "C++" not in str(error.value) and "\n" not in str(error.value)
    live = targets.named()
    assert (live["w"] == 1).all() and (live["v"] == 7).all()
    state = loadplan.state(targets)
    assert state.state == "failed" and state.landed == ("w",) and list(state.undefined) == ["w"]
    with pytest.raises(RuntimeError, match="cannot go on after a failure"):
        loadplan.load_planned(targets, plan, weights)
    with pytest.raises(RuntimeError, match="cannot undo a failed update"):
        loadplan.abort_reload(targets)
    update(targets, plan, [("w", torch.ones(2)), ("v", torch.ones(3))])
    assert loadplan.state(targets).state == "idle" and loadplan.state(targets).undefined == {}


def test_a_plan_is_expected() -> None:
    targets = simple(w=(2,))
    loadplan.start_reload(targets)
    with pytest.raises(TypeError, match="the plan is Targets; expected what `plan_loads` or `load"):
        loadplan.load_planned(targets, targets, {})  # type: ignore[arg-type]
    assert loadplan.state(targets).state == "active"


def test_pairs_are_expected() -> None:
    targets = simple(w=(2,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    loadplan.start_reload(targets)
    for weights in ([torch.ones(3)], iter([torch.ones(3)]), [3], iter([("w",)])):
        with pytest.raises(TypeError, match="the weights give .*; expected pairs of a name and a"):
            loadplan.load_planned(targets, plan, weights)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`w` came with list; expected pairs"):
        loadplan.load_planned(targets, plan, [("w", [1.0, 2.0])])  # type: ignore[list-item]


def test_each_tensor_is_used_before_the_next_is_asked_for() -> None:
    targets = simple(w=(2,), v=(2,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,), v=(2,)))

    def send() -> Iterable[tuple[str, Tensor]]:
        buffer = torch.empty(2)
        for index, name in enumerate(("w", "v")):
            yield name, buffer.fill_(index)
            buffer.fill_(-1)

    update(targets, plan, send())
    live = targets.named()
    assert (live["w"] == 0).all() and (live["v"] == 1).all()


def test_finish_lists_what_is_missing() -> None:
    names = {f"w{index}": (1,) for index in range(12)}
    targets = simple(**names)
    plan = loadplan.plan_loads(targets, metas_of(**names))
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("w0", torch.ones(1))])
    with pytest.raises(RuntimeError, match="11 planned name.* `w1`, .* and 1 more") as error:
        loadplan.finish_reload(targets)
    assert "`w11`" not in str(error.value)
    loadplan.load_planned(targets, plan, [(name, torch.ones(1)) for name in names if name != "w0"])
    loadplan.finish_reload(targets)


def test_a_partial_update() -> None:
    targets = simple(w=(2,), v=(3,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,), v=(3,)))
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("w", torch.ones(2))])
    with pytest.raises(ValueError, match="`w` arrived but `partial` does not list it"):
        loadplan.finish_reload(targets, partial=["v"])
    assert loadplan.finish_reload(targets, partial=["w"]).names == ("w",)
    assert (targets.named()["v"] == 7).all()


def test_required_targets() -> None:
    targets = simple(w=(2,), v=(3,))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    weights = [("w", torch.ones(2))]
    for model, required in ((targets, ["v"]), (Targets(targets.targets, list, required=["?"]), [])):
        loadplan.start_reload(model, required=required)
        with pytest.raises(RuntimeError, match=r"`v` \(12 of 12 bytes\)"):
            loadplan.load_planned(model, plan, weights)
        loadplan.abort_reload(model)
    loadplan.start_reload(targets, required=["x*"])
    with pytest.raises(ValueError, match=r"`x\*` names no target"):
        loadplan.load_planned(targets, plan, weights)
    assert (targets.named()["w"] == 7).all()


@pytest.mark.parametrize("change", ["data", "entry", "gone", "shape"])
def test_a_target_that_moved_is_refused_by_name(change: str) -> None:
    live = {"w": torch.zeros(2), "v": torch.zeros(3)}
    targets = Targets(live, copy_by_name(live))
    plan = loadplan.plan_loads(targets, metas_of(w=(2,), v=(3,)))
    if change == "data":
        live["v"].data = torch.zeros(3)
    elif change == "entry":
        live["v"] = torch.zeros(3)
    elif change == "gone":
        del live["v"]
    else:
        live["v"].data = torch.zeros(4)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="`v` "):
        loadplan.load_planned(targets, plan, [("w", torch.ones(2))])
    assert not live["w"].any()


def test_another_placement_is_refused() -> None:
    token = ["here"]
    live = {"w": torch.zeros(2)}
    targets = Targets(live, copy_by_name(live), placement=lambda: token[0])
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    token[0] = "there"
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="placement has changed .* 'here' and is 'there'"):
        loadplan.load_planned(targets, plan, [("w", torch.ones(2))])
    assert not live["w"].any()


def test_an_engine_that_writes_through_destinations() -> None:
    live = {"w": torch.full((4,), 7.0)}

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            live["w"][:2].copy_(weight)
            live["w"][2:].zero_()

    targets = Targets(live, load_weights)
    loadplan.start_reload(targets)
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    [(_, dest)] = plan.get_dest("w") or []
    dest.copy_(torch.ones(2))
    plan.delivered("w")
    with pytest.raises(KeyError, match="`z` was not declared"):
        plan.delivered("z")
    assert loadplan.finish_reload(targets).names == ("w",)
    assert live["w"].tolist() == [1, 1, 0, 0]
    # An engine that has reported reports in every update.
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="did not arrive: `w`"):
        loadplan.finish_reload(targets)
    plan.delivered("w")
    loadplan.finish_reload(targets)


def test_an_engine_that_writes_through_destinations_and_reports_nothing() -> None:
    live = {"w": torch.full((4,), 7.0)}

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            live["w"][:2].copy_(weight)
            live["w"][2:].zero_()

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    [(_, dest)] = plan.get_dest("w") or []
    for _ in range(2):
        live["w"].fill_(9)
        loadplan.start_reload(targets)
        dest.copy_(torch.ones(2))
        loadplan.finish_reload(targets)
        assert live["w"].tolist() == [1, 1, 0, 0]


# ------------------------------------------------------------------ plans with fallbacks
def overlapping() -> tuple[dict[str, Tensor], Targets, list[str]]:
    """`a` and `b` write one slot, `c` another; every call is noted."""
    live = {"w": torch.zeros(2)}
    calls: list[str] = []

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if loadplan.state(targets).state == "active":
                calls.append(name)
            live["w"][1 if name == "c" else 0].copy_(weight.reshape(()))

    targets = Targets(live, load_weights)
    return live, targets, calls


@pytest.mark.parametrize("order", ["abc", "bac", "cba", "bca"])
def test_names_that_overlap_keep_their_order_of_arrival(order: str) -> None:
    live, targets, calls = overlapping()
    plan = loadplan.plan_loads(targets, metas_of(a=(1,), b=(1,), c=(1,)))
    assert [plan.entries[name].kind for name in "abc"] == ["fallback", "fallback", "direct"]
    [overlap] = plan.overlaps
    assert (overlap.first, overlap.second, overlap.target, overlap.nbytes) == ("a", "b", "w", 4)
    assert "one load_weights call with them" in plan.report()
    value = {"a": 1.0, "b": 2.0, "c": 3.0}
    loadplan.start_reload(targets)
    for name in order:
        loadplan.load_planned(targets, plan, iter([(name, torch.full((1,), value[name]))]))
    assert "".join(calls) == ("ab" if order.index("a") < order.index("b") else "ba")
    assert live["w"].tolist() == [max(value[n] for n in "ab" if n == calls[1]), 3.0]
    assert set(loadplan.finish_reload(targets).names) == set("abc")


@pytest.mark.parametrize("overlaps", ["last_wins", "error"])
def test_other_policies_for_overlaps(overlaps: str) -> None:
    live, targets, calls = overlapping()
    if overlaps == "error":
        with pytest.raises(ValueError, match="`a`.*`b`"):
            loadplan.plan_loads(targets, metas_of(a=(1,), b=(1,), c=(1,)), overlaps=overlaps)
        return
    plan = loadplan.plan_loads(targets, metas_of(a=(1,), b=(1,), c=(1,)), overlaps=overlaps)
    update(targets, plan, {"b": torch.ones(1), "c": torch.ones(1), "a": torch.zeros(1)}.items())
    assert live["w"].tolist() == [1, 1] and calls == []


def test_a_loader_that_raises_in_the_update_fails_it() -> None:
    live = {"w": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            if weight.sum().item() > 100:
                raise OverflowError("too much")
            live["w"].copy_(weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(w=(2,)))
    assert plan.entries["w"].kind == "fallback"
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="raised OverflowError: too much") as error:
        loadplan.load_planned(targets, plan, [("w", torch.full((2,), 99.0))])
    assert isinstance(error.value.__cause__, OverflowError)
    failed = loadplan.state(targets)
    assert failed.state == "failed" and failed.undefined == {}  # it raised before it wrote
    update(targets, plan, [("w", torch.ones(2))])
    assert live["w"].tolist() == [1, 1]


def test_the_fallback_call_comes_when_its_last_name_is_there() -> None:
    live = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(2)}
    calls: list[list[str]] = []

    def load_weights(weights: Weights) -> None:
        names = []
        for name, weight in weights:
            names.append(name)
            if name == "c":
                live[name].copy_(weight)
            else:
                live[name].fill_(weight.item())
        calls.append(names)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(a=(1,), c=(2,), b=(1,)))
    assert [plan.entries[name].kind for name in "abc"] == ["fallback", "fallback", "direct"]
    calls.clear()
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("b", torch.full((1,), 5.0))])
    assert calls == [] and live["b"].item() == 0
    loadplan.load_planned(targets, plan, [("c", torch.ones(2)), ("a", torch.ones(1))])
    assert calls == [["a", "b"]]
    loadplan.finish_reload(targets)
    assert [live[name].tolist() for name in "abc"] == [[1], [5], [1, 1]]

    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("c", torch.zeros(2))])
    loadplan.finish_reload(targets, partial=["c"])
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("a", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="all of them or none"):
        loadplan.finish_reload(targets, partial=["a"])
    loadplan.abort_reload(targets)


def test_names_that_the_fallback_call_would_overwrite_join_it() -> None:
    live = {"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        live["b"].zero_()  # at entry, whatever is loaded
        for name, weight in weights:
            if name == "a":
                live[name].fill_(weight.item())
            else:
                live[name].copy_(weight)
        live["d"].copy_(live["c"])  # finishing code

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(a=(1,), b=(2,), c=(2,)))
    assert [plan.entries[name].kind for name in "abc"] == ["fallback"] * 3
    update(targets, plan, {"c": torch.ones(2), "b": torch.ones(2), "a": torch.ones(1)}.items())
    assert [live[name].tolist() for name in "abcd"] == [[1], [1, 1], [1, 1], [1, 1]]


def test_a_fallback_call_that_touches_planned_bytes_is_an_error_before_it_does() -> None:
    live = {"a": torch.zeros(2), "b": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if name == "b":
                live["b"].copy_(weight)
            elif float(weight.sum()) > 5000:  # exploring sees no number as large
                live["b"].add_(1)  # seen by no trace
            else:
                live["a"].fill_(1)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(a=(2,), b=(2,)))
    update(targets, plan, {"b": torch.ones(2), "a": torch.ones(2)}.items())
    assert live["b"].tolist() == [1, 1]
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="touches bytes of `b`.*that the plan writes from `b`"):
        loadplan.load_planned(targets, plan, [("b", torch.ones(2)), ("a", torch.full((2,), 9e3))])
    assert loadplan.state(targets).state == "failed" and live["b"].tolist() == [1, 1]


def test_a_name_held_for_a_fallback_goes_with_it() -> None:
    live = {"pair": torch.zeros(4), "c": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        held: dict[str, Tensor] = {}
        for name, weight in weights:
            if name == "c":
                live["c"].copy_(weight)
                continue
            held[name] = weight
            if len(held) == 2:
                assert held["b"].max().item() < 100
                live["pair"].copy_(torch.cat([held["a"], held["b"]]))

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas_of(a=(2,), b=(2,), c=(2,)))
    assert [plan.entries[name].kind for name in "abc"] == ["fallback", "fallback", "direct"]
    update(targets, plan, {"c": torch.ones(2), "b": torch.ones(2), "a": torch.zeros(2)}.items())
    assert live["pair"].tolist() == [0, 0, 1, 1]


def test_live_bytes_that_steered_the_trace_are_premises() -> None:
    live = {"w": torch.zeros(2, 2), "emap": torch.tensor([1, 0])}
    outside = torch.tensor([True, False])

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live["w"][live["emap"][int(name)].item()].copy_(weight)
            if outside.any().item():
                continue

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(
        targets, [loadplan.ParamMeta(str(i), (2,), torch.float32) for i in (0, 1)]
    )
    weights = {"0": torch.zeros(2), "1": torch.ones(2)}
    update(targets, plan, weights.items())
    assert live["w"].tolist() == [[1, 1], [0, 0]]
    for changed, words in ((live["emap"], "`emap`"), (outside, r"a tensor of shape \[2\]")):
        kept = changed.clone()
        changed.copy_(changed.flip(0))
        loadplan.start_reload(targets)
        with pytest.raises(RuntimeError, match=words + ".*has changed since; plan again"):
            loadplan.load_planned(targets, plan, weights.items())
        loadplan.abort_reload(targets)
        changed.copy_(kept)
    update(targets, plan, weights.items())


def test_a_kept_trace_tensor_is_an_error_that_names_it() -> None:
    live = {"w": torch.zeros(2)}
    kept: list[Tensor] = []

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            kept.append(weight)

    with pytest.raises(RuntimeError, match="the loader kept the tensor of `w`"):
        loadplan.plan_loads(Targets(live, load_weights), metas_of(w=(2,)))


# ------------------------------------------------------------------ trace, memory, import
def test_trace_by_hand() -> None:
    live = {"w": torch.zeros(2)}
    with loadplan.trace(live, metas_of(w=(4,), v=(2,))) as one:
        weight = one.tensor("w")
        live["w"].copy_(weight[2:])
        assert one.records == ("target `w` <- `w` [2] float32",)
        with pytest.raises(KeyError, match="`z` was not declared"):
            one.tensor("z")
        with pytest.raises(RuntimeError, match="no result"):
            one.kind("w")
    assert one.kind("w") == "direct" and one.kind("v") == "unneeded" and one.reason("w") == ""
    assert not live["w"].any() and weight.shape == (4,)
    with pytest.raises(RuntimeError, match="only inside"):
        one.tensor("w")
    with pytest.raises(RuntimeError, match="has been used"), one:
        pass


def test_a_trace_that_raises_leaves_no_trace() -> None:
    live = {"w": torch.zeros(2)}
    with pytest.raises(ZeroDivisionError), loadplan.trace(live, metas_of(w=(2,))):
        raise ZeroDivisionError
    live["w"].copy_(torch.ones(2))
    assert live["w"].sum().item() == 2


def test_sessions_and_plans_do_not_keep_a_model_alive() -> None:
    model = Model()
    model.weight.weight_loader = model.load_weights  # leads from the parameter to the module
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas_of(weight=(2, 3)))
    loadplan.load_planned(model, plan, [("weight", torch.ones(2, 3))])
    loadplan.finish_reload(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="no longer exists"):
        plan.delivered("weight")


def test_check_plannable_names_the_module() -> None:
    class Config:
        class moe_parallel_config:
            enable_eplb = True

    model = Model()
    model.experts = nn.Module()
    model.experts.moe_config = Config
    with pytest.raises(RuntimeError, match="`experts` rebalances its experts"):
        loadplan.check_plannable(model)
    loadplan.check_plannable(Targets(model, placement=lambda: 0))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(loadplan.__file__).parents[1])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_leaves_the_accelerator_alone() -> None:
    code = (
        "import torch; before = torch.accelerator.current_accelerator()\n"
        "import loadplan, importlib; importlib.reload(loadplan)\n"
        "assert torch.accelerator.current_accelerator() == before\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_library_that_is_missing_is_told_in_one_sentence() -> None:
    done = run_python("import loadplan", LOADPLAN_LIBRARY="nowhere/libloadplan.so")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: `nowhere/libloadplan.so` does not exist; build it")


def test_a_library_for_another_torch_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "libloadplan.so").write_bytes(b"never loaded")
    (tmp_path / "_built_for.py").write_text('TORCH = "2.11.0"\n')
    done = run_python("import loadplan", LOADPLAN_LIBRARY=str(tmp_path / "libloadplan.so"))
    last = done.stderr.strip().splitlines()[-1]
    assert "was built for torch 2.11 and the installed torch is" in last
