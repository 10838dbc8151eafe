"""Files and buckets against the eager loader, byte for byte; and the words of every error."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import loader_programs
import pytest
import test_random_loaders
import torch
from safetensors.torch import save_file
from torch import Tensor

import loadplan
from loadplan import FileStats, Targets

F32, BF16 = torch.float32, torch.bfloat16
Weights = Iterable[tuple[str, Tensor]]

FILE_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
CODE_OF = {dtype: code for code, dtype in FILE_DTYPES.items()}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (whole.numel() * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Without padding, in this order: what follows an odd number of bytes is not aligned."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if tensor.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        raw = bytes(bytes_of(tensor).tolist())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": CODE_OF[tensor.dtype], "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def update(targets: Targets, plan: loadplan.LoadPlan, load: Callable[[], object]) -> None:
    loadplan.start_reload(targets)
    load()
    loadplan.finish_reload(targets)


def copies(live: dict[str, Tensor]) -> Targets:
    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            live[name].copy_(weight)

    return Targets(live, load_weights)


@pytest.mark.parametrize("code", FILE_DTYPES)
@pytest.mark.parametrize("pad", [0, 1])
def test_every_dtype_at_any_offset(code: str, pad: int, tmp_path: Path) -> None:
    dtype = FILE_DTYPES[code]
    checkpoint = {
        "pad": random_bytes((pad,), torch.uint8),
        "w": random_bytes((5, 4), dtype, 1),
        "scalar": random_bytes((1,) if code == "F4" else (), dtype, 2),
        "empty": random_bytes((0, 4), dtype, 3),
    }
    file = write(tmp_path / "w.safetensors", checkpoint)
    metas = loadplan.metadata(file)
    assert {meta.name: meta[1:3] for meta in metas} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.items()
    }
    live = {name: random_bytes(tuple(t.shape), t.dtype, 9) for name, t in checkpoint.items()}
    targets = copies(live)
    plan = loadplan.plan_loads(targets, metas)
    update(targets, plan, lambda: loadplan.load_files(targets, plan, file))
    for name, tensor in checkpoint.items():
        assert torch.equal(bytes_of(live[name]), bytes_of(tensor)), name


class ByFilesAndBuckets(test_random_loaders.BothWays):
    """A program whose weights come in files, buckets and full tensors, all in one update."""

    def update(self, targets: Targets, plan: loadplan.LoadPlan, index: int) -> None:
        loadplan.start_reload(targets)
        order = self.program.names()
        keeps_order = plan.overlaps and self.program.overlaps != "last_wins"
        if not keeps_order:
            self.rng.shuffle(order)
        with tempfile.TemporaryDirectory() as folder:
            while order:
                count = self.rng.randint(1, len(order))
                names, order = order[:count], order[count:]
                group = {name: self.weights[index][name] for name in names}
                self.rng.choice([self.by_files, self.by_bucket, self.by_tensors])(
                    targets, plan, group, Path(folder) / str(len(order))
                )
        loadplan.finish_reload(targets)

    def by_tensors(
        self, targets: Targets, plan: loadplan.LoadPlan, group: dict[str, Tensor], folder: Path
    ) -> None:
        loadplan.load_planned(targets, plan, [(n, t.clone()) for n, t in group.items()])

    def by_files(
        self, targets: Targets, plan: loadplan.LoadPlan, group: dict[str, Tensor], folder: Path
    ) -> None:
        folder.mkdir()
        pad = random_bytes((self.rng.randrange(8),), torch.uint8)
        files = []
        for name, tensor in group.items():
            if not files or self.rng.random() < 0.3:
                files.append({f"pad{len(files)}": pad})
            files[-1][name] = tensor
        paths = [write(folder / f"{i}.safetensors", file) for i, file in enumerate(files)]
        loadplan.load_files(
            targets,
            plan,
            paths,
            undeclared="skip",
            threads=self.rng.randint(1, 3),
            direct=self.rng.random() < 0.2,
            gap_bytes=self.rng.choice([None, 0]),
        )

    def by_bucket(
        self, targets: Targets, plan: loadplan.LoadPlan, group: dict[str, Tensor], folder: Path
    ) -> None:
        metas = []
        parts = [random_bytes((self.rng.randrange(8),), torch.uint8)]
        for name, tensor in group.items():
            offset = sum(part.numel() for part in parts)
            metas.append(loadplan.BucketItem(name, tensor.shape, tensor.dtype, offset))
            parts += [bytes_of(tensor), random_bytes((self.rng.randrange(3),), torch.uint8)]
        buffer = torch.cat(parts)
        loadplan.load_bucket(targets, plan, buffer, metas)
        buffer.fill_(77)


def test_files_and_buckets_leave_what_the_loader_leaves() -> None:
    seed = os.environ.get("LOADPLAN_TEST_SEED") or str(random.SystemRandom().getrandbits(32))
    first = int(os.environ.get("LOADPLAN_FIRST_PROGRAM", 0))
    count = int(os.environ.get("LOADPLAN_PROGRAMS", 300))
    kinds: collections.Counter[str] = collections.Counter()
    for index in range(first, first + count):
        program = loader_programs.generate(f"{seed}/{index}")
        outcome = ByFilesAndBuckets(program).run()
        kinds[outcome.kind] += 1
        assert outcome.kind not in ("failed", "invalid"), (
            f"{outcome.detail}\n{loader_programs.describe(program)}\n"
            f"replay: LOADPLAN_TEST_SEED={seed} LOADPLAN_FIRST_PROGRAM={index} "
            "LOADPLAN_PROGRAMS=1 python -m pytest -s tests/python/test_files.py"
        )
    assert kinds["planned"] + kinds["fallback"] > count / 2


# ------------------------------------------------------------------ one rank of several
HIDDEN, RANK, RANKS = 1024, 3, 8
PART = HIDDEN // RANKS


class Sharded:
    """A layer in a file, and rank 3 of 8: q by rows, o by columns, a whole norm, nothing of other.

    ``expected`` is what its loader leaves of the file, ``live`` what an update writes.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        self.checkpoint = {
            "q": random_bytes((HIDDEN, HIDDEN), BF16, 1),
            "o": random_bytes((HIDDEN, HIDDEN), BF16, 2),
            "norm": random_bytes((HIDDEN,), BF16, 3),
            "other": random_bytes((HIDDEN, HIDDEN), BF16, 4),
        }
        save_file(self.checkpoint, self.file)
        self.expected, self.live = self.zeros(), self.zeros()
        self.load(self.expected, self.checkpoint.items())
        self.targets = Targets(self.live, lambda weights: self.load(self.live, weights))
        self.plan = loadplan.plan_loads(self.targets, loadplan.metadata(self.file))

    @staticmethod
    def zeros() -> dict[str, Tensor]:
        return {
            "q": torch.zeros(PART, HIDDEN, dtype=BF16),
            "o": torch.zeros(HIDDEN, PART, dtype=BF16),
            "norm": torch.zeros(HIDDEN, dtype=BF16),
        }

    @staticmethod
    def load(live: dict[str, Tensor], weights: Weights) -> None:
        for name, weight in weights:
            if name == "q":
                live["q"].copy_(weight.narrow(0, RANK * PART, PART))
            elif name == "o":
                live["o"].copy_(weight.narrow(1, RANK * PART, PART))
            elif name == "norm":
                live["norm"].copy_(weight)

    def load_files(self, **options: Any) -> FileStats:
        """An active reload's, over zeros."""
        for tensor in self.live.values():
            tensor.zero_()
        loadplan.start_reload(self.targets)
        return loadplan.load_files(self.targets, self.plan, self.file, **options)

    def check(self) -> None:
        for name, tensor in self.expected.items():
            assert torch.equal(bytes_of(self.live[name]), bytes_of(tensor)), name


