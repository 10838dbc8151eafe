"""Shards in one process: who holds what, what is refused, and loading them by plan."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import loadplan
from loadplan._dtensor import boxes_of_dtensor

F32, BF16 = torch.float32, torch.bfloat16


def targets_of(live: dict[str, Tensor], load) -> loadplan.Targets:
    return loadplan.Targets(live, load_weights=lambda weights: load(live, weights))


def load_by_shards(live, load, metas, shards) -> None:
    model = targets_of(live, load)
    loadplan.start_reload(model)
    try:
        plan = loadplan.plan_loads(model, metas)
        loadplan.load_shards(model, plan, shards)
        loadplan.finish_reload(model)
    finally:
        state = loadplan.state(model).state
        if state == "active":
            loadplan.abort_reload(model)


def copy_rows(live: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    for name, weight in weights:
        live[name].copy_(weight)


# D1, D2: what is needed lies on two ranks, by columns or by rows.
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_from_two_ranks(dim: int) -> None:
    full = torch.arange(32.0).reshape(4, 8)
    boxes = (
        [((0, 2), (0, 8)), ((2, 4), (0, 8))] if dim == 0 else [((0, 4), (0, 4)), ((0, 4), (4, 8))]
    )
    shards = [(r, box, full.chunk(2, dim)[r].clone()) for r, box in enumerate(boxes)]
    live = {"w": torch.zeros(4, 8)}
    load_by_shards(live, copy_rows, {"w": ((4, 8), F32)}, {"w": shards})
    assert torch.equal(live["w"], full)


def test_need_across_two_row_blocks() -> None:
    full = torch.arange(32.0).reshape(8, 4)
    shards = [(0, ((0, 4), (0, 4)), full[:4].clone()), (1, ((4, 8), (0, 4)), full[4:].clone())]
    live = {"w": torch.zeros(4, 4)}

    def load(live, weights):
        for _, weight in weights:
            live["w"].copy_(weight[2:6])

    load_by_shards(live, load, {"w": ((8, 4), F32)}, {"w": shards})
    assert torch.equal(live["w"], full[2:6])


def without_memory(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


FULL = torch.arange(16.0).reshape(4, 4)
REFUSED = {
    # D7
    "gap": ([(0, ((0, 2), (0, 4)), FULL[:2])], r"`w` is \(2, 4\) float32 on rank 0 and \(4, 4\)"),
    "gap inside": (
        [(0, ((0, 1), (0, 4)), FULL[:1]), (1, ((2, 4), (0, 4)), FULL[2:])],
        r"`w`: the shards hold 12 of 16 elements; no rank holds \[1:2, 0:4\]",
    ),
    "overlap": (
        [(0, ((0, 3), (0, 4)), FULL[:3]), (1, ((2, 4), (0, 4)), -FULL[2:])],
        r"`w`: ranks 0 and 1 both hold \[2:3, 0:4\], with different bytes",
    ),
    "replicas": (
        [(0, ((0, 4), (0, 4)), FULL), (1, ((0, 4), (0, 4)), FULL.clone().fill_diagonal_(-1))],
        r"`w`: ranks 0 and 1 both hold \[0:4, 0:4\], with different bytes",
    ),
    "overlap on one rank": (
        [(0, ((0, 3), (0, 4)), FULL[:3]), (0, ((2, 4), (0, 4)), FULL[:2])],
        r"`w`: ranks 0 and 0 both hold \[2:3, 0:4\], with different bytes",
    ),
    "dtype": (
        [(0, ((0, 2), (0, 4)), FULL[:2]), (1, ((2, 4), (0, 4)), FULL[2:].to(BF16))],
        r"`w`: the shard \(\(2, 4\), \(0, 4\)\) of rank 1 is torch.bfloat16",
    ),
    "all of another dtype": (
        [(0, ((0, 4), (0, 4)), FULL.to(BF16))],
        r"`w` is \(4, 4\) bfloat16 on rank 0 and \(4, 4\) float32",
    ),
    "shape": (
        [(0, ((0, 2), (0, 4)), FULL[:2]), (1, ((2, 4), (0, 4)), FULL)],
        r"the shard \[2:4, 0:4\] of rank 1: `w` arrived with shape \[4, 4\], expected \[2, 4\]",
    ),
    "padded": (
        [(0, ((0, 3), (0, 4)), FULL[:3]), (1, ((3, 4), (0, 4)), FULL[:3])],
        r"the shard \[3:4, 0:4\] of rank 1: `w` arrived with shape",
    ),
    "rank of the box": ([(0, ((0, 4),), FULL)], r"shape|dimensions|box"),
    "twice": (
        [(0, ((0, 4), (0, 4)), FULL), (0, ((0, 4), (0, 4)), FULL)],
        r"rank 0 holds the shard \[0:4, 0:4\] twice",
    ),
    "not here": (
        [(0, ((0, 2), (0, 4)), FULL[:2]), (1, ((2, 4), (0, 4)), None)],
        r"the shard \[2:4, 0:4\] of `w` on rank 1 came without its tensor",
    ),
    "no shards": ([], r"`w` has no shards"),
    "replicas that are one tensor and its transpose": (
        [(0, ((0, 4), (0, 4)), FULL), (1, ((0, 4), (0, 4)), FULL.t())],
        r"`w`: ranks 0 and 1 both hold \[0:4, 0:4\], with different bytes",
    ),
    "no memory": (
        [(0, ((0, 4), (0, 4)), without_memory(FULL))],
        r"`w` has lost its memory: its storage was made smaller",
    ),
    "rank too large": (
        [(0, ((0, 4), (0, 4)), FULL), (1 << 40, ((0, 4), (0, 4)), FULL)],
        r"`w`: rank \d+ cannot hold \[0:4, 0:4\]; ranks are 0 to 1048575",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_a_byte_is_written(case: str) -> None:
    shards, words = REFUSED[case]
    live = {"w": torch.full((4, 4), 7.0), "v": torch.full((4,), 7.0)}
    v = [(0, ((0, 4),), torch.ones(4))]
    metas = {"v": ((4,), F32), "w": ((4, 4), F32)}
    with pytest.raises((ValueError, RuntimeError), match=words):
        load_by_shards(live, copy_rows, metas, {"v": v, "w": shards})
    assert all(bool((tensor == 7).all()) for tensor in live.values())


@pytest.mark.parametrize(
    "piece",
    [
        (0, ((0, 4.0), (0, 4)), FULL),
        (0, (0, 4), FULL),
        (0, ((0, 4), (0, 4)), [1, 2]),
        (0, ((0, 4), (0, 4))),
        ("0", ((0, 4), (0, 4)), FULL),
        (1 << 63, ((0, 4), (0, 4)), FULL),
        (0, ((0, 1 << 63), (0, 4)), FULL),
        FULL,
    ],
)
def test_what_is_no_piece(piece: object) -> None:
    with pytest.raises(TypeError, match=r"is no shard of `w`; expected \(rank, box, tensor\)"):
        loadplan.Shards({"w": [piece]})


def test_an_error_about_a_piece_shows_no_values() -> None:
    with pytest.raises(TypeError, match=r"^\(0, \(0, 4\), a tensor of shape \[\d+, \d+\]\) is no"):
        loadplan.Shards({"w": [(0, (0, 4), FULL)]})


def test_a_schedule_is_expected() -> None:
    shards = loadplan.Shards({"w": [(0, ((0, 4), (0, 4)), FULL)]})
    with pytest.raises(TypeError, match="the schedule is Shards; expected what `schedule_shards`"):
        loadplan.send_shards(shards, shards)  # type: ignore[arg-type]


def test_more_bytes_than_can_be_counted() -> None:
    metas = {"w": ((1 << 40, 1 << 40), F32)}
    box = ((0, 1 << 40), (0, 1 << 40))
    with pytest.raises(ValueError, match=r"`w` has a shape whose bytes cannot be counted: \[1099"):
        loadplan.Shards({"w": [(0, box, None)]}, metas)


def test_metas_in_any_form() -> None:
    pieces = {"w": [(0, ((0, 4), (0, 4)), FULL), (1, ((0, 4), (0, 4)), None)]}
    for metas in ({"w": FULL}, {"w": ((4, 4), F32)}, [loadplan.ParamMeta("w", (4, 4), F32)]):
        loadplan.Shards(pieces, metas)


def test_ranks_far_apart() -> None:
    """They are labels here: no table of all pairs of them is made."""
    shards = [(900_000, ((0, 2), (0, 4)), FULL[:2]), (1_000_000, ((2, 4), (0, 4)), FULL[2:])]
    live = {"w": torch.zeros(4, 4)}
    load_by_shards(live, copy_rows, {"w": ((4, 4), F32)}, {"w": shards})
    assert torch.equal(live["w"], FULL)


def test_tensors_are_read_when_they_are_loaded() -> None:
    """In place, in other memory, through a conjugate view."""
    parameter = torch.nn.Parameter(torch.randn(4))
    tensor = torch.randn(4, dtype=torch.complex64)
    shards = loadplan.Shards(
        {"p": [(0, ((0, 4),), parameter)], "c": [(0, ((0, 4),), tensor.conj())]}
    )
    live = {"p": torch.zeros(4), "c": torch.zeros(4, dtype=torch.complex64)}
    model = targets_of(live, copy_rows)
    plan = None
    for _ in range(3):
        parameter.data = parameter.data + 1
        tensor.mul_(2)
        loadplan.start_reload(model)
        plan = plan or loadplan.plan_loads(model, {"p": parameter, "c": tensor})
        loadplan.load_shards(model, plan, shards)
        loadplan.finish_reload(model)
        assert torch.equal(live["p"], parameter)
        assert torch.equal(live["c"], tensor.conj().resolve_conj())
    parameter.data = torch.zeros(5)
    loadplan.start_reload(model)
    with pytest.raises(ValueError, match=r"`p` arrived with shape \[5\], expected \[4\]"):
        loadplan.load_shards(model, plan, shards)


@pytest.mark.parametrize("atomic", [False, True])
def test_shards_in_the_memory_that_is_written(atomic: bool) -> None:
    """A trainer that shares its memory with the engine: rows change places."""
    live = {"w": FULL.clone()}
    rows = [(0, ((0, 2), (0, 4)), live["w"][2:]), (1, ((2, 4), (0, 4)), live["w"][:2])]
    shards = loadplan.Shards({"w": rows})
    model = targets_of(live, copy_rows)
    for update in range(2):
        loadplan.start_reload(model, atomic=atomic)
        plan = loadplan.plan_loads(model, {"w": FULL})
        loadplan.load_shards(model, plan, shards)
        loadplan.finish_reload(model)
        wanted = FULL if update else torch.cat([FULL[2:], FULL[:2]])
        assert torch.equal(live["w"], wanted)


def test_shards_that_leave_the_memory_that_is_written() -> None:
    """What was copied for one update is not read in the next."""
    live = {"w": FULL.clone()}
    parameter = torch.nn.Parameter(live["w"], requires_grad=False)
    shards = loadplan.Shards({"w": [(0, ((0, 4), (0, 4)), parameter)]})
    model = targets_of(live, copy_rows)
    plan = loadplan.plan_loads(model, {"w": FULL})
    for moved in (live["w"], FULL + 1):
        parameter.data = moved
        loadplan.start_reload(model)
        loadplan.load_shards(model, plan, shards)
        loadplan.finish_reload(model)
        assert torch.equal(live["w"], moved)


def test_shards_in_memory_that_several_targets_show() -> None:
    """Storages of their own over one buffer, as engines make them of one allocation."""
    buffer = bytearray(64)
    live = {"w": torch.frombuffer(buffer, dtype=F32).view(4, 4)}
    live["w"].copy_(FULL)
    live["tail of row 0"] = torch.frombuffer(buffer, dtype=F32, count=2, offset=8)
    rows = [(0, ((0, 2), (0, 4)), live["w"][2:]), (1, ((2, 4), (0, 4)), live["w"][:2])]
    load_by_shards(live, copy_rows, {"w": FULL}, {"w": rows})
    assert torch.equal(live["w"], torch.cat([FULL[2:], FULL[:2]]))


def test_fused_tensors_of_a_trainer() -> None:
    """Megatron's: gate and up in one tensor on each rank, q, k and v in one by KV head."""
    tp, groups, heads, dim, hidden, width = 2, 4, 2, 3, 5, 8
    full = {
        "q": torch.randn(groups * heads * dim, hidden),
        "k": torch.randn(groups * dim, hidden),
        "v": torch.randn(groups * dim, hidden),
        "gate": torch.randn(width, hidden),
        "up": torch.randn(width, hidden),
        "embed": torch.randn(7, hidden),
    }
    pieces: dict[str, list] = {name: [] for name in full}
    whole = (0, hidden)
    for rank in range(tp):
        mine = width // tp
        fc1 = torch.cat([full[name][rank * mine : (rank + 1) * mine] for name in ("gate", "up")])
        for name, part in zip(("gate", "up"), fc1.chunk(2), strict=True):
            pieces[name].append((rank, ((rank * mine, (rank + 1) * mine), whole), part))
        here = range(rank * groups // tp, (rank + 1) * groups // tp)
        rows = {"q": heads * dim, "k": dim, "v": dim}
        qkv = torch.cat(
            [full[n][g * size : (g + 1) * size] for g in here for n, size in rows.items()]
        )
        at = 0
        for group in here:
            for name, size in rows.items():
                box = ((group * size, (group + 1) * size), whole)
                pieces[name].append((rank, box, qkv[at : at + size]))
                at += size
        padded = torch.cat([full["embed"], torch.full((1, hidden), float("nan"))]).chunk(tp)[rank]
        stop = min(4 * rank + 4, 7)
        pieces["embed"].append((rank, ((4 * rank, stop), whole), padded[: stop - 4 * rank]))
    live = {name: torch.zeros_like(weight) for name, weight in full.items()}
    load_by_shards(live, copy_rows, full, pieces)
    assert all(torch.equal(live[name], weight) for name, weight in full.items())


def test_buffers_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module[1].register_buffer("table", torch.zeros(2), persistent=False)
    full = module.state_dict()
    live = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    assert "1.running_mean" in live
    with pytest.raises(ValueError, match=r"`1\.\w+` and no rank holds"):
        load_by_shards(live, copy_rows, full, loadplan.Shards.of_module(module))
    load_by_shards(live, copy_rows, full, loadplan.Shards.of_module(module, buffers=True))
    assert all(torch.equal(live[name], tensor) for name, tensor in full.items())


def test_undeclared_name() -> None:
    live = {"w": torch.zeros(4, 4)}
    shards = {name: [(0, ((0, 4), (0, 4)), FULL)] for name in ("w", "x")}
    with pytest.raises(ValueError, match="`x` has shards but was not declared"):
        load_by_shards(live, copy_rows, {"w": ((4, 4), F32)}, shards)


def test_name_without_shards() -> None:
    live = {"w": torch.zeros(4, 4), "x": torch.zeros(4, 4)}
    metas = {"w": ((4, 4), F32), "x": ((4, 4), F32)}
    with pytest.raises(ValueError, match=r"needs \[0:4, 0:4\] of `x` and no rank holds"):
        load_by_shards(live, copy_rows, metas, {"w": [(0, ((0, 4), (0, 4)), FULL)]})


def test_names_without_shards_are_left_to_other_calls() -> None:
    live = {name: torch.zeros(4) for name in ("a", "b", "c")}
    model = targets_of(live, copy_rows)
    shards = {
        name: [(0, ((0, 4),), torch.full((4,), value))] for name, value in (("a", 1.0), ("b", 2.0))
    }
    metas = {name: ((4,), F32) for name in live}
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas)
    loadplan.load_shards(model, plan, {"a": shards["a"]}, missing="skip")
    loadplan.load_shards(model, plan, {"b": shards["b"]}, missing="skip")
    with pytest.raises(RuntimeError, match="`c`"):
        loadplan.finish_reload(model)
    loadplan.load_planned(model, plan, [("c", torch.full((4,), 3.0))])
    loadplan.finish_reload(model)
    assert [tensor[0].item() for tensor in live.values()] == [1, 2, 3]
    # What some shards of are there is still needed whole.
    loadplan.start_reload(model)
    with pytest.raises(ValueError, match=r"`a` is \(2,\) float32 on rank 0 and \(4,\) float32"):
        part = {"a": [(0, ((0, 2),), torch.ones(2))]}
        loadplan.load_shards(model, plan, part, missing="skip")
    with pytest.raises(ValueError, match="missing='no'; expected 'error' or 'skip'"):
        loadplan.load_shards(model, plan, shards, missing="no")


