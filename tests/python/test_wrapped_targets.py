"""Targets that hold no bytes themselves: tensors that wrap others, as torchao's and DTensors do.

What they wrap are the targets, by names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import loadplan

F32 = torch.float32
Copy = Callable[["Scaled", Tensor], object]


class Scaled(Tensor):
    """Data and a scale; what a copy into it does is told from outside."""

    copy: Copy

    @staticmethod
    def __new__(cls, data_: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data_.shape, dtype=F32)

    def __init__(self, data_: Tensor, scale: Tensor) -> None:
        self.data_, self.scale = data_, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_.detach(), args[0].scale.detach())
        assert func is torch.ops.aten.copy_.default
        cls.copy(*args[:2])
        return args[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(Scaled(torch.ones(3), torch.ones(1)), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            with torch.no_grad():
                self.get_parameter(name).copy_(weight)

    def values(self) -> list[float]:
        return [*self.w.data_.tolist(), *self.w.scale.tolist(), *self.b.tolist()]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (self.w.data_, self.w.scale, self.b)]


class Counting(Scaled):
    calls = 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mul_.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        cls.calls += 1
        args[0].data_.mul_(args[1])
        return args[0]


def test_an_operator_of_a_wrapper_is_called_once() -> None:
    targets = {"p": torch.zeros(3)}
    wrapped = Counting(torch.full((3,), 4.0), torch.ones(1))

    def load(weights: Any) -> None:
        Counting.calls = 0
        wrapped.mul_(2.0)
        assert Counting.calls == 1
        for _, w in weights:
            targets["p"].copy_(w)

    loadplan.plan_loads(loadplan.Targets(targets, load), {"w": ((3,), F32)})
    assert wrapped.data_.tolist() == [4] * 3


def plain(to: Scaled, w: Tensor) -> None:
    to.data_.copy_(w)


def in_place(to: Scaled, w: Tensor) -> None:
    to.scale.mul_(0.5)
    to.data_.copy_(w)


def constant(to: Scaled, w: Tensor) -> None:
    to.scale.fill_(3)
    to.data_.copy_(w)


def read_back(to: Scaled, w: Tensor) -> None:
    to.data_.copy_(w)
    to.scale.copy_(to.data_[:1])


def put_inside(to: Scaled, w: Tensor) -> None:
    to.data_ = w.clone()


KINDS: dict[Copy, str] = {
    plain: "direct",
    in_place: "fallback",
    constant: "fallback",
    read_back: "fallback",
    put_inside: "direct",
}
METAS = {"w": ((3,), F32), "b": ((2,), F32)}


def planned(model: nn.Module) -> loadplan.LoadPlan:
    loadplan.start_reload(model)
    plan = loadplan.plan_loads(model, METAS)
    loadplan.abort_reload(model)
    return plan


def weights(seed: int) -> dict[str, Tensor]:
    return {"w": torch.arange(3.0) + seed, "b": torch.ones(2) * seed}


def update(model: nn.Module, plan: loadplan.LoadPlan, seed: int, atomic: bool) -> None:
    loadplan.start_reload(model, atomic=atomic)
    loadplan.load_planned(model, plan, weights(seed).items())
    loadplan.finish_reload(model)


@pytest.mark.parametrize("copy", KINDS, ids=lambda copy: copy.__name__)
def test_a_copy_into_a_wrapper(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "copy", staticmethod(copy), raising=False)
    model, eager = Model(), Model()
    before, addresses = model.values(), model.addresses()
    plan = planned(model)
    assert model.values() == before, "tracing changes no live byte"
    assert plan.entries["w"].kind == KINDS[copy]
    for seed, atomic in ((5, False), (7, True)):
        update(model, plan, seed, atomic)
        eager.load_weights(weights(seed).items())
        assert model.values() == eager.values()
        assert model.addresses() == addresses
    before = model.values()
    assert loadplan.verify(model, plan, weights(9)) == ()
    assert model.values() == before


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not dist.is_available():
        pytest.skip("this torch has no distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["local", "from_local", "state_dict"])
def test_a_live_dtensor(way: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def sharded(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

    model = nn.Module()
    model.w = nn.Parameter(sharded(torch.zeros(3)), requires_grad=False)
    model.b = nn.Parameter(torch.zeros(2), requires_grad=False)

    @torch.no_grad()
    def load_weights(arriving: Any) -> None:
        if way == "state_dict":
            model.load_state_dict({n: sharded(w) if n == "w" else w for n, w in arriving})
            return
        for name, weight in arriving:
            if name == "b":
                model.b.copy_(weight)
            elif way == "local":
                model.w.to_local().copy_(weight)
            else:
                model.w.copy_(sharded(weight))

    model.load_weights = load_weights
    plan = planned(model)
    assert {entry.kind for entry in plan.entries.values()} == {"direct"}
    for seed, atomic in ((5, False), (7, True)):
        update(model, plan, seed, atomic)
        assert model.w.to_local().tolist() == [seed, seed + 1, seed + 2]
        assert model.b.tolist() == [seed, seed]
