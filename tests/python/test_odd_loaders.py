"""Loaders that ask a tensor odd things: its device, its pointer, its conjugate; or that insist.

Each is planned, and two updates go through the plan; `check` compares all live bytes with the
eager load.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_loaders import BF16, F32, Live, Loader, Weights, check, kinds
from torch import Tensor

import loadplan
from loadplan import ParamMeta, Targets

C64 = torch.complex64


def metas(*names: str, shape: tuple[int, ...] = (4,), dtype: torch.dtype = F32) -> list[ParamMeta]:
    return [ParamMeta(name, shape, dtype) for name in names]


def make(dtype: torch.dtype = F32) -> Live:
    return {name: torch.ones(4, dtype=dtype) for name in "ab"}


# ------------------------------------------------------------------ lazily conjugated views
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda z: z.conj(),
    "negative": lambda z: torch.complex(z.real, z.conj().imag),
    "clone": lambda z: z.conj().clone(),
    "cat": lambda z: torch.cat([z.conj()[:2], z[2:]]),
    "stack": lambda z: torch.stack([z.conj()[:2], z[2:]]).flatten(),
    "cast": lambda z: z.conj().to(torch.complex128),
    "index": lambda z: z.conj()[torch.tensor([3, 0, 1, 2])],
    "arithmetic": lambda z: z.conj() * 2,
}


@pytest.mark.parametrize("read", READS)
def test_a_lazily_conjugated_source(read: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            live[name].copy_(READS[read](w))

    plan = check(lambda: make(C64), load, metas("a", "b", dtype=C64))
    assert kinds(plan) == {"a": "derived", "b": "derived"}


def test_a_lazily_conjugated_target_that_is_read() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            live["b"].copy_(live["a"].conj())
            live["a"].copy_(w)

    assert kinds(check(lambda: make(C64), load, metas("w", dtype=C64))) == {"w": "direct"}


@pytest.mark.parametrize("way", ["copy_", "mul_"])
def test_a_write_through_a_lazily_conjugated_view_is_a_fallback(way: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            getattr(live[name].conj(), way)(w)

    plan = check(lambda: make(C64), load, metas("a", dtype=C64))
    assert re.search(r"lazily conjugated .* at test_odd_loaders.py:\d+", plan.entries["a"].reason)


def test_a_constant_through_a_lazily_conjugated_view_is_refused() -> None:
    live = make(C64)
    targets = Targets(live, load_weights=lambda weights: live["a"].conj().fill_(1j))
    with pytest.raises(
        RuntimeError, match="fill_.*lazily conjugated or negated view of target `a`"
    ):
        loadplan.plan_loads(targets, metas("a", dtype=C64))


# ------------------------------------------------------------------ numbers that Python wrapped
def test_a_number_promotes_as_in_eager_when_an_operator_runs_again() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            live["a"].copy_(w.abs().max().mul_(0.1))  # in place: nothing but the bits would tell
            live["b"].copy_(w.bfloat16().sum() * 0.3)

    assert kinds(check(make, load, metas("w"))) == {"w": "derived"}


# ------------------------------------------------------------------ where a tensor is
ASKED: dict[str, Callable[[Tensor], bool]] = {
    "device": lambda w: w.device.type == "cpu" and w.device == torch.empty(0).device,
    "is_cpu": lambda w: w.is_cpu and not w.is_cuda,
    "get_device": lambda w: w.get_device() == -1,
    "type": lambda w: w.type() == "torch.FloatTensor",
    "temporary": lambda w: (w * 2).device.type == "cpu" and torch.cat([w, w]).is_cpu,
    "memory": lambda w: not w.is_pinned() and not w.is_shared(),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_trace_tensor_says_that_it_is_where_an_eager_call_has_it(asked: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            live[name].copy_(w if ASKED[asked](w) else -w)

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "direct", "b": "direct"}
    assert torch.empty(1).is_shared() is False and "device" not in vars(Tensor)


# What a loader may ask of a live tensor that it goes on to write, without looking at its bytes.
ASKED_OF_LIVE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "shallow copy": lambda p, w: torch._has_compatible_shallow_copy_type(p, p.data),
    "same tensor": lambda p, w: p.is_set_to(p),
    "same size": lambda p, w: torch.is_same_size(p, w),
    "pinned": lambda p, w: p.is_pinned(),
    "distributed": lambda p, w: p.is_distributed(),
    "overlap": lambda p, w: torch._debug_has_internal_overlap(p),
    "dtype": lambda p, w: (torch.result_type(p, w), p.is_floating_point(), p.is_signed()),
}


@pytest.mark.parametrize("asked", ASKED_OF_LIVE)
def test_a_question_about_a_live_tensor_is_no_read_of_its_bytes(asked: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if ASKED_OF_LIVE[asked](live[name], w) is not None:
                live[name].copy_(w)

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "direct", "b": "direct"}


@pytest.mark.parametrize("move", ["to", "cpu", "float"])
def test_a_module_that_is_moved_to_where_it_is(move: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(live[name])
            module.to(torch.device("cpu")) if move == "to" else getattr(module, move)()
            module.weight.data.copy_(w)

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "direct", "b": "direct"}


def test_a_declared_device_decides_a_branch() -> None:
    live = make()

    def load(weights: Weights) -> None:
        for name, w in weights:
            length = 1 if w.device == torch.device("cuda", 1) and w.is_cuda else 4
            live[name][:length].copy_(w[:length])

    targets = Targets(live, load_weights=load)
    plan = loadplan.plan_loads(targets, [ParamMeta("a", (4,), F32, "cuda:1"), *metas("b")])
    assert plan.get_boxes("a") == (((0, 1),),) and plan.get_boxes("b") == (((0, 4),),)


MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cpu": lambda w, p: w.cpu(),
    "to_device": lambda w, p: w.to(p.device),
    "to_both": lambda w, p: w.to(device=p.device, dtype=p.dtype),
    "to_other": lambda w, p: w.to(p),
    "to_itself": lambda w, p: w.to(w.device),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_that_is_there_already_is_not_copied(move: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            MOVES[move](w, live[name])[1:].zero_()
            live[name].copy_(w)

    plan = check(make, load, metas("a"))
    assert plan.get_boxes("a") == (((0, 1),),)


def test_a_copy_that_is_asked_for_is_made() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            w.to("cpu", copy=True).zero_()
            live[name].copy_(w)

    assert kinds(check(make, load, metas("a"))) == {"a": "direct"}


# ------------------------------------------------------------------ loaders that insist
def strict(live: Live, weights: Weights) -> None:
    missing = set(live)
    for name, w in weights:
        missing.remove(name)
        live[name].fill_(w.sum().item()) if name == "b" else live[name].copy_(w)
    if missing:
        raise ValueError(f"missing {sorted(missing)}")


def by_key(live: Live, weights: Weights) -> None:
    held = dict(weights)
    scale = held["b"][0].item()
    live["a"].copy_(held["a"] * scale)


@pytest.mark.parametrize("load", [strict, by_key], ids=lambda load: load.__name__)
def test_a_loader_that_insists_on_a_name_that_it_reads_goes_through_as_a_whole(
    load: Loader,
) -> None:
    plan = check(make, load, metas("a", "b"))
    assert kinds(plan) == {"a": "fallback", "b": "fallback"}
    assert re.search(
        r"cannot be called with some names only: (Value|Key)Error.* at test_odd_loaders.py:\d+",
        plan.entries["a"].reason,
    )


def test_a_call_with_all_names_sets_its_constants_itself() -> None:
    def load(live: Live, weights: Weights) -> None:
        live["a"].zero_()
        for _, w in weights:
            live["a"][0].fill_(w.item())
        live["b"].copy_(live["a"])

    plan = check(make, load, metas("w", shape=()))
    assert kinds(plan) == {"w": "fallback"}


# ------------------------------------------------------------------ memory
def pointer_that_is_caught(live: Live, weights: Weights) -> None:
    for name, w in weights:
        if name == "a":
            try:
                w.data_ptr()
            except RuntimeError:
                w = -w
        live[name].copy_(w)


def pickled(live: Live, weights: Weights) -> None:
    for name, w in weights:
        live[name].copy_(pickle.loads(pickle.dumps(w)) if name == "a" else w)


@pytest.mark.parametrize("load", [pointer_that_is_caught, pickled], ids=lambda load: load.__name__)
def test_a_read_through_a_pointer_makes_its_name_a_fallback(load: Loader) -> None:
    plan = check(make, load, metas("a", "b"))
    assert plan.entries["a"].kind == "fallback"
    assert re.search(r"at test_odd_loaders.py:\d+", plan.entries["a"].reason)


def test_a_refusal_that_the_loader_catches_is_told_with_its_line() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            try:
                live[name].fill_(w[0].item())
            except RuntimeError:
                live[name].copy_(w)

    plan = check(make, load, metas("a"))
    assert re.fullmatch(
        r"`aten::item` reads its value at test_odd_loaders.py:\d+", plan.entries["a"].reason
    )


def test_an_inverse_permutation_starts_from_memory_that_holds_nothing() -> None:
    def load(live: Live, weights: Weights) -> None:
        held = dict(weights)
        if "order" in held:
            perm = held["order"].argsort()
            inverse = torch.empty_like(perm)
            inverse[perm] = torch.arange(4)
            live["a"].copy_(inverse)
            if "w" in held:
                live["b"].copy_(held["w"][inverse])

    assert kinds(check(make, load, metas("order", "w"))) == {"order": "derived", "w": "derived"}


# ------------------------------------------------------------------ threads
@pytest.fixture
def pool() -> Iterator[list[ThreadPoolExecutor]]:
    made: list[ThreadPoolExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


def test_a_pool_that_outlives_the_pass_keeps_no_tensor(pool: list[ThreadPoolExecutor]) -> None:
    def load(live: Live, weights: Weights) -> None:
        if not pool:  # made by the first load, as engines do
            pool.append(ThreadPoolExecutor(2))
        list(pool[0].map(lambda item: live[item[0]].copy_(item[1]), weights))

    assert kinds(check(make, load, metas("a", "b"))) == {"a": "direct", "b": "direct"}


def test_numbers_are_kept_in_a_plan_file(tmp_path: object) -> None:
    live = {"a": torch.ones((), dtype=BF16)}
    targets = Targets(live, load_weights=lambda ws: [live["a"].copy_(w.sum() * 0.3) for _, w in ws])
    declared = metas("w", dtype=BF16)
    path = f"{tmp_path}/plan"
    loadplan.plan_loads(targets, declared).save(path)
    plan = loadplan.load_plan(path, targets)
    weight = torch.tensor([0.1, 0.7, 1.3, 2.9], dtype=BF16)
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("w", weight)])
    loadplan.finish_reload(targets)
    assert torch.equal(live["a"], weight.sum() * 0.3)


def test_an_attribute_that_shows_a_target_is_no_read() -> None:
    """vLLM's DFlash drafts keep `self.hidden_norm.weight.data` for their kernels."""
    module = torch.nn.Linear(4, 4)

    def load(weights: Weights) -> None:
        for name, w in weights:
            getattr(module, name).data.copy_(w)
        module.shown = module.weight.data

    weights = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    module.load_weights = load  # type: ignore[assignment]
    load(weights.items())
    loadplan.start_reload(module)
    plan = loadplan.plan_loads(module, weights)
    assert kinds(plan) == {"weight": "direct", "bias": "direct"}
    new = {name: torch.randn_like(w) for name, w in weights.items()}
    loadplan.load_planned(module, plan, new.items())
    loadplan.finish_reload(module)
    assert torch.equal(module.shown, new["weight"])  # type: ignore[arg-type]