# C1, C2: experts of two ranks' shards into the fused tensors of TP rank 1.
def test_experts() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"experts.{e}.{name}.weight": torch.randn(shape, generator=generator)
        for e in range(2)
        for name, shape in (("gate_proj", (8, 4)), ("up_proj", (8, 4)), ("down_proj", (4, 8)))
    }

    def load(live, arrived):
        for name, weight in arrived:
            _, expert, kind, _ = name.split(".")
            if kind == "down_proj":
                live["w2"][int(expert)].copy_(weight.narrow(1, 4, 4))
            else:
                half = 4 if kind == "up_proj" else 0
                live["w13"].unbind()[int(expert)].narrow(0, half, 4).copy_(weight.narrow(0, 4, 4))

    live = {"w13": torch.zeros(2, 8, 4), "w2": torch.zeros(2, 4, 4)}
    wanted = {name: tensor.clone() for name, tensor in live.items()}
    load(wanted, weights.items())
    shards = {
        name: [
            (
                rank,
                tuple(
                    (3 * rank if d == 0 else 0, (3, w.shape[0])[rank] if d == 0 else extent)
                    for d, extent in enumerate(w.shape)
                ),
                part.clone(),
            )
            for rank, part in enumerate(w.split([3, w.shape[0] - 3]))
        ]
        for name, w in weights.items()
    }
    load_by_shards(live, load, weights, shards)
    assert torch.equal(live["w13"], wanted["w13"])
    assert torch.equal(live["w2"], wanted["w2"])