def test_a_rank_reads_its_ranges_and_no_more(tmp_path: Path) -> None:
    rank = Sharded(tmp_path)
    seen: list[FileStats] = []
    stats = rank.load_files(gap_bytes=512, progress=seen.append)
    receipt = loadplan.finish_reload(rank.targets)
    rank.check()
    needed = 2 * HIDDEN * HIDDEN * 2 // RANKS + HIDDEN * 2
    assert stats.needed_nbytes == needed == receipt.nbytes
    assert needed <= stats.read_nbytes <= needed + 1024  # `norm` and `q` may be read together
    assert stats.names == stats.names_done == 4
    assert stats.in_place_nbytes == 0  # that is for files that may be mapped: see gap_bytes
    assert set(receipt.names) == set(rank.checkpoint)
    assert seen[-1].names_done == 4
    assert stats.seconds > 0
    assert stats.bytes_per_second > 0


def test_gaps_are_read_along_where_that_is_cheaper(tmp_path: Path) -> None:
    rank = Sharded(tmp_path)
    read = []
    for gap_bytes in (0, 1 << 20):
        read.append(rank.load_files(gap_bytes=gap_bytes).read_nbytes)
        loadplan.finish_reload(rank.targets)
        rank.check()
    assert read[1] > 4 * read[0]  # all of `o`


