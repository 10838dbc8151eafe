"""What steers a trace is a premise, however the loader reads it; data on the trace device keeps
its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_loaders import Live, Weights, check, kinds
from torch import Tensor, nn

import loadplan
from loadplan import ParamMeta, Targets

F32 = torch.float32
METAS = [ParamMeta("w", (4, 2), F32), ParamMeta("v", (2,), F32)]


def make() -> Live:
    return {
        "w": torch.zeros(2, 2),
        "v": torch.zeros(2),
        "expert_map": torch.tensor([-1, 0, -1, 1], dtype=torch.int32),
    }


def as_memoryview(tensor: Tensor) -> list[int]:
    return list(memoryview(tensor.numpy()))


READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: [int(i) for i in t.numpy()],
    "asarray": lambda t: [int(i) for i in np.asarray(t)],
    "cpu numpy": lambda t: [int(i) for i in t.cpu().numpy()],
    "item": lambda t: [t[e].item() for e in range(4)],
    "int": lambda t: [int(e) for e in t],
    "memoryview": as_memoryview,
    "computed": lambda t: (t + 0).tolist(),
}


def loader(read: Callable[[Tensor], Any], expert_map: Tensor | None = None) -> Any:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "v":
                live["v"].copy_(w)
                continue
            for e, local in enumerate(
                read(live["expert_map"] if expert_map is None else expert_map)
            ):
                if local >= 0:
                    live["w"][local].copy_(w[e])

    return load


def refuses(targets: Targets, plan: loadplan.LoadPlan, what: str) -> None:
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match=f"{what}.*has changed since; plan again"):
        loadplan.load_planned(targets, plan, [("v", torch.ones(2))])
    loadplan.abort_reload(targets)


@pytest.mark.parametrize("read", READS)
def test_a_target_that_is_read_and_never_written(read: str) -> None:
    load = loader(READS[read])
    assert kinds(check(make, load, METAS)) == {"w": "direct", "v": "direct"}
    live = make()
    targets = Targets(live, load_weights=lambda weights: load(live, weights))
    plan = loadplan.plan_loads(targets, METAS)
    live["expert_map"][0] = 1
    refuses(targets, plan, "`expert_map`")
    assert not live["v"].any()


@pytest.mark.parametrize("read", READS)
def test_a_tensor_outside_that_outlives_the_trace(read: str) -> None:
    expert_map = make()["expert_map"]
    load = loader(READS[read], expert_map)
    live = make()
    targets = Targets(live, load_weights=lambda weights: load(live, weights))
    plan = loadplan.plan_loads(targets, METAS)
    assert kinds(plan) == {"w": "direct", "v": "direct"}
    expert_map[0] = 1
    refuses(targets, plan, "a tensor of shape .* and dtype int32")


@pytest.mark.parametrize("read", ["tolist", "numpy", "item"])
def test_a_target_that_is_read_and_then_written_goes_through_the_loader(read: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "v":
                first = READS[read](
                    torch.cat([live["v"], live["v"]]) if read == "item" else live["v"]
                )
                live["v"].copy_(w + 1 if first[0] == 0 else w)

    assert kinds(check(make, load, METAS)) == {"w": "unneeded", "v": "fallback"}


@pytest.mark.parametrize("read", ["tolist", "numpy"])
def test_a_target_that_was_written_in_the_pass_makes_its_name_a_fallback(read: str) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "v":
                live["v"].copy_(w)
                live["w"].fill_(float(READS[read](live["v"])[0]))

    assert kinds(check(make, load, METAS)) == {"w": "unneeded", "v": "fallback"}


def test_an_array_over_a_target_cannot_be_written_while_it_is_traced() -> None:
    live = make()

    def load(weights: Weights) -> None:
        dict(weights)
        live["v"].numpy()[:] = 3

    with pytest.raises(RuntimeError, match="read-only"):
        loadplan.plan_loads(Targets(live, load_weights=load), METAS)
    assert not live["v"].any()


@pytest.mark.parametrize("outside", [True, False])
def test_an_index_of_live_bytes_needs_no_device(outside: bool) -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "w":
                local = (live["expert_map"] >= 0).nonzero().flatten()
                live["w"].copy_(w[local] if outside else w[live["expert_map"] >= 0])

    plan = check(make, load, METAS)
    assert kinds(plan) == {"w": "direct", "v": "unneeded"}
    assert plan.get_boxes("w") == (((1, 2), (0, 2)), ((3, 4), (0, 2)))


FACTORIES: dict[str, tuple[Callable[[Any], Tensor], list[Any]]] = {
    "arange": (lambda d: torch.arange(3, device=d), [0, 1, 2]),
    "arange from": (lambda d: torch.arange(1, 4, 2, device=d), [1, 3]),
    "eye": (lambda d: torch.eye(2, device=d), [[1, 0], [0, 1]]),
    "zeros": (lambda d: torch.zeros(2, device=d), [0, 0]),
    "ones": (lambda d: torch.ones(2, device=d), [1, 1]),
    "full": (lambda d: torch.full((2,), 3, device=d), [3, 3]),
    "tensor": (lambda d: torch.tensor([2, 0], device=d), [2, 0]),
    "linspace": (lambda d: torch.linspace(0, 1, 3, device=d), [0, 0.5, 1]),
    "tril_indices": (lambda d: torch.tril_indices(2, 2, device=d), [[0, 1, 1], [0, 0, 1]]),
    "scalar_tensor": (lambda d: torch.scalar_tensor(2, device=d), 2),
    "new_tensor": (lambda d: torch.tensor([1, 2], device=d).new_tensor([3]), [3]),
    "computed": (lambda d: (torch.arange(3, device=d) + 1).flip(0), [3, 2, 1]),
    "compared": (lambda d: torch.arange(3, device=d) > 1, [False, False, True]),
    "nonzero": (lambda d: (torch.arange(3, device=d) > 0).nonzero().flatten(), [1, 2]),
    "written": (lambda d: torch.zeros(2, device=d).fill_(2).add_(1), [3, 3]),
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_what_is_made_on_the_trace_device_keeps_its_values(factory: str) -> None:
    make_it, expected = FACTORIES[factory]

    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name != "w":
                continue
            made = make_it(w.device)
            assert made.device == w.device
            assert made.tolist() == expected
            assert made.numpy().tolist() == expected if w.device.type != "cuda" else True
            assert made.flatten()[0].item() == np.asarray(expected).flatten()[0]
            assert made.cpu().tolist() == expected
            if made.dtype == torch.int64 and made.dim() == 1:
                live["w"][0].copy_(w[made].flatten()[:2])
            for index, row in enumerate(made.flatten()[:1]):
                live["w"][1].copy_(w[index + (1 if row else 0)])

    assert kinds(check(make, load, METAS)) == {"w": "direct", "v": "unneeded"}


class Mirrored(nn.Module):
    """Copies that are no targets and outlive the load."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.mirror = torch.zeros(2)
        self.listed = [torch.zeros(2)]
        enclosed = torch.zeros(2)
        self.enclosed = lambda: enclosed
        self.where = where

    def place(self) -> Tensor:
        if self.where == "attribute":
            return self.mirror
        return self.listed[0] if self.where == "list" else self.enclosed()

    def load_weights(self, weights: Weights) -> None:
        for name, w in weights:
            if name == "v":
                self.place().copy_(w)
            else:
                self.weight.copy_(w)


