"""Sessions: what an update leaves that does not end well, and updates that leave nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lifecycle_models import F32, Bytes, Everything, Weights, bytes_of, differing, kinds
from torch import Tensor, nn

import loadplan
from loadplan import Targets
from loadplan._places import Places


# ------------------------------------------------------------------ faults at each step
class Injected(Exception):
    pass


def run(model: Everything, plan: loadplan.LoadPlan, weights: Weights, **options: Any) -> None:
    loadplan.start_reload(model.targets, **options)
    for item in weights:
        loadplan.load_planned(model.targets, plan, [item])
    loadplan.finish_reload(model.targets)


def bad_arrival(step: int) -> Callable[[Everything, Bytes], Iterator[tuple[str, Tensor]]]:
    def send(model: Everything, weights: Bytes) -> Iterator[tuple[str, Tensor]]:
        for index, (name, weight) in enumerate(weights.items()):
            yield name, torch.zeros(99) if index == step else weight

    return send


def in_loader(where: str) -> Callable[[Everything, Bytes], Iterator[tuple[str, Tensor]]]:
    def send(model: Everything, weights: Bytes) -> Iterator[tuple[str, Tensor]]:
        model.fail_in_loader = where
        yield from weights.items()

    return send


FAULTS = {
    **{f"arrival {step}": bad_arrival(step) for step in range(6)},
    "loader half way": in_loader("half way"),
    "loader at the end": in_loader("at the end"),
}


@pytest.fixture(scope="module")
def planned() -> tuple[Everything, loadplan.LoadPlan]:
    model = Everything()
    return model, model.plan()


@pytest.mark.parametrize("memory", ["", "0", "20"], ids=["memory", "file", "both"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_atomic_update_that_fails_leaves_the_old_bytes(
    fault: str,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    planned: tuple[Everything, loadplan.LoadPlan],
) -> None:
    monkeypatch.setenv("LOADPLAN_ATOMIC_MEMORY", memory)
    model, plan = planned
    assert set(kinds(plan).values()) == {"direct", "derived", "fallback"}
    run(model, plan, model.weights(1).items(), atomic=True)
    before, mirror = bytes_of(model.targets), model.mirror.clone()
    for order in range(3):
        weights = model.weights(2)
        names = list(weights)
        random.Random(order).shuffle(names)
        shuffled = {name: weights[name] for name in names}
        with pytest.raises((RuntimeError, ValueError), match="idle as before") as error:
            run(model, plan, FAULTS[fault](model, shuffled), atomic=True)
        model.fail_in_loader = ""
        assert differing(model.targets, before) == [] and torch.equal(model.mirror, mirror)
        state = loadplan.state(model.targets)
        assert state.state == "idle" and state.undefined == {} and state.error in str(error.value)
    expected = model.eager(weights)
    run(model, plan, weights.items(), atomic=True)
    assert differing(model.targets, expected) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_update_tells_the_truth(fault: str) -> None:
    model = Everything()
    plan = model.plan()
    run(model, plan, model.weights(1).items())
    for order in range(4):
        before = bytes_of(model.targets)
        weights = model.weights(2 + order)
        names = list(weights)
        random.Random(order).shuffle(names)
        shuffled = {name: weights[name] for name in names}
        with pytest.raises((RuntimeError, ValueError)) as error:
            run(model, plan, FAULTS[fault](model, shuffled))
        model.fail_in_loader = ""
        state = loadplan.state(model.targets)
        changed = differing(model.targets, before)
        assert state.state == "failed" and state.error == str(error.value)
        # Every byte that changed is told as undefined, byte by byte.
        assert set(changed) <= set(state.undefined)
        for name in changed:
            undefined = state.undefined[name]
            flat = model.live[name].view(torch.uint8).flatten()
            where = (flat != before[name].view(torch.uint8).flatten()).nonzero().flatten().tolist()
            assert len(where) <= undefined.nbytes <= undefined.total_nbytes == flat.numel()
            assert all(any(a <= at < b for a, b in undefined.ranges) for at in where)
        words = "the weights are undefined until" if state.undefined else "no byte of the model"
        assert words in state.error
        for name in state.landed:
            assert f"`{name}`" in state.error
        with pytest.raises(RuntimeError, match="cannot go on after a failure"):
            loadplan.load_planned(model.targets, plan, [])
        expected = model.eager(weights)
        run(model, plan, weights.items())
        assert differing(model.targets, expected) == []
        assert loadplan.state(model.targets).undefined == {}


def test_a_sender_that_raises_leaves_the_reload_active() -> None:
    model = Everything()
    plan = model.plan()
    weights = model.weights(1)

    def send() -> Iterator[tuple[str, Tensor]]:
        yield "q", weights["q"]
        raise Injected

    loadplan.start_reload(model.targets)
    with pytest.raises(Injected):
        loadplan.load_planned(model.targets, plan, send())
    assert loadplan.state(model.targets).state == "active"
    assert loadplan.state(model.targets).landed == ("q",)
    rest = [item for item in weights.items() if item[0] != "q"]
    loadplan.load_planned(model.targets, plan, rest)
    assert set(loadplan.finish_reload(model.targets).names) == set(weights)


def test_of_a_list_the_loader_fails_before_other_names_land() -> None:
    model = Everything()
    plan = model.plan()
    before = bytes_of(model.targets)
    model.fail_in_loader = "half way"
    loadplan.start_reload(model.targets)
    with pytest.raises(RuntimeError, match="OverflowError: half way.*nothing had landed"):
        loadplan.load_planned(model.targets, plan, model.weights(1).items())
    assert differing(model.targets, before) == ["looked"]
    assert list(loadplan.state(model.targets).undefined) == ["looked"]
    assert loadplan.state(model.targets).undefined["looked"].ranges == ((0, 8),)


# ------------------------------------------------------------------ hooks
class Swapping(Everything):
    """The kernel format is the load format with the rows of `q` turned round, in place."""

    def __init__(self, fail: str = "") -> None:
        super().__init__(restore=self.restore, process=self.process)
        self.fail = fail
        self.in_load_format = False
        self.calls: list[str] = []

    def _turn(self, hook: str) -> None:
        self.calls.append(hook)
        if self.fail == f"{hook} at once":
            raise Injected(hook)
        self.live["q"].copy_(self.live["q"].flip(0))
        if self.fail == f"{hook} half way":
            raise Injected(hook)

    def restore(self, layer: Any) -> None:
        assert not self.in_load_format
        self._turn("restore")
        self.in_load_format = True

    def process(self, layer: Any) -> None:
        assert self.in_load_format
        self._turn("process")
        self.in_load_format = False


HOOKS = ["restore at once", "restore half way", "process at once", "process half way"]


@pytest.mark.parametrize("fail", HOOKS)
def test_a_hook_that_raises_in_an_atomic_update(fail: str) -> None:
    model = Swapping()
    plan = model.plan()
    before = bytes_of(model.targets)
    model.fail = fail
    with pytest.raises(RuntimeError, match="the hook `[a-z]+`.*Injected.*the old bytes are back"):
        run(model, plan, model.weights(1).items(), atomic=True)
    assert differing(model.targets, before) == []
    assert loadplan.state(model.targets).state == "idle"


@pytest.mark.parametrize("fail", HOOKS)
def test_a_hook_that_raises_leaves_everything_undefined(fail: str) -> None:
    model = Swapping()
    plan = model.plan()
    model.fail = fail
    with pytest.raises(RuntimeError, match="the hook.*with the targets, raised Injected") as error:
        run(model, plan, model.weights(1).items())
    assert isinstance(error.value.__cause__, RuntimeError)
    state = loadplan.state(model.targets)
    assert state.state == "failed" and set(state.undefined) == set(model.live)
    assert all(item.nbytes == item.total_nbytes for item in state.undefined.values())


def test_a_reload_that_ends_early_gives_the_kernel_format_back() -> None:
    model = Swapping()
    plan = model.plan()
    before = bytes_of(model.targets)
    loadplan.start_reload(model.targets)
    assert differing(model.targets, before) == ["q"]
    loadplan.abort_reload(model.targets)
    assert differing(model.targets, before) == [] and model.calls[-2:] == ["restore", "process"]
    assert loadplan.state(model.targets).state == "idle"
    loadplan.start_reload(model.targets)
    with pytest.raises(ValueError, match="no byte of the model was written"):
        loadplan.load_planned(model.targets, plan, [("z", torch.zeros(1))])
    assert differing(model.targets, before) == []
    # After a write the load format stays, and is not restored a second time.
    loadplan.start_reload(model.targets)
    loadplan.load_planned(model.targets, plan, [("q", torch.zeros(4, 6))])
    loadplan.abort_reload(model.targets)
    assert loadplan.state(model.targets).state == "failed" and model.calls[-1] == "restore"
    run(model, plan, model.weights(1).items())
    assert model.calls[-2:] == ["restore", "process"]
    assert torch.equal(model.live["q"], model.weights(1)["q"].flip(0))


def test_hooks_must_not_load() -> None:
    model = Everything()
    plan = model.plan()

    def process(layer: Any) -> None:
        loadplan.load_planned(targets, plan, [])

    targets = Targets(model.live, model.load_weights, process=process)
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, model.weights(1).items())
    with pytest.raises(RuntimeError, match="while `finish_reload` runs the hooks"):
        loadplan.finish_reload(targets)


class Reshaped(nn.Module):
    """Post-processing views the weight as its transpose, over the same storage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.fail = False

    def load_weights(self, weights: Weights) -> None:
        for _, weight in weights:
            self.weight.data.copy_(weight)

    def targets(self) -> Targets:
        def restore(layer: nn.Module) -> None:
            layer.weight.data = layer.weight.data.t()

        def process(layer: nn.Module) -> None:
            layer.weight.data = layer.weight.data.t()
            if self.fail:
                raise Injected

        return Targets(self, restore=restore, process=process)