def test_columns_of_mapped_files_and_of_files_that_are_open_for_writing(tmp_path: Path) -> None:
    rank = Sharded(tmp_path)
    read = []
    for mode in ("rb", "r+b"):  # with the second nobody can be kept from writing: it is read
        with rank.file.open(mode):
            stats = rank.load_files()
            loadplan.finish_reload(rank.targets)
        rank.check()
        assert stats.planned_nbytes >= stats.needed_nbytes
        read.append(stats.read_nbytes)
    assert read[1] >= read[0] >= stats.needed_nbytes


# ------------------------------------------------------------------ errors and interruptions
CUTS_SHORT = """
import itertools, os, sys, time
path = sys.argv[1]
whole = open(path, "rb").read()
for i in itertools.count():
    os.truncate(path, len(whole) * (i % 4) // 4)
    with open(path, "r+b") as file:
        file.write(whole)
    time.sleep(i % 8 / 1000)
"""


def test_another_process_that_cuts_a_file_short_ends_no_load_by_a_signal(tmp_path: Path) -> None:
    rank = Sharded(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", CUTS_SHORT, str(rank.file)])
    failed = 0
    try:
        stop = time.monotonic() + 3
        while time.monotonic() < stop:
            try:
                rank.load_files()
            except (RuntimeError, ValueError) as error:
                failed += 1
                assert str(rank.file) in str(error), error
                if loadplan.state(rank.targets).state == "active":
                    loadplan.abort_reload(rank.targets)
                continue
            loadplan.finish_reload(rank.targets)
            rank.check()
    finally:
        other.kill()
        other.wait()
    assert failed > 0
    assert len(os.listdir("/proc/self/fd")) < 100


def two_names(tmp_path: Path) -> tuple[Targets, loadplan.LoadPlan, Path, dict[str, Tensor]]:
    live = {"a": torch.full((300_000,), 7.0), "b": torch.full((3,), 7.0)}
    targets = copies(live)
    file = write(tmp_path / "ab.safetensors", {"a": torch.ones(300_000), "b": torch.ones(3)})
    return targets, loadplan.plan_loads(targets, loadplan.metadata(file)), file, live


def test_a_truncated_file_writes_nothing(tmp_path: Path) -> None:
    targets, plan, file, live = two_names(tmp_path)
    os.truncate(file, file.stat().st_size - 5)
    loadplan.start_reload(targets)
    with pytest.raises(ValueError, match=r"ab.safetensors`: `b` has .* cut short"):
        loadplan.load_files(targets, plan, file)
    assert loadplan.state(targets).state == "active"  # nothing has arrived
    assert live["a"].eq(7).all()
    loadplan.abort_reload(targets)


def test_a_file_that_is_not_what_was_planned(tmp_path: Path) -> None:
    targets, plan, file, live = two_names(tmp_path)
    for changed, words in (
        ({"a": torch.ones(300_000), "b": torch.ones(4)}, r"`b` arrived with shape \[4\]"),
        ({"a": torch.ones(300_000), "b": torch.ones(3).half()}, "`b` arrived as float16"),
        ({"a": torch.ones(300_000), "c": torch.ones(3)}, "holds `c` which was not declared"),
    ):
        write(file, changed)
        loadplan.start_reload(targets)
        with pytest.raises(ValueError, match=f"ab.safetensors.*{words}"):
            loadplan.load_files(targets, plan, file)
        assert loadplan.state(targets).state == "failed"
        assert not loadplan.state(targets).undefined
        assert live["a"].eq(7).all()
    loadplan.start_reload(targets)
    loadplan.load_files(targets, plan, file, undeclared="skip")
    with pytest.raises(RuntimeError, match="did not arrive: `b`"):
        loadplan.finish_reload(targets)
    loadplan.load_planned(targets, plan, [("b", torch.ones(3))])
    loadplan.finish_reload(targets)
    assert live["a"].eq(1).all()


def test_a_file_cut_short_between_two_steps(tmp_path: Path) -> None:
    targets, plan, file, _ = two_names(tmp_path)
    loadplan.start_reload(targets)
    session = loadplan.reload.session_of(targets)
    session.begin(plan)
    load = session.handle.load_files(plan._handle, [str(file)], [1, 0, 1 << 16, 0, 0])
    os.truncate(file, 1000)
    with pytest.raises(RuntimeError, match=r"ab.safetensors` was changed while it was read"):
        while not load.step(1.0):
            pass
    assert loadplan.state(targets).state == "failed"


def test_an_interruption_fails_the_reload(tmp_path: Path) -> None:
    targets, plan, file, live = two_names(tmp_path)

    def interrupt(stats: FileStats) -> None:
        raise KeyboardInterrupt

    loadplan.start_reload(targets)
    with pytest.raises(KeyboardInterrupt):
        loadplan.load_files(targets, plan, file, progress=interrupt)
    # All had landed when the callback was called for the first time, or the reload has failed.
    assert loadplan.state(targets).state in ("active", "failed")
    loadplan.start_reload(targets) if loadplan.state(targets).state == "failed" else None
    if "a" not in loadplan.state(targets).landed:
        loadplan.load_files(targets, plan, file)
    loadplan.finish_reload(targets)
    assert live["a"].eq(1).all()


def test_names_come_once_whatever_brings_them(tmp_path: Path) -> None:
    targets, plan, file, _ = two_names(tmp_path)
    loadplan.start_reload(targets)
    loadplan.load_files(targets, plan, file)
    with pytest.raises(ValueError, match="ab.safetensors`: `a` arrived twice"):
        loadplan.load_files(targets, plan, file)


def test_what_load_files_takes(tmp_path: Path) -> None:
    targets, plan, file, _ = two_names(tmp_path)
    with pytest.raises(RuntimeError, match="needs an active reload"):
        loadplan.load_files(targets, plan, file)
    loadplan.start_reload(targets)
    with pytest.raises(FileNotFoundError, match="none` does not exist"):
        loadplan.load_files(targets, plan, [file, tmp_path / "none"])
    with pytest.raises(ValueError, match="expected 'error' or 'skip'"):
        loadplan.load_files(targets, plan, file, undeclared="maybe")
    loadplan.load_files(targets, plan, file)
    loadplan.finish_reload(targets)


def test_the_bar_shows_names_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, plan, file, _ = two_names(tmp_path)
    for progress, shows in ((True, True), (False, False), (None, False)):
        loadplan.start_reload(targets)
        loadplan.load_files(targets, plan, file, progress=progress)
        loadplan.finish_reload(targets)
        text = capsys.readouterr().err
        assert ("2/2 names" in text and "GiB/s" in text) == shows
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loadplan.start_reload(targets)
    loadplan.load_files(targets, plan, file, progress=True)
    assert capsys.readouterr().err == ""
    loadplan.finish_reload(targets)


# ------------------------------------------------------------------ buckets
def test_a_bucket_by_mapping_and_by_rows() -> None:
    live = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    targets = copies(live)
    plan = loadplan.plan_loads(targets, {"a": ((3,), F32), "b": ((2, 2), F32)})
    values = torch.randn(8)
    for metas in (
        {"a": ((3,), F32, 4), "b": ((2, 2), F32, 16)},
        [("b", (2, 2), F32, 16), loadplan.BucketItem("a", (3,), F32, 4)],
    ):
        live["a"].zero_()
        update(targets, plan, lambda: loadplan.load_bucket(targets, plan, values, metas))  # noqa: B023
        assert torch.equal(live["a"], values[1:4])
        assert torch.equal(live["b"], values[4:].view(2, 2))


def test_what_load_bucket_takes() -> None:
    live = {"a": torch.full((3,), 7.0)}
    targets = copies(live)
    plan = loadplan.plan_loads(targets, {"a": ((3,), F32)})
    loadplan.start_reload(targets)
    buffer = torch.zeros(12, dtype=torch.uint8)
    for metas in (
        [("a", (3,), F32)],
        [("a", (3,), "float32", 0)],
        [("a", 3, F32, 0)],
        [(1, (3,), F32, 0)],
        [("a", (3,), F32, 0.5)],
        [("a", (3,), F32, 1 << 63)],
        [("a", (1 << 63,), F32, 0)],
    ):
        with pytest.raises(TypeError, match="describes no tensor"):
            loadplan.load_bucket(targets, plan, buffer, metas)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the buffer is bytes"):
        loadplan.load_bucket(targets, plan, b"", [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`a` has 12 bytes at offset 1 of a buffer of 12"):
        loadplan.load_bucket(targets, plan, buffer, [("a", (3,), F32, 1)])
    assert live["a"].eq(7).all()
