"""Whatever a loader or a curious person does with a trace tensor, the process lives.

Where no value is needed the answer is that of a real tensor, else an error that names the
checkpoint tensor and, where the question goes through an operator, the operator.  All questions
are asked in one process of their own, so that a crash fails this file and not the test run.
"""

from __future__ import annotations

import copy
import io
import json
import math
import multiprocessing.reduction
import operator
import pickle
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loadplan
from loadplan import ParamMeta

F32, F16 = torch.float32, torch.float16


@dataclass
class Given:
    """``w`` is (4, 3), ``s`` a scalar, ``i`` four integers."""

    w: Tensor
    s: Tensor
    i: Tensor


Question = Callable[[Given], Any]


def real() -> Given:
    return Given(torch.ones(4, 3), torch.ones(()), torch.tensor([0, 1, 2, 3]))


def parameter_data(g: Given) -> tuple[int, ...]:
    parameter = nn.Parameter(torch.zeros(4, 3))
    parameter.data = g.w
    return tuple(parameter.shape)


def in_inference_mode(g: Given) -> Any:
    with torch.inference_mode():
        return (g.w * 2).shape


def with_grad(g: Given) -> Any:
    with torch.enable_grad():
        return g.w[1:].clone().shape


def in_thread(g: Given) -> Any:
    shapes: list[Any] = []
    thread = threading.Thread(target=lambda: shapes.append((g.w[1:] * 2).shape))
    thread.start()
    thread.join()
    return shapes


def load_state(g: Given, **kwargs: Any) -> Any:
    return tuple(nn.Linear(3, 4, bias=False).load_state_dict({"weight": g.w}, **kwargs))