def random_cuts(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """A grid of boxes with random cuts in each dimension."""
    along = []
    for extent in shape:
        cuts = sorted({0, extent, *(rng.randint(0, extent) for _ in range(rng.randint(0, 2)))})
        along.append(list(itertools.pairwise(cuts)) or [(0, 0)])
    return list(itertools.product(*along))


def test_random_shards_land_as_the_loader_loads() -> None:
    """Any cover of any kind of name: direct, cast, derived, fallback, read twice, empty."""
    seed = int(os.environ.get("LOADPLAN_TEST_SEED", random.randrange(1 << 30)))
    print(f"LOADPLAN_TEST_SEED={seed}")
    rng = random.Random(seed)
    for _ in range(25):
        rows, columns = rng.randint(1, 7), rng.randint(1, 7)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "plain": ((rows, columns), BF16),
            "cast": ((rows, columns), BF16),
            "derived": ((columns,), F32),
            "a": ((rows, 3), F32),
            "b": ((rows, 2), F32),
            "value": ((rows,), F32),
            "scalar": ((), F32),
            "empty": ((0, columns), F32),
            "ignored": ((rows,), F32),
        }
        start = rng.randint(0, rows - 1)

        def load(live, weights, start=start):
            held = {}
            for name, weight in weights:
                if name == "plain":
                    live["plain"].copy_(weight[start:].t())
                    live["twice"].copy_(weight[start])
                elif name == "cast":
                    live["cast"].copy_(weight)
                elif name == "derived":
                    live["derived"].copy_(-weight.exp())
                elif name in "ab":
                    held[name] = weight
                    if len(held) == 2:
                        live["ab"].copy_(torch.cat([held["a"], held["b"]], 1) * 2)
                elif name == "value":
                    live["value"].copy_(weight if weight.sum() > 0 else -weight)
                elif name == "scalar":
                    live["scalar"].copy_(weight)
                elif name == "empty":
                    live["empty"].copy_(weight)

        live = {
            "plain": torch.zeros(columns, rows - start, dtype=BF16),
            "twice": torch.zeros(columns, dtype=BF16),
            "cast": torch.zeros(rows, columns),
            "derived": torch.zeros(columns),
            "ab": torch.zeros(rows, 5),
            "value": torch.zeros(rows),
            "scalar": torch.zeros(()),
            "empty": torch.zeros(0, columns),
        }
        weights = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in shapes.items()}
        wanted = {name: tensor.clone() for name, tensor in live.items()}
        load(wanted, weights.items())
        shards = {}
        for name, weight in weights.items():
            pieces = []
            for box in random_cuts(rng, tuple(weight.shape)):
                part = weight[tuple(slice(*interval) for interval in box)]
                if rng.random() < 0.5 and part.dim() == 2:  # any strides
                    part = part.t().contiguous().t()
                for rank in rng.sample(range(4), rng.randint(1, 2)):
                    pieces.append((rank, box, part.clone()))
            for rank in range(4, 4 + rng.randint(0, 2)):  # they overlap the others, and each other
                box = tuple(sorted(rng.choices(range(extent + 1), k=2)) for extent in weight.shape)
                part = weight[tuple(slice(*interval) for interval in box)]
                pieces.append((rank, box, part.clone()))
            shards[name] = pieces
        declared = [loadplan.ParamMeta(name, *of_name) for name, of_name in shapes.items()]
        load_by_shards(live, load, shapes, loadplan.Shards(shards, declared))
        for name, tensor in live.items():
            assert torch.equal(tensor, wanted[name]), (seed, name)