def test_a_layout_over_the_same_storage() -> None:
    model = Reshaped()
    targets = model.targets()
    model.weight.data = model.weight.data.t()
    place = model.weight.data_ptr()
    for atomic in (False, True):
        loadplan.start_reload(targets, atomic=atomic)
        plan = loadplan.plan_loads(targets, {"weight": ((2, 3), F32)})
        weights = torch.rand(2, 3)
        loadplan.load_planned(targets, plan, [("weight", weights)])
        loadplan.finish_reload(targets)
        assert torch.equal(model.weight.t(), weights) and model.weight.data_ptr() == place
    model.fail = True
    loadplan.start_reload(targets, atomic=True)
    loadplan.load_planned(targets, plan, [("weight", torch.rand(2, 3))])
    with pytest.raises(RuntimeError, match="the model itself, raised Injected"):
        loadplan.finish_reload(targets)
    assert torch.equal(model.weight.t(), weights) and model.weight.shape == (3, 2)


def test_a_loader_that_moves_a_target_and_raises() -> None:
    live = {"w": torch.rand(2), "v": torch.rand(2)}
    param = nn.Parameter(live["w"])
    raises = [False]

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            if name == "v":
                live["v"].copy_(weight)
            elif weight.sum().item() > -1:
                param.data = weight * 2
                if raises[0]:
                    raise Injected

    targets = Targets({"w": param, "v": live["v"]}, load_weights)
    plan = loadplan.plan_loads(targets, {"w": ((2,), F32), "v": ((2,), F32)})
    place, before = param.data_ptr(), param.detach().clone()
    raises[0] = True
    loadplan.start_reload(targets, atomic=True)
    with pytest.raises(RuntimeError, match="Injected"):
        loadplan.load_planned(targets, plan, [("w", torch.ones(2))])
    assert param.data_ptr() == place and torch.equal(param, before)
    raises[0] = False
    loadplan.start_reload(targets, required=["*"])
    loadplan.load_planned(targets, plan, [("w", torch.ones(2)), ("v", torch.ones(2))])
    receipt = loadplan.finish_reload(targets)
    assert param.data_ptr() == place and param.tolist() == [2, 2]
    assert receipt.coverage["w"].nbytes == 8