def test_a_constant_lies_in_memory_as_the_eager_call_lays_it() -> None:
    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            w.copy_(torch.arange(12).to(w.dtype).view(2, 6))
            live["a"].copy_(torch.neg(w.T).as_strided((2, 3), (3, 1), 4))
            live["b"].copy_(torch.arange(6.0).view(2, 3).T.to(w.device).as_strided((6,), (1,)))

    check(lambda: {"a": torch.ones(2, 3), "b": torch.ones(6)}, load, metas("w", shape=(2, 6)))


# ------------------------------------------------------------------ what meta kernels do not know
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": lambda w: torch.linalg.svd(w, full_matrices=False).Vh,
    "fft": lambda w: torch.fft.hfft(w.T, n=5),
    "logaddexp": lambda w: torch.logaddexp(w.T, torch.tensor(0.3)),
}


@pytest.mark.parametrize("made", LAYOUTS)
@pytest.mark.parametrize("between", ["", "elementwise"])
def test_a_product_of_what_has_a_layout_of_its_own(made: str, between: str) -> None:
    """Meta kernels give these other strides than the CPU's, and products are rounded by strides."""
    shape = LAYOUTS[made](torch.ones(8, 33)).shape

    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            found = LAYOUTS[made](w)
            found = found * 1.5 if between else found
            live["a"].copy_(found @ found.T)

    plan = check(lambda: {"a": torch.ones(shape[0], shape[0])}, load, metas("w", shape=(8, 33)))
    assert re.search("matmul.*layout that only a real call tells", plan.entries["w"].reason)