# The answer is that of a real tensor.
SAME: dict[str, Question] = {
    "len": lambda g: len(g.w),
    "hash": lambda g: hash(g.w) == hash(g.w),
    "member of a set": lambda g: g.w in {g.w},
    "in a list, the same one": lambda g: g.w in [g.w],
    "is None": lambda g: g.w is None,
    "iteration": lambda g: [row.shape for row in g.w],
    "unpacking": lambda g: [part.shape for part in (lambda a, b, c, d: (a, d))(*g.w)],
    "sum()": lambda g: sum(g.w).shape,
    "attributes": lambda g: (
        g.w.shape, g.w.stride(), g.w.dtype, g.w.is_contiguous(), g.w.element_size(), g.w.nbytes,
        g.w.ndim, g.w.numel(), g.w.storage_offset(), g.w.layout, g.w.is_leaf, g.w.requires_grad,
        g.w.is_cuda, g.w.is_meta, g.w.grad, g.w.grad_fn, g.w.untyped_storage().nbytes(),
    ),
    "is_pinned": lambda g: g.w.is_pinned(),
    "an attribute of one's own": lambda g: setattr(g.w, "note", 1) or g.w.note,
    "deepcopy": lambda g: copy.deepcopy(g.w).shape,
    "deepcopy of a model": lambda g: copy.deepcopy(nn.ParameterList([g.w]))[0].shape,
    "copy": lambda g: copy.copy(g.w).shape,
    "share_memory_": lambda g: g.w.share_memory_().shape,
    "param.data = w": parameter_data,
    "slice out of range": lambda g: g.w[9:12].shape,
    "==": lambda g: (g.w == g.w).shape,
    "== real": lambda g: (g.w == torch.zeros(4, 3)).dtype,
    "== None": lambda g: g.w == None,  # noqa: E711
    "Parameter": lambda g: (nn.Parameter(g.w).requires_grad, nn.Parameter(g.w).shape),
    "Parameter of integers": lambda g: nn.Parameter(g.i, requires_grad=False).dtype,
    "requires_grad_": lambda g: g.w.clone().requires_grad_().requires_grad,
    "inference_mode": in_inference_mode,
    "no_grad": lambda g: torch.no_grad()(lambda: g.w[1:].shape)(),
    "enable_grad": with_grad,
    "another thread": in_thread,
    "load_state_dict": load_state,
    "load_state_dict, assigning": lambda g: load_state(g, assign=True),
    "state_dict": lambda g: list(nn.ParameterList([nn.Parameter(g.w)]).state_dict()),
    "to cpu": lambda g: g.w.to("cpu").shape,
    "cpu()": lambda g: g.w.cpu().dtype,
    "float() of float32": lambda g: g.w.float() is g.w,
    "double": lambda g: g.w.double().dtype,
    "half": lambda g: g.w.half().dtype,
    "type": lambda g: g.w.type(F16).dtype,
    "type by name": lambda g: g.w.type("torch.HalfTensor").dtype,
    "type_as": lambda g: g.w.type_as(torch.zeros(1, dtype=F16)).dtype,
    "new_zeros": lambda g: g.w.new_zeros(2, 2).tolist(),
    "new_ones": lambda g: g.w.new_ones(2, 2).tolist(),
    "new_full": lambda g: g.w.new_full((2,), 3.0).tolist(),
    "new_empty": lambda g: g.w.new_empty(2, 2).shape,
    "new": lambda g: g.w.new(2, 2).shape,
    "new_tensor": lambda g: g.w.new_tensor([1.0, 2.0]).tolist(),
    "zeros_like": lambda g: torch.zeros_like(g.w)[0, 0].item(),
    "rand_like": lambda g: torch.rand_like(g.w).shape,
    "empty on the device": lambda g: torch.empty(2, 2, device=g.w.device).shape,
    "randn on the device": lambda g: torch.randn(2, device=g.w.device).shape,
    "ones on the device": lambda g: torch.ones(2, device=g.w.device).tolist(),
    "linspace on the device": lambda g: torch.linspace(0, 1, 3, device=g.w.device).tolist(),
    "tensor on the device": lambda g: torch.tensor([1, 2], device=g.w.device).tolist(),
    "as_tensor on the device": lambda g: torch.as_tensor(np.arange(3), device=g.w.device).tolist(),
    "index_add_": lambda g: g.w.index_add_(0, torch.tensor([0, 1]), torch.ones(2, 3)).shape,
    "scatter_": lambda g: g.w.scatter_(0, torch.tensor([[0, 1, 2]]), 1.0).shape,
    "fill_diagonal_": lambda g: g.w.fill_diagonal_(1.0).shape,
    "add_ to a real one": lambda g: torch.zeros(4, 3).add_(g.w).shape,
    "copy_ to a real one": lambda g: torch.zeros(4, 3).copy_(g.w).shape,
    "out=": lambda g: torch.add(g.w, 1, out=torch.zeros(4, 3)).shape,
    "stack with a real one": lambda g: torch.stack([g.w, torch.zeros(4, 3)]).shape,
    "index of a real one": lambda g: torch.zeros(5, 3)[g.i].shape,
    "embedding": lambda g: nn.functional.embedding(g.i, torch.zeros(5, 3)).shape,
    "linear": lambda g: nn.functional.linear(torch.ones(2, 3), g.w).shape,
    "matmul": lambda g: (g.w @ g.w.t()).shape,
    "einsum": lambda g: torch.einsum("ij,kj->ik", g.w, g.w).shape,
    "sort": lambda g: g.w.sort().indices.dtype,
    "topk": lambda g: g.w.topk(2).values.shape,
    "svd": lambda g: torch.linalg.svd(g.w).S.shape,
    "dropout": lambda g: nn.functional.dropout(g.w).shape,
    "normal_": lambda g: g.w.clone().normal_().shape,
    "manual_seed": lambda g: torch.manual_seed(0) is not None,
    "get_rng_state": lambda g: torch.get_rng_state().shape,
    "vmap": lambda g: torch.vmap(lambda row: row * 2)(g.w).shape,
    "max of itself": lambda g: g.w.amax().shape,
}  # fmt: skip