@pytest.mark.parametrize("atomic", [False, True])
def test_a_loader_that_cuts_a_tie_is_refused(atomic: bool) -> None:
    """`a.data = w` leaves b, which showed the same bytes, where it was."""
    whole = torch.zeros(6)
    a, b, c = nn.Parameter(whole[:4]), nn.Parameter(whole[2:4]), nn.Parameter(whole[4:])

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            {"a": a, "c": c}[name].data = weight.clone()

    targets = Targets({"a": a, "b": b, "c": c}, load_weights)
    plan = loadplan.plan_loads(targets, {"a": ((4,), F32)})
    loadplan.start_reload(targets, atomic=atomic)
    with pytest.raises(RuntimeError, match="`a` has moved"):
        loadplan.load_planned(targets, plan, [("a", torch.ones(4))])
    assert torch.equal(whole, torch.zeros(6)) and a.data_ptr() == whole.data_ptr()
    # Nothing else shows the bytes of c, though its storage.
    loadplan.start_reload(targets)
    plan = loadplan.plan_loads(targets, {"c": ((2,), F32)})
    loadplan.load_planned(targets, plan, [("c", torch.ones(2))])
    loadplan.finish_reload(targets)
    assert whole.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_loader_that_moves_both_sides_of_a_tie() -> None:
    whole = torch.zeros(4)
    a, b = nn.Parameter(whole), nn.Parameter(whole[2:])

    def load_weights(weights: Weights) -> None:
        for _, weight in weights:
            a.data = weight.clone()
            b.data = a.data[2:]

    targets = Targets({"a": a, "b": b}, load_weights)
    plan = loadplan.plan_loads(targets, {"w": ((4,), F32)})
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, [("w", torch.arange(4.0))])
    loadplan.finish_reload(targets)
    assert whole.tolist() == [0, 1, 2, 3] and b.data_ptr() == whole[2:].data_ptr()