@pytest.mark.parametrize("made", LAYOUTS)
def test_elements_of_what_has_a_layout_of_its_own(made: str) -> None:
    """Copies and elementwise operators do not depend on strides."""
    shape = LAYOUTS[made](torch.ones(8, 33)).shape

    def load(live: Live, weights: Weights) -> None:
        for _, w in weights:
            live["a"].copy_(LAYOUTS[made](w) * 0.5)

    plan = check(lambda: {"a": torch.ones(shape)}, load, metas("w", shape=(8, 33)))
    assert kinds(plan) == {"w": "derived"}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_result_is_a_fallback() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            at = torch.tensor([[1, 3]], device=w.device)
            live[name].copy_(torch.sparse_coo_tensor(at, w[:2], (4,)).to_dense())

    plan = check(make, load, metas("a", "b"))
    assert kinds(plan) == {"a": "fallback", "b": "fallback"}
    assert "gives no strided tensor" in plan.entries["a"].reason


# ------------------------------------------------------------------ errors of the loader itself
@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_that_is_written_with_gradients_on_refuses_the_plan(view: bool) -> None:
    live = {"a": torch.ones(4), "b": torch.nn.Parameter(torch.ones(4))}

    def load(weights: Weights) -> None:
        for name, w in weights:
            to = live[name]
            if view:
                to[1:].copy_(w[1:])
            else:
                to[:] = w

    targets = Targets(live, load_weights=load)
    with pytest.raises(RuntimeError, match="at checkpoint tensor `b`.*leaf Variable that requires"):
        loadplan.plan_loads(targets, metas("a", "b"))
    assert live["a"].eq(1).all()