# An error that matches; `` `model.w` `` where the value of the tensor itself is wanted.
RAISES: dict[str, tuple[Question, str]] = {
    "item": (lambda g: g.s.item(), "`aten::item` needs the value of checkpoint tensor `model.s`"),
    "float()": (lambda g: float(g.s), "`aten::item` .* `model.s`"),
    "int()": (lambda g: int(g.s), "`aten::item` .* `model.s`"),
    "complex()": (lambda g: complex(g.s), "`aten::item` .* `model.s`"),
    "bool()": (lambda g: bool(g.s), "`aten::is_nonzero` .* `model.s`"),
    "math.sqrt": (lambda g: math.sqrt(g.s), "`aten::item` .* `model.s`"),
    "as an index": (lambda g: operator.index(g.i[0]), "`aten::item` .* `model.i`"),
    "range": (lambda g: range(g.i[0]), "`aten::item` .* `model.i`"),
    "slice bound": (lambda g: torch.zeros(5)[: g.i[0]], "`aten::item` .* `model.i`"),
    "f-string of a number": (lambda g: f"{g.s:.3f}", "`aten::item` .* `model.s`"),
    "in": (lambda g: 1.0 in g.w, "`aten::item` .* `model.w`"),
    "max() of two": (lambda g: max(g.s, g.s), "`aten::is_nonzero` .* `model.s`"),
    "(w == w).all()": (lambda g: bool((g.w == g.w).all()), "`aten::is_nonzero` .* `model.w`"),
    "isnan": (lambda g: bool(g.w.isnan().any()), "`aten::is_nonzero` .* `model.w`"),
    "argmax": (lambda g: g.w.argmax().item(), "`aten::item` .* `model.w`"),
    "torch.equal": (lambda g: torch.equal(g.w, g.w), "`aten::equal` .* `model.w`"),
    "allclose": (lambda g: torch.allclose(g.w, g.w), "`aten::allclose` .* `model.w`"),
    "nonzero": (lambda g: g.w.nonzero(), "`aten::nonzero` .* `model.w`"),
    "unique": (lambda g: g.w.unique(), "`aten::_unique2` .* `model.w`"),
    "w[w > 0]": (lambda g: g.w[g.w > 0], "`aten::index.Tensor` .* `model.w`"),
    "bincount": (lambda g: torch.bincount(g.i), "`aten::bincount` .* `model.i`"),
    "one_hot": (lambda g: nn.functional.one_hot(g.i), "`aten::one_hot` .* `model.i`"),
    "tensor of scalars": (lambda g: torch.tensor([g.s, g.s]), "`model.s`"),
    "to_sparse": (lambda g: g.w.to_sparse(), "`aten::to_sparse` .* `model.w`"),
    "to_mkldnn": (lambda g: g.w.to_mkldnn(), "`aten::to_mkldnn` .* `model.w`"),
    "numpy": (lambda g: g.w.numpy(), "`Tensor.numpy` .* `model.w`"),
    "numpy(force=True)": (lambda g: g.w.numpy(force=True), "`Tensor.numpy` .* `model.w`"),
    "np.asarray": (lambda g: np.asarray(g.w), "`Tensor.numpy` .* `model.w`"),
    "np.array of scalars": (lambda g: np.array([g.s, g.s]), "`model.s`"),
    "np.sqrt": (lambda g: np.sqrt(g.w), "`Tensor.numpy` .* `model.w`"),
    "tolist": (lambda g: g.w.tolist(), "`Tensor.tolist` .* `model.w`"),
    "__dlpack__": (lambda g: g.w.__dlpack__(), "`Tensor.__dlpack__` .* `model.w`"),
    "from_dlpack": (lambda g: torch.from_dlpack(g.w), "`Tensor.__dlpack.*` .* `model.w`"),
    "to_dlpack": (lambda g: torch.utils.dlpack.to_dlpack(g.w), "`model.w` holds no data"),
    "data_ptr": (lambda g: g.w.data_ptr(), "`model.w` holds no data"),
    "data_ptr of the storage": (lambda g: g.w.untyped_storage().data_ptr(), "`model.w`"),
    "pickle": (lambda g: pickle.dumps(g.w), "`model.w` holds no data"),
    "torch.save": (lambda g: torch.save(g.w, io.BytesIO()), "`model.w` holds no data"),
    "torch.save of a model": (
        lambda g: torch.save(nn.ParameterList([nn.Parameter(g.w)]), io.BytesIO()),
        "`model.w` holds no data",
    ),
    "storage, printed": (lambda g: repr(g.w.untyped_storage()), "`aten::item` .* `model.w`"),
    "typed storage, listed": (lambda g: g.w.storage().tolist(), "`aten::item` .* `model.w`"),
    "storage, indexed": (lambda g: g.w.untyped_storage()[0], "`aten::item` .* `model.w`"),
    "storage, cloned": (lambda g: g.w.untyped_storage().clone(), "`model.w` holds no data"),
    "storage, resized": (lambda g: g.w.untyped_storage().resize_(100), "`model.w` holds no data"),
    "storage, filled": (lambda g: g.w.untyped_storage().fill_(0), "`model.w` holds no data"),
    "storage, into a real one": (
        lambda g: torch.zeros(4, 3).untyped_storage().copy_(g.w.untyped_storage()),
        "`model.w` holds no data",
    ),
    "p.set_(w)": (lambda g: torch.zeros(4, 3).set_(g.w), "`aten::set_.source_Tensor` would move"),
    "w.set_(p)": (lambda g: g.w.set_(torch.zeros(4, 3)), "`aten::set_.* `model.w`"),
    "resize_": (lambda g: g.w.resize_(2, 2), "`aten::resize_` would move .* `model.w`"),
    "narrow out of range": (lambda g: g.w.narrow(0, 3, 5), r"start \(3\) \+ length \(5\) exceeds"),
    "index out of range": (lambda g: g.w[9], "index 9 is out of bounds for dimension 0"),
    "view to another size": (lambda g: g.w.view(5, 5), r"shape '\[5, 5\]' is invalid"),
    "view of a wide dtype": (lambda g: g.w.view(torch.float64), "must be divisible by 2"),
    "as_strided beyond": (lambda g: g.w.as_strided((100,), (1,)), "out of bounds for storage"),
    "a wrong shape in load_state_dict": (
        lambda g: nn.Linear(3, 5, bias=False).load_state_dict({"weight": g.w}),
        "size mismatch for weight",
    ),
    "assert_close": (lambda g: torch.testing.assert_close(g.w, g.w.clone()), "`model.w`"),
    "assert_close to a real one": (
        lambda g: torch.testing.assert_close(g.w, torch.zeros(4, 3)),
        "attribute 'device' do not match",
    ),
    "to another process": (
        lambda g: multiprocessing.reduction.ForkingPickler.dumps(g.w),
        "`model.w`|only available on CPU",
    ),
    "apply_": (lambda g: g.w.apply_(lambda x: x), "only implemented on CPU"),
}