@pytest.mark.parametrize("transport", ["shards", "files"])
def test_names_that_overlap_go_through_the_loader_in_order(
    transport: str, tmp_path: pathlib.Path
) -> None:
    """Which of them has its last byte first says nothing: parts come in an order of their own."""
    weights = {"z": torch.ones(64, 64), "m": torch.full((64, 64), 2.0), "a": torch.full((2,), 3.0)}

    def load(live: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "a":
                live["w"][0, :2].copy_(weight)
            else:
                live["w"].copy_(weight)

    for order in (["z", "m", "a"], ["a", "m", "z"], ["m", "a", "z"]):
        live = {"w": torch.zeros(64, 64)}
        wanted = {"w": torch.zeros(64, 64)}
        load(wanted, [(name, weights[name]) for name in order])
        model = targets_of(live, load)
        plan = loadplan.plan_loads(model, {name: weights[name] for name in order})
        assert {plan.entries[name].kind for name in order} == {"fallback"}
        loadplan.start_reload(model)
        if transport == "shards":
            pieces = {
                name: [(0, tuple((0, extent) for extent in w.shape), w)]
                for name, w in weights.items()
            }
            loadplan.load_shards(model, plan, pieces)
        else:
            paths = [str(tmp_path / f"{name}.safetensors") for name in order]
            for name, path in zip(order, paths, strict=True):
                save_file({name: weights[name]}, path)
            loadplan.load_files(model, plan, paths, progress=False, max_staging_bytes=1024)
        loadplan.finish_reload(model)
        assert torch.equal(live["w"], wanted["w"]), order


MESHES = {
    "rows": ((4,), ("S0",)),
    "columns": ((4,), ("S1",)),
    "replicas": ((2, 2), ("R", "S0")),
    "grid": ((2, 2), ("S0", "S1")),
    "nested": ((2, 3), ("S0", "S0")),
    "fsdp of tp": ((2, 2), ("strided2", "S0")),
    "strided alone": ((3,), ("strided2",)),
    "whole": ((4,), ("R",)),
}


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (1, 3), (13, 4)])
def test_boxes_are_what_dtensor_holds(case: str, shape: tuple[int, int]) -> None:
    """Against the local tensors of DTensor itself, rank by rank, without communication."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh_shape, texts = MESHES[case]
    placements = [
        Replicate()
        if text == "R"
        else _StridedShard(0, split_factor=int(text[-1]))
        if text.startswith("strided")
        else Shard(int(text[1]))
        for text in texts
    ]
    world = torch.Size(mesh_shape).numel()
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape))
            local = full
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    parts, _ = placement._split_tensor(
                        local, mesh_shape[dim], with_padding=False, contiguous=True
                    )
                    local = parts[mesh.get_coordinate()[dim]]
            tensor = DTensor.from_local(
                local,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=(shape[1], 1),
            )
            boxes = boxes_of_dtensor("w", tensor)
            assert set(boxes) == set(range(world))
            seen = torch.full_like(local, -1)
            for box, where in boxes[rank]:
                seen[where] = full[tuple(slice(*interval) for interval in box)]
            assert torch.equal(seen, local)
            loadplan.Shards.of_tensors({"w": tensor})  # an exact cover
        finally:
            dist.destroy_process_group()


def test_partial_values_are_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="`w` is .*a partial value is on no rank"):
            loadplan.Shards.of_tensors({"w": tensor})
    finally:
        dist.destroy_process_group()


def test_placements_and_local_tensors_that_are_not_what_they_seem() -> None:
    """A class of its own may cut otherwise; a padded tensor holds what is no data."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Interleaved(Shard):
        pass

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        options = {"run_check": False, "shape": torch.Size((5, 2)), "stride": (2, 1)}
        tensor = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], **options)
        with pytest.raises(ValueError, match=r"`w` of shape \(5, 2\) holds \(3, 2\) on this rank"):
            loadplan.Shards.of_tensors({"w": tensor})
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], **options)
        loadplan.Shards.of_tensors({"w": tensor})
        tensor._spec.placements = (Interleaved(0),)
        with pytest.raises(ValueError, match="`w` is placed by .*, which is not known here"):
            loadplan.Shards.of_tensors({"w": tensor})
    finally:
        dist.destroy_process_group()