def test_a_mapping_of_weights() -> None:
    live = {"w": torch.zeros(2), "v": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    targets = Targets(live, load_weights)
    weights = {"w": torch.ones(2), "v": torch.full((2,), 2.0)}
    plan = loadplan.plan_loads(targets, weights)
    loadplan.start_reload(targets)
    loadplan.load_planned(targets, plan, weights)
    assert loadplan.finish_reload(targets).names == ("w", "v")
    assert all(torch.equal(live[name], weight) for name, weight in weights.items())


# ------------------------------------------------------------------ destinations
def test_destinations_in_an_atomic_update() -> None:
    live = {"w": torch.rand(4), "v": torch.rand(2)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {"w": ((4,), F32), "v": ((2,), F32)})
    before = bytes_of(targets)
    loadplan.start_reload(targets, atomic=True)
    for name in plan.entries:
        for _, dest in plan.get_dest(name) or []:
            dest.fill_(9)
    loadplan.abort_reload(targets)
    assert differing(targets, before) == []
    # A later update: the engine kept its destinations.
    loadplan.start_reload(targets, atomic=True)
    dest.fill_(9)
    loadplan.abort_reload(targets)
    assert differing(targets, before) == []


def test_destinations_beside_live_bytes_that_are_read() -> None:
    live = {"w": torch.rand(4), "old": torch.rand(4), "v": torch.rand(2)}

    def load_weights(weights: Weights) -> None:
        live["old"].copy_(live["w"])
        for name, weight in weights:
            live[name].copy_(weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {"v": ((2,), F32), "w": ((4,), F32)})
    assert plan.get_dest("w") is None
    loadplan.start_reload(targets)
    [(_, dest)] = plan.get_dest("v") or []
    dest.fill_(3)
    plan.delivered("v")
    before = live["w"].clone()
    loadplan.load_planned(targets, plan, [("w", torch.ones(4))])
    loadplan.finish_reload(targets)
    assert torch.equal(live["old"], before) and live["v"].tolist() == [3, 3]
    # Everything else may go through destinations, with nothing delivered before them.
    live_only = loadplan.plan_loads(targets, {"v": ((2,), F32)})
    [(_, dest)] = live_only.get_dest("v") or []
    loadplan.start_reload(targets)
    dest.fill_(4)
    loadplan.finish_reload(targets)
    assert live["old"].tolist() == [1, 1, 1, 1] and live["v"].tolist() == [4, 4]


# ------------------------------------------------------------------ completeness
def test_required_targets_of_a_plan_with_fallbacks() -> None:
    model = Everything()
    plan = model.plan()
    with pytest.raises(RuntimeError, match=r"`free` \(8 of 8 bytes\)"):
        run(model, plan, model.weights(1).items(), required=["*"])
    run(model, plan, model.weights(1).items(), required=["[!f]*"])
    before = bytes_of(model.targets)
    with pytest.raises(RuntimeError, match=r"`free` \(8 of 8 bytes\).*idle as before"):
        run(model, plan, model.weights(2).items(), required=["*"], atomic=True)
    assert differing(model.targets, before) == []


def test_required_targets_are_refused_before_a_write_where_the_trace_shows_them() -> None:
    live = {"w": torch.zeros(2), "v": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:  # `a` and `b` overlap
        for _, weight in weights:
            live["w"].copy_(weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {"a": ((2,), F32), "b": ((2,), F32)})
    assert plan.has_fallbacks
    loadplan.start_reload(targets, required=["v"])
    with pytest.raises(RuntimeError, match=r"`v` \(8 of 8 bytes\)"):
        loadplan.load_planned(targets, plan, [("a", torch.ones(2)), ("b", torch.ones(2))])
    assert loadplan.state(targets).state == "active" and not live["w"].any()
    loadplan.abort_reload(targets)
    loadplan.start_reload(targets, required=["w"])
    loadplan.load_planned(targets, plan, [("a", torch.ones(2)), ("b", torch.ones(2))])
    assert loadplan.finish_reload(targets).coverage["w"].nbytes == 8


def test_a_name_with_several_destinations() -> None:
    token = [(0, 1, 0)]
    live = {"experts": torch.zeros(3, 2)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            for slot, expert in enumerate(token[0]):
                if name == f"expert.{expert}":
                    live["experts"][slot].copy_(weight)

    targets = Targets(live, load_weights, placement=lambda: token[0])
    metas = {f"expert.{i}": ((2,), F32) for i in (0, 1)}
    plan = loadplan.plan_loads(targets, metas)
    assert len(plan.get_dest("expert.0") or []) == 2
    weights = {name: torch.full((2,), float(index)) for index, name in enumerate(metas, 1)}
    loadplan.start_reload(targets, required=["*"])
    loadplan.load_planned(targets, plan, weights.items())
    loadplan.finish_reload(targets)
    assert live["experts"].tolist() == [[1, 1], [2, 2], [1, 1]]
    token[0] = (1, 0, 1)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="the placement has changed"):
        loadplan.load_planned(targets, plan, weights.items())
    assert live["experts"].tolist() == [[1, 1], [2, 2], [1, 1]]


def test_a_target_that_sleeps_is_refused_by_name() -> None:
    model = Everything()
    plan = model.plan()
    before = bytes_of(model.targets)
    model.live["padded"].untyped_storage().resize_(0)
    loadplan.start_reload(model.targets)
    with pytest.raises(RuntimeError, match="`padded` has no memory"):
        loadplan.load_planned(model.targets, plan, model.weights(1).items())
    loadplan.abort_reload(model.targets)
    del before["padded"]
    assert differing(model.targets, before) == []


def test_a_second_update_costs_no_trace() -> None:
    calls = [0]
    live = {"w": torch.zeros(2)}

    def load_weights(weights: Weights) -> None:
        calls[0] += 1
        for _, weight in weights:
            live["w"].copy_(weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, {"w": ((2,), F32)})
    traced = calls[0]
    for value in range(3):
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, [("w", torch.full((2,), float(value)))])
        loadplan.finish_reload(targets)
        assert live["w"].tolist() == [value, value] and calls[0] == traced


# ------------------------------------------------------------------ what a look leaves alone
def copying(live: dict[str, Tensor]) -> Targets:
    def load_weights(weights: Any) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    return Targets(live, load_weights)


def test_a_look_at_a_destination_vouches_for_no_other_name() -> None:
    live = {name: torch.zeros(4) for name in "abc"}
    targets = copying(live)
    plan = loadplan.plan_loads(targets, live)
    assert plan.get_dest("a")
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="2 planned name.s. did not arrive: `b`, `c`"):
        loadplan.finish_reload(targets)
    loadplan.load_planned(targets, plan, [("b", torch.ones(4))])
    with pytest.raises(RuntimeError, match="2 planned name.s. did not arrive: `a`, `c`"):
        loadplan.finish_reload(targets)