# What stands for the tensor where it is shown to people.
SHOWN = "tensor(..., device='trace', size=(4, 3), dtype=torch.float32)"
SHOWS: dict[str, Question] = {
    "repr": lambda g: repr(g.w),
    "str": lambda g: str(g.w),
    "f-string": lambda g: f"{g.w}",
    "print": lambda g: (lambda out: (print(g.w, file=out), out.getvalue().strip())[1])(
        io.StringIO()
    ),
    "repr of a parameter": lambda g: repr(nn.Parameter(g.w)),
    "in a container": lambda g: repr({"w": [g.w]}),
}

# May raise or not, as the machine has it (a driver, say); it must return.
LIVES: dict[str, Question] = {
    "pin_memory": lambda g: g.w.pin_memory(),
    "cuda": lambda g: g.w.cuda(),
    "to cuda": lambda g: g.w.to("cuda"),
    "storage pin_memory": lambda g: g.w.untyped_storage().pin_memory(),
    "module to the device": lambda g: nn.Linear(3, 4).to(g.w.device),
    "module to_empty": lambda g: nn.Linear(3, 4).to_empty(device=g.w.device),
    "backward": lambda g: nn.Parameter(g.w).sum().backward(),
    "func.grad": lambda g: torch.func.grad(lambda x: x.sum())(g.w),
    "conj": lambda g: g.w.conj(),
    "fft": lambda g: torch.fft.fft(g.w),
    "view_as_complex": lambda g: torch.view_as_complex(g.w[:, :2].contiguous()),
    "quantize": lambda g: torch.quantize_per_tensor(g.w, 0.1, 0, torch.qint8),
    "nested": lambda g: torch.nested.nested_tensor([g.w, g.w]),
    "swap_tensors": lambda g: torch.utils.swap_tensors(g.w.clone(), torch.zeros(4, 3)),
    "w.data = real": lambda g: setattr(g.w, "data", torch.zeros(4, 3)),
    "t_": lambda g: g.w.clone().t_(),
    "unsqueeze_": lambda g: g.w.clone().unsqueeze_(0),
    "record_stream": lambda g: g.w.record_stream(None),
    "register_hook": lambda g: g.w.register_hook(lambda grad: grad),
    "storage from a real one": lambda g: g.w.untyped_storage().copy_(
        torch.zeros(4, 3).untyped_storage()
    ),
}

