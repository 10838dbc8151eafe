"""Updates of targets on a GPU, with and without batched copies, against the eager loader.

The same programs run on the CPU with batches run by the reference, so that what is tested here is
tested where there is no GPU too.  On a GPU: ``./dev test-gpu``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import loadplan
from loadplan import BucketItem, Targets
from loadplan._streams import record_event

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
Weights = Iterable[tuple[str, Tensor]]
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU: torch.cuda.is_available() is False")


@dataclass(frozen=True)
class Way:
    device: str
    batch: str  # LOADPLAN_CUDA_BATCH


WAYS = [
    pytest.param(Way("cpu", "reference"), id="reference"),
    pytest.param(Way("cuda", "0"), id="gpu-each", marks=needs_gpu),
    pytest.param(Way("cuda", "1"), id="gpu-batched", marks=needs_gpu),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    chosen: Way = request.param
    monkeypatch.setenv("LOADPLAN_CUDA_BATCH", chosen.batch)
    return chosen


class Engine:
    """A loader as engines have them: shards by rows and by columns, fused projections, experts in
    one tensor, a transpose, a cast, padding, a product."""

    EXPERTS = 12
    RANK = slice(64, 128)

    def __init__(self, device: str) -> None:
        self.device = device
        self.live = {
            "qkv": self.empty(192, 96, BF16),
            "o": self.empty(96, 64, BF16),
            "w13": torch.full((self.EXPERTS, 128, 96), 7, dtype=BF16, device=device),
            "w2": torch.full((self.EXPERTS, 96, 64), 7, dtype=BF16, device=device),
            "router": self.empty(96, self.EXPERTS, F32),
            "norm": self.empty(96, 1, BF16).view(96),
            "padded": self.empty(100, 1, F32).view(100),
            "scaled": self.empty(96, 1, F32).view(96),
            "odd": self.empty(1, 77, U8).view(77),
        }
        self.targets = Targets(self.live, self.load_weights)
        self.metas = {
            **{name: ((512, 96), BF16) for name in ("q", "k", "v")},
            "o": ((96, 512), BF16),
            "router": ((self.EXPERTS, 96), F32),
            "norm": ((96,), F32),
            "pad": ((90,), F32),
            "scale": ((96,), F32),
            "odd": ((100,), U8),
        }
        for expert in range(self.EXPERTS):
            self.metas[f"{expert}.gate"] = ((512, 96), BF16)
            self.metas[f"{expert}.up"] = ((512, 96), BF16)
            self.metas[f"{expert}.down"] = ((96, 512), BF16)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, columns), 7, dtype=dtype, device=self.device)

    def load_weights(self, weights: Weights) -> None:
        live, rank = self.live, self.RANK
        for name, weight in weights:
            expert, _, part = name.rpartition(".")
            if name in "qkv":
                live["qkv"].view(3, 64, 96)["qkv".index(name)].copy_(weight[rank])
            elif name == "o":
                live["o"].copy_(weight[:, rank])
            elif part == "gate":
                live["w13"][int(expert), :64].copy_(weight[rank])
            elif part == "up":
                live["w13"][int(expert), 64:].copy_(weight[rank])
            elif part == "down":
                live["w2"][int(expert)].copy_(weight[:, rank])
            elif name == "router":
                live["router"].copy_(weight.t())
            elif name == "norm":
                live["norm"].copy_(weight)
            elif name == "pad":
                live["padded"].zero_()
                live["padded"][:90].copy_(weight)
            elif name == "scale":
                live["scaled"].copy_(weight * 2)
            else:
                live["odd"].copy_(weight[11:88])

    def weights(self, seed: int, device: str) -> dict[str, Tensor]:
        """Any bits where they are copied, NaNs among them; numbers where they are used."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, (shape, dtype) in self.metas.items():
            count = torch.Size(shape).numel()
            raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator)
            value = raw.to(U8).view(dtype).view(shape)
            if name in ("norm", "scale"):
                value = torch.rand(shape, generator=generator)
            made[name] = value.to(device)
        return made

    def wipe(self) -> None:
        for tensor in self.live.values():
            tensor.fill_(7)

    def bytes(self) -> dict[str, Tensor]:
        return {
            name: t.detach().cpu().contiguous().view(U8).clone() for name, t in self.live.items()
        }

    def eagerly(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        self.wipe()
        self.load_weights(weights.items())
        left = self.bytes()
        self.wipe()
        return left


@pytest.fixture
def engine(way: Way) -> Engine:
    return Engine(way.device)


@pytest.fixture
def plan(engine: Engine) -> loadplan.LoadPlan:
    return loadplan.plan_loads(engine.targets, engine.metas)


def check(engine: Engine, expected: dict[str, Tensor]) -> None:
    got = engine.bytes()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def test_a_bucket_of_tensors_on_the_device(
    way: Way, engine: Engine, plan: loadplan.LoadPlan
) -> None:
    for seed in range(3):  # one plan, several updates
        weights = engine.weights(seed, way.device)
        expected = engine.eagerly(weights)
        loadplan.start_reload(engine.targets)
        names = list(weights)
        random.Random(seed).shuffle(names)
        event = loadplan.load_planned(engine.targets, plan, [(n, weights[n]) for n in names])
        assert (event is None) == (way.device == "cpu")
        if event is not None:
            event.synchronize()
        for weight in weights.values():
            weight.zero_()
        loadplan.finish_reload(engine.targets)
        check(engine, expected)


def test_a_sender_that_reuses_its_memory(way: Way, engine: Engine, plan: loadplan.LoadPlan) -> None:
    weights = engine.weights(1, way.device)
    expected = engine.eagerly(weights)
    memory = torch.empty(512 * 96 * 4, dtype=U8, device=way.device)

    def reused() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            view = memory[: weight.nbytes].view(weight.dtype).view(weight.shape)
            yield name, view.copy_(weight)

    loadplan.start_reload(engine.targets)
    loadplan.load_planned(engine.targets, plan, reused())
    loadplan.finish_reload(engine.targets)
    check(engine, expected)


@pytest.mark.parametrize("source", ["host", "device"])
def test_a_flat_buffer(way: Way, engine: Engine, plan: loadplan.LoadPlan, source: str) -> None:
    device = "cpu" if source == "host" else way.device
    weights = engine.weights(2, device)
    expected = engine.eagerly(engine.weights(2, way.device))
    offset, items, parts = 0, [], []
    for index, (name, weight) in enumerate(weights.items()):
        gap = (0, 16, 1, 2)[index % 4]  # tensors at any offset
        parts += [torch.zeros(gap, dtype=U8, device=device), weight.reshape(-1).view(U8)]
        items.append(BucketItem(name, weight.shape, weight.dtype, offset + gap))
        offset += gap + weight.nbytes
    loadplan.start_reload(engine.targets)
    loadplan.load_bucket(engine.targets, plan, torch.cat(parts), items)
    loadplan.finish_reload(engine.targets)
    check(engine, expected)


@pytest.mark.parametrize("staging", [1 << 20, 1 << 28])
def test_files(
    way: Way, engine: Engine, plan: loadplan.LoadPlan, tmp_path: Path, staging: int
) -> None:
    weights = engine.weights(3, "cpu")
    expected = engine.eagerly(engine.weights(3, way.device))
    save_file(weights, tmp_path / "model.safetensors")
    loadplan.start_reload(engine.targets)
    loadplan.load_files(engine.targets, plan, tmp_path, progress=False, max_staging_bytes=staging)
    loadplan.finish_reload(engine.targets)
    check(engine, expected)


def test_a_failure_gives_old_bytes_back(way: Way, engine: Engine, plan: loadplan.LoadPlan) -> None:
    before = engine.bytes()
    weights = engine.weights(4, way.device)
    loadplan.start_reload(engine.targets, atomic=True)
    broken = {**weights, "odd": torch.zeros(5, dtype=U8, device=way.device)}
    with pytest.raises(ValueError, match="`odd` arrived with shape .* the old bytes are back"):
        loadplan.load_planned(engine.targets, plan, broken.items())
    check(engine, before)


@needs_gpu
@pytest.mark.parametrize("batch", ["0", "1"])
def test_work_goes_on_the_current_stream(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADPLAN_CUDA_BATCH", batch)
    engine = Engine("cuda")
    plan = loadplan.plan_loads(engine.targets, engine.metas)
    weights = engine.weights(5, "cuda")
    expected = engine.eagerly(weights)
    loadplan.start_reload(engine.targets)  # the first time a plan is used something may wait
    loadplan.load_planned(engine.targets, plan, weights.items())
    loadplan.finish_reload(engine.targets)
    engine.wipe()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        torch.cuda._sleep(50_000_000)
        for name, weight in weights.items():
            late[name].copy_(weight)  # behind the sleep: read too early, it is zeros
        loadplan.start_reload(engine.targets)
        event = loadplan.load_planned(engine.targets, plan, late.items())
        assert event is not None and not event.query()  # nobody waited
        loadplan.finish_reload(engine.targets)
    event.synchronize()
    torch.cuda.synchronize()
    check(engine, expected)


@needs_gpu
@pytest.mark.parametrize("batch", ["0", "1"])
def test_graphs_read_what_an_update_leaves(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADPLAN_CUDA_BATCH", batch)
    engine = Engine("cuda")
    plan = loadplan.plan_loads(engine.targets, engine.metas)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(engine.live["w13"].view(torch.int16).sum())
    for seed in range(2):
        weights = engine.weights(seed, "cuda")
        loadplan.start_reload(engine.targets)
        loadplan.load_planned(engine.targets, plan, weights.items())
        loadplan.finish_reload(engine.targets)
        graph.replay()
        assert total.item() == engine.live["w13"].view(torch.int16).sum().item()


def test_an_event_is_behind_the_work_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Stream:
        def __init__(self, gpu: str) -> None:
            self.gpu = gpu

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.gpu} waits for {other.gpu}")

        def record_event(self) -> str:
            done.append(f"event on {self.gpu}")
            return "event"

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    session = SimpleNamespace(gpus=["cuda:1", "cuda:0", "cuda:2"])
    assert record_event(session) == "event"
    assert done == ["cuda:1 waits for cuda:0", "cuda:1 waits for cuda:2", "event on cuda:1"]
    assert record_event(SimpleNamespace(gpus=[])) is None


FLOATS = (torch.float64, F32, torch.float16, BF16) + tuple(
    getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e8m0fnu")
)
INTEGERS = (torch.bool, U8, torch.int8, torch.int16, torch.int32, torch.int64)
CASTS = [
    (source, to)
    for source in INTEGERS + FLOATS
    for to in INTEGERS + FLOATS
    if source != to and (source in INTEGERS or to in FLOATS or to == torch.bool)
]


def every_number(dtype: torch.dtype) -> Tensor:
    """All numbers of up to 16 bits, NaNs among them; of larger ones every sign and exponent, with
    the first bits of the mantissa, and any rest."""
    size = dtype.itemsize
    if size == 1:
        return torch.arange(256).to(U8).view(dtype) if dtype != torch.bool else torch.arange(2) > 0
    high = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    if size == 2:
        return high.view(dtype)
    none = torch.zeros(65536, size // 2 - 1, dtype=torch.int16)
    generator = torch.Generator().manual_seed(size)
    random_bits = torch.randint(-32768, 32768, none.shape, generator=generator)
    rests = [none, torch.full_like(none, -1), torch.full_like(none, 0x1000), random_bits]
    parts = [torch.cat([r.to(torch.int16), high.unsqueeze(1)], 1) for r in rests]
    return torch.cat(parts).reshape(-1).contiguous().view(dtype)


@pytest.mark.parametrize("source, to", CASTS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_casts_leave_the_bits_that_torch_leaves(
    way: Way, source: torch.dtype, to: torch.dtype
) -> None:
    """In rows of 16 bytes and of single items, scattered on either side, in small batches and in
    large ones."""
    numbers = every_number(source).to(way.device)
    if way.device == "cpu":  # lifecycle_test has all of them there
        numbers = numbers[:: max(1, numbers.numel() // 4000)]
        numbers = numbers[: numbers.numel() // 2 * 2].contiguous()
    count = numbers.numel()
    half = count // 2
    live = {f"w{i}": torch.zeros(4, count, device=way.device).to(to) for i in range(5)}

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            target = live[name]
            target[0].copy_(weight[0])
            target[1, : half - 1].copy_(weight[0, 1:half])  # at no multiple of 16 bytes
            target[2, ::2].copy_(weight[0, :half])
            target.view(-1)[3 * count : 3 * count + half].copy_(weight[0, ::2])

    metas = {name: ((1, count), source) for name in live}
    targets = Targets(live, load_weights)
    plan = loadplan.plan_loads(targets, metas)
    for names in (list(live)[:1], list(live)):  # 4 writes, 20 writes
        weights = [(name, numbers.view(1, count)) for name in names]
        for tensor in live.values():
            tensor.zero_()
        load_weights(weights)
        expected = {name: t.view(U8).clone() for name, t in live.items()}
        for tensor in live.values():
            tensor.zero_()
        loadplan.start_reload(targets)
        loadplan.load_planned(targets, plan, weights)
        loadplan.finish_reload(targets, partial=names)
        left = [n for n, t in live.items() if not torch.equal(t.view(U8), expected[n])]
        assert left == []


def test_the_library_of_the_kernel_lies_beside_the_other() -> None:
    library = Path(loadplan.__file__).parent / "libloadplan_cuda.so"
    reason = torch.ops.loadplan.why_no_cuda_batches()
    if library.exists():
        assert reason == ""  # opened without a GPU too
    else:
        assert str(library) in reason