def test_an_engine_that_reported_must_report_again() -> None:
    live = {name: torch.zeros(4) for name in "ab"}
    targets = copying(live)
    plan = loadplan.plan_loads(targets, live)
    places = {name: plan.get_dest(name) or [] for name in live}
    loadplan.start_reload(targets)
    for name in live:
        plan.delivered(name)
    loadplan.finish_reload(targets)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="did not arrive: `a`, `b`"):
        loadplan.finish_reload(targets)
    places["a"][0][1][:2].fill_(99)  # and the transport dies
    loadplan.abort_reload(targets)
    assert loadplan.state(targets).state == "failed"
    assert loadplan.state(targets).undefined["a"].nbytes == 16


def test_undefined_bytes_are_known_by_every_name() -> None:
    tied = torch.zeros(4)
    live = {"a": tied, "b": tied.view(2, 2)}

    def load_weights(weights: Any) -> None:
        for _, weight in weights:
            tied.add_(weight)

    targets = Targets(live, load_weights)
    weights = {"d": torch.ones(4)}
    plan = loadplan.plan_loads(targets, weights)
    loadplan.start_reload(targets)
    with pytest.raises(ValueError, match="undefined until"):
        loadplan.load_planned(targets, plan, [*weights.items(), ("z", torch.ones(1))])
    live["a"] = live.pop("a")
    plan = loadplan.plan_loads(targets, weights)
    loadplan.start_reload(targets)
    with pytest.raises(RuntimeError, match="computes from the bytes that `a` held before"):
        loadplan.load_planned(targets, plan, weights.items())


def test_a_call_ends_whatever_fails_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"f": torch.zeros(4)}

    def load_weights(weights: Any) -> None:
        for name, weight in weights:
            live[name].copy_(weight if weight.sum() > 0 else -weight)

    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, live)

    def fail(*_: object) -> None:
        raise Injected("after the call")

    loadplan.start_reload(targets)
    monkeypatch.setattr("loadplan._direct.Direct.called", fail)
    with pytest.raises(RuntimeError, match="Injected: after the call"):
        loadplan.load_planned(targets, plan, [("f", torch.ones(4))])
    assert loadplan.state(targets).state == "failed"


def test_a_moved_target_stays_away_where_another_shares_an_element_with_it() -> None:
    """The old place of that element holds the value of the other one."""
    base = torch.arange(5.0)
    live = {"a": base[:3], "b": base[2:]}
    targets = Targets(live)
    places = Places(targets)
    live["a"].data = torch.full((3,), 9.0)
    places.keep(targets)
    assert base.tolist() == [0, 1, 2, 3, 4]
    assert live["a"].tolist() == [9, 9, 9]