METAS = [
    ParamMeta("model.w", (4, 3), F32),
    ParamMeta("model.s", (), F32),
    ParamMeta("model.i", (4,), torch.int64),
]


def ask(question: Question, given: Given) -> str:
    try:
        return repr(question(given))
    except Exception as error:
        cause = f" from {error.__cause__}" if error.__cause__ else ""
        return f"raises {type(error).__name__}: {error}{cause}"


def ask_all() -> None:
    """The process of its own: one line of JSON per question, before and after it."""
    questions = {**SAME, **SHOWS, **LIVES, **{name: pair[0] for name, pair in RAISES.items()}}
    for name, question in questions.items():
        print(json.dumps(["asks", name]), flush=True)
        live = {"p": torch.zeros(4, 3)}
        outcome: list[str] = []
        try:
            with loadplan.trace(live, METAS) as trace:
                given = Given(*(trace.tensor(meta.name) for meta in METAS))
                outcome.append(ask(question, given))
                if live["p"].any():
                    outcome.append("a live byte changed")
            # The tensors outlive their pass: they must not answer, and not crash.
            outcome.append(ask(lambda g: (g.w + 1).shape, given))
            outcome.append(ask(question, given))
        except Exception:
            outcome.append(traceback.format_exc())
        print(json.dumps(["answers", name, *outcome]), flush=True)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    last = json.loads(lines[-1])
    assert done.returncode == 0, f"the process died ({done.returncode}) at {last}\n{done.stderr}"
    return {name: rest for kind, name, *rest in map(json.loads, lines) if kind == "answers"}


@pytest.mark.parametrize("name", SAME)
def test_answers_as_a_real_tensor_does(name: str, answers: dict[str, list[str]]) -> None:
    torch.manual_seed(0)
    assert answers[name][0] == ask(SAME[name], real())


@pytest.mark.parametrize("name", RAISES)
def test_raises_what_names_the_tensor(name: str, answers: dict[str, list[str]]) -> None:
    assert answers[name][0].startswith("raises "), answers[name][0]
    assert re.search(RAISES[name][1], answers[name][0], re.DOTALL), answers[name][0]


@pytest.mark.parametrize("name", SHOWS)
def test_shows_itself(name: str, answers: dict[str, list[str]]) -> None:
    assert SHOWN in answers[name][0]


@pytest.mark.parametrize("name", [*SAME, *RAISES, *SHOWS, *LIVES])
def test_the_pass_ends_and_the_tensor_with_it(name: str, answers: dict[str, list[str]]) -> None:
    assert len(answers[name]) == 3, answers[name]
    assert "INTERNAL ASSERT" not in answers[name][0] or name == "nested"
    after = answers[name][1]
    # `w.data = real` made it a real tensor; `w.set_` did not.
    assert "whose pass has ended" in after or name == "w.data = real", after


if __name__ == "__main__":
    ask_all()