def pieces(layout: loadplan.ParallelLayout, name: str, *shape: int):
    return layout.pieces(loadplan.ParamMeta(name, shape, F32))


def test_layout_of_tensor_and_data_parallel_ranks() -> None:
    layout = loadplan.ParallelLayout(tp=2, dp=2, tp_dims={"q_proj": 0, "o_proj": 1})
    assert pieces(layout, "q_proj", 4, 6) == [
        (0, ((0, 2), (0, 6))),
        (1, ((2, 4), (0, 6))),
        (2, ((0, 2), (0, 6))),
        (3, ((2, 4), (0, 6))),
    ]
    assert pieces(layout, "o_proj", 4, 6)[1] == (1, ((0, 4), (3, 6)))
    assert pieces(layout, "norm", 4) == [(rank, ((0, 4),)) for rank in range(4)]
    assert layout.num_ranks == 4


def test_layout_of_experts() -> None:
    layout = loadplan.ParallelLayout(
        tp=2, dp=4, ep=4, etp=1, tp_dims={"up": 0}, expert=r"experts\.(\d+)\.", num_experts=8
    )
    # Two experts to each of four groups; eight ranks are two replicas.
    assert [rank for rank, _ in pieces(layout, "experts.5.up", 4, 4)] == [2, 6]
    assert pieces(layout, "experts.5.up", 4, 4)[0][1] == ((0, 4), (0, 4))
    cut = loadplan.ParallelLayout(
        tp=2, dp=4, ep=4, etp=2, tp_dims={"up": 0}, expert=r"experts\.(\d+)\.", num_experts=8
    )
    assert pieces(cut, "experts.5.up", 4, 4) == [(4, ((0, 2), (0, 4))), (5, ((2, 4), (0, 4)))]