@pytest.mark.parametrize("where", ["attribute", "list", "closure"])
def test_a_copy_that_is_no_target_is_made_by_every_update(where: str) -> None:
    model = Mirrored(where)
    metas = [ParamMeta("weight", (2,), F32), ParamMeta("v", (2,), F32)]
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, metas)
    loadplan.abort_reload(model)
    assert not model.place().any()
    assert kinds(plan) == {"weight": "direct", "v": "direct"}
    for value in (1.0, 2.0):
        loadplan.start_reload(model)
        items = [("weight", torch.full((2,), value)), ("v", torch.full((2,), -value))]
        loadplan.load_planned(model, plan, items)
        loadplan.finish_reload(model)
        assert model.weight.tolist() == [value] * 2 and model.place().tolist() == [-value] * 2


def test_views_in_place_of_a_trace_tensor() -> None:
    def load(live: Live, weights: Weights) -> None:
        for name, w in weights:
            if name == "w":
                turned = w[:2]
                turned.t_().unsqueeze_(0)
                assert turned.shape == (1, 2, 2)
                turned.squeeze_(0)
                live["w"].copy_(turned)
                tall = w.detach()
                tall.transpose_(0, 1)
                assert tall.shape == (2, 4) and w.shape == (4, 2)
                tall.as_strided_((2,), (1,))
                live["w"][1].copy_(tall)
            else:
                live["v"].copy_(torch.view_as_real(torch.view_as_complex(w.view(1, 2))).view(2))

    assert kinds(check(make, load, METAS)) == {"w": "direct", "v": "direct"}