def test_layout_of_stages() -> None:
    layout = loadplan.ParallelLayout(
        tp=2, pp=2, layer=r"layers\.(\d+)\.", num_layers=4, stages={"embed": 0, "head": 1}
    )
    assert [rank for rank, _ in pieces(layout, "layers.1.w", 4)] == [0, 1]
    assert [rank for rank, _ in pieces(layout, "layers.2.w", 4)] == [2, 3]
    assert [rank for rank, _ in pieces(layout, "head", 4)] == [2, 3]
    with pytest.raises(ValueError, match="`norm` belongs to no layer"):
        pieces(layout, "norm", 4)
    with pytest.raises(ValueError, match="layer 7 of 4"):
        pieces(layout, "layers.7.w", 4)


def test_layout_of_interleaved_stages() -> None:
    layout = loadplan.ParallelLayout(pp=2, vpp=2, layer=r"layers\.(\d+)\.", num_layers=8)
    stages = [pieces(layout, f"layers.{i}.w", 4)[0][0] for i in range(8)]
    assert stages == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="pp=2 times vpp=3 needs `layer` and a `num_layers`"):
        loadplan.ParallelLayout(pp=2, vpp=3, layer="l", num_layers=8)


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="`q` has 5 elements, which 2 ranks cannot share evenly"):
        pieces(loadplan.ParallelLayout(tp=2, tp_dims={"q": 0}), "q", 5)
    stages = loadplan.ParallelLayout(pp=2, layer=r"layers\.(\d+)", num_layers=2)
    with pytest.raises(ValueError, match=r"`layers.2.w` is in layer 2 of 2"):
        pieces(stages, "layers.2.w", 4)
    with pytest.raises(ValueError, match="`norm` belongs to no layer; give its stage"):
        pieces(stages, "norm", 4)
    with pytest.raises(ValueError, match="ep=3 times etp=1 does not divide"):
        loadplan.ParallelLayout(tp=2, ep=3)
    with pytest.raises(ValueError, match="7 experts cannot be dealt evenly to ep=2"):
        loadplan.ParallelLayout(tp=2, ep=2, expert="e", num_experts=7)
    with pytest.raises(ValueError, match="pp=2 needs `layer`"):
        loadplan.ParallelLayout(pp=2)
    with pytest.raises(ValueError, match="tp=0; a degree is 1 or more"):
        loadplan.ParallelLayout(tp=0)
    with pytest.raises(ValueError, match="0 experts cannot be dealt evenly to ep=1"):
        loadplan.ParallelLayout(expert=r"e(\d+)")
    layout = loadplan.ParallelLayout(tp=2, expert=r"e(\d+)", num_experts=2, tp_dims={"w": -1})
    with pytest.raises(ValueError, match="`e2.w` is of expert 2 of 2"):
        pieces(layout, "e2.w", 4)
    layout = loadplan.ParallelLayout(expert=r"experts", num_experts=2)
    with pytest.raises(ValueError, match=r"first group of 'experts' is no number in `experts.1`"):
        pieces(layout, "experts.1", 4)
    layout = loadplan.ParallelLayout(tp=2, tp_dims={"w": -1, "v": 2})
    assert pieces(layout, "w", 4, 6)[1] == (1, ((0, 4), (3, 6)))
    with pytest.raises(ValueError, match=r"`v` of shape \(4, 6\) has no dimension 2"):
        pieces(layout, "v", 4, 6)


def test_names_and_paths_that_are_no_text(tmp_path: pathlib.Path) -> None:
    ones = [(0, ((0, 4),), torch.ones(4))]
    with pytest.raises(ValueError, match=r"named '\\udc80', which is no text"):
        loadplan.Shards({"\udc80": ones})
    with pytest.raises(TypeError, match="a checkpoint tensor is named 1; expected a string"):
        loadplan.metadata({1: torch.ones(4)})  # type: ignore[dict-item]
    model = targets_of({"w": torch.zeros(4)}, copy_rows)
    plan = loadplan.plan_loads(model, {"w": ((4,), F32)})
    with pytest.raises(ValueError, match="has bytes that are no UTF-8; rename it"):
        plan.save(tmp_path / "\udcff")


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(4)])
    with pytest.raises(ValueError, match="`w` is sparse, nested or quantised"):
        loadplan.Shards({"w": [(0, ((0, 4),), nested)]}, {"w": ((4,), F32)})


def test_a_group_that_is_none() -> None:
    with pytest.raises(TypeError, match="the group is None; expected a process group"):
        loadplan.schedule_shards(None)  # type: ignore[arg-type]
