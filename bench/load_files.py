"""One rank of eight loads its part of a checkpoint: by plan, and as it is done without one.

    python bench/load_files.py [--mib 256] [--repeat 3] [--folder .] [--gaps | --batches]

A checkpoint of real shapes is generated (dense layers and layers of experts, bfloat16, two files
with an index), loaded in every way cold and warm, compared byte for byte, and deleted.  The loader
is rank 3 of 8: q, k, v fused and cut by rows, gate and up fused and cut by rows, o and down cut by
columns, vocabulary cut by rows, experts like the dense layers.

    load_files      loadplan.load_files
    load_file       safetensors.torch.load_file, then the loader with whole tensors
    get_slice       safe_open(...).get_slice(name)[this rank's part], written by hand for this model
    fastsafetensors its CPU loader, then the loader; where it is installed
    in memory       the loader with whole tensors that lie in memory already; little can be faster,
                    as every byte that is needed has to be copied once
    direct reads    O_DIRECT reads of the ranges that are contiguous, in four threads, and no more

Cold: the page cache holds nothing of the files before (posix_fadvise).  Warm: all of them, read
from start to end, as who copies or downloads a checkpoint leaves it; reads here and there leave
small pages, which cost more to map.  Ways take turns, another one first in every round, so that a
slow spell of the machine, and what the first one pays, hits all; the table shows medians and the
ratio to load_files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import loadplan

RANK, RANKS = 3, 8
HIDDEN, VOCAB, KV, WIDTH = 4096, 32_768, 1024, 14_336
EXPERT_HIDDEN, EXPERTS, EXPERT_WIDTH = 2048, 128, 768
MAX_RATIO = 1.02  # bytes read / bytes needed, for parts that are contiguous in the file
MIN_OF_DIRECT = 0.8  # of the bandwidth of direct reads, cold
MIN_SPEEDUP = 2.5  # over load_file and the loader

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Part:
    """What this rank keeps of a checkpoint tensor, and where it goes."""

    name: str
    shape: tuple[int, ...]
    dim: int | None  # that is cut; None: whole
    target: str
    start: int = 0  # row of the target, or expert for three dimensions
    rows: int = 0

    def cut(self) -> tuple[slice, ...]:
        if self.dim is None:
            return (slice(None),)
        size = self.shape[self.dim] // RANKS
        here = slice(RANK * size, (RANK + 1) * size)
        return (here,) if self.dim == 0 else (slice(None), here)


def dense_layer(at: str) -> Iterator[Part]:
    qkv, q, kv = f"{at}.qkv", HIDDEN // RANKS, KV // RANKS
    yield Part(f"{at}.input_norm", (HIDDEN,), None, f"{at}.input_norm")
    yield Part(f"{at}.q_proj", (HIDDEN, HIDDEN), 0, qkv, 0, q)
    yield Part(f"{at}.k_proj", (KV, HIDDEN), 0, qkv, q, kv)
    yield Part(f"{at}.v_proj", (KV, HIDDEN), 0, qkv, q + kv, kv)
    yield Part(f"{at}.o_proj", (HIDDEN, HIDDEN), 1, f"{at}.o")
    yield Part(f"{at}.post_norm", (HIDDEN,), None, f"{at}.post_norm")
    width = WIDTH // RANKS
    yield Part(f"{at}.gate_proj", (WIDTH, HIDDEN), 0, f"{at}.gate_up", 0, width)
    yield Part(f"{at}.up_proj", (WIDTH, HIDDEN), 0, f"{at}.gate_up", width, width)
    yield Part(f"{at}.down_proj", (HIDDEN, WIDTH), 1, f"{at}.down")


def expert_layer(at: str, experts: int) -> Iterator[Part]:
    yield Part(f"{at}.router", (experts, EXPERT_HIDDEN), None, f"{at}.router")
    for e in range(experts):
        for half, name in enumerate(("gate", "up")):
            yield Part(
                f"{at}.experts.{e}.{name}_proj",
                (EXPERT_WIDTH, EXPERT_HIDDEN),
                0,
                f"{at}.w13.{e}",
                half * EXPERT_WIDTH // RANKS,
                EXPERT_WIDTH // RANKS,
            )
        down = (EXPERT_HIDDEN, EXPERT_WIDTH)
        yield Part(f"{at}.experts.{e}.down_proj", down, 1, f"{at}.w2.{e}")


def nbytes(part: Part) -> int:
    return 2 * torch.Size(part.shape).numel()


def model(mib: int) -> list[Part]:
    """Layers until there are about `mib`: two of three bytes dense, the third of experts."""
    parts = [Part("embed", (VOCAB, HIDDEN), 0, "embed"), Part("norm", (HIDDEN,), None, "norm")]
    if mib < 1024:
        parts = parts[1:]
    left = (mib << 20) - sum(map(nbytes, parts))
    per_expert = 3 * 2 * EXPERT_HIDDEN * EXPERT_WIDTH
    layer = 0
    while left > 0:
        experts = min(EXPERTS, max(1, left // 3 // per_expert))
        new = [*dense_layer(f"layers.{layer}"), *expert_layer(f"moe.{layer}", experts)]
        parts += new
        left -= sum(map(nbytes, new))
        layer += 1
    return parts


def generate(parts: list[Part], folder: Path) -> None:
    """Two files and an index, every tensor of other bytes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 1 << 15, (1 << 22,), generator=generator, dtype=torch.int16)
    half = sum(map(nbytes, parts)) // 2
    files: list[list[Part]] = [[], []]
    done = 0
    for part in parts:
        files[done >= half].append(part)
        done += nbytes(part)
    weight_map = {}
    for number, file in enumerate(files):
        name = f"model-{number}.safetensors"
        header: dict[str, object] = {}
        offset = 0
        for part in file:
            offsets = [offset, offset + nbytes(part)]
            header[part.name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": offsets}
            weight_map[part.name] = name
            offset += nbytes(part)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for number_of_part, part in enumerate(file):
                left = nbytes(part)
                while left:
                    chunk = (noise + number_of_part).view(torch.uint8)[:left].numpy()
                    stream.write(chunk.data)
                    left -= chunk.nbytes
            stream.flush()
            os.fsync(stream.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def drop_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass


class Rank:
    """The live tensors of this rank, their loader, and every way to load them."""

    def __init__(self, parts: list[Part], folder: Path) -> None:
        self.parts = {part.name: part for part in parts}
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        rows: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in parts:
            shape = list(part.shape)
            if part.dim is not None:
                shape[part.dim] //= RANKS
            shapes[part.target] = tuple(shape)
            rows[part.target] = max(rows.get(part.target, 0), part.start + shape[0])
        self.live = {
            name: torch.zeros((rows[name], *shape[1:]), dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
        self.targets = loadplan.Targets(self.live, self.load_weights)
        self.plan = loadplan.plan_loads(self.targets, loadplan.metadata(folder))
        assert not list(self.plan.uncovered)
        self.stats: loadplan.FileStats | None = None

    def place(self, part: Part) -> Tensor:
        target = self.live[part.target]
        return target.narrow(0, part.start, part.rows) if part.rows else target

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            part = self.parts[name]
            self.place(part).copy_(weight[part.cut()])

    def load_files(self, **options: object) -> None:
        loadplan.start_reload(self.targets)
        self.stats = loadplan.load_files(
            self.targets,
            self.plan,
            self.folder,
            progress=False,
            **options,  # type: ignore[arg-type]
        )
        loadplan.finish_reload(self.targets)

    def load_file(self) -> None:
        for file in self.files:
            self.load_weights(safetensors.torch.load_file(file).items())

    def get_slice(self) -> None:
        for file in self.files:
            with safetensors.safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
                for name in opened.keys():  # noqa: SIM118
                    part = self.parts[name]
                    self.place(part).copy_(opened.get_slice(name)[part.cut()])

    def fastsafetensors(self) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(file) for file in self.files]})
        held = loader.copy_files_to_device()
        self.load_weights((name, held.get_tensor(name)) for name in self.parts)
        held.close()
        loader.close()


@dataclass
class Range:
    file: Path
    offset: int
    nbytes: int


def contiguous_ranges(parts: dict[str, Part], files: list[Path]) -> list[Range]:
    """Of parts cut by rows or not at all; what row-parallel ones need is left out."""
    ranges = []
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, info in header.items():
            part = parts[name]
            if part.dim == 1:
                continue
            whole = nbytes(part)
            count = whole if part.dim is None else whole // RANKS
            first = 0 if part.dim is None else RANK * count
            ranges.append(Range(file, 8 + size + info["data_offsets"][0] + first, count))
    return ranges


def read_directly(ranges: list[Range]) -> int:
    """Aligned reads that cover the ranges, at most 8 MiB each, in four threads; bytes of them."""
    unit, most = 4096, 8 << 20
    jobs = []
    for span in ranges:
        start = span.offset - span.offset % unit
        stop = span.offset + span.nbytes
        jobs += [(span.file, at, min(most, stop - at)) for at in range(start, stop, most)]
    fds = {span.file: os.open(span.file, os.O_RDONLY | os.O_DIRECT) for span in ranges}
    buffers = [mmap.mmap(-1, most) for _ in range(4)]

    def work(thread: int) -> None:
        for file, at, count in jobs[thread::4]:
            rounded = -(-count // unit) * unit
            os.preadv(fds[file], [memoryview(buffers[thread])[:rounded]], at)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for fd in fds.values():
        os.close(fd)
    return sum(span.nbytes for span in ranges)


def timed(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def compare_ways(rank: Rank, repeat: int) -> dict[tuple[str, str], float]:
    ways: dict[str, Callable[[], object]] = {
        "load_files": rank.load_files,
        "load_file": rank.load_file,
        "get_slice": rank.get_slice,
    }
    if importlib.util.find_spec("fastsafetensors") is not None:
        ways["fastsafetensors"] = rank.fastsafetensors
    rank.load_file()
    # As numbers: random bits are NaN here and there, which is unequal to itself.
    expected = {name: tensor.view(torch.int16).clone() for name, tensor in rank.live.items()}
    held = {
        name: tensor.clone()
        for file in rank.files
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    in_memory = {"in memory": lambda: rank.load_weights(held.items())}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeat):
        for state in ("cold", "warm"):
            drop_cache(rank.folder)
            in_order = list((ways if state == "cold" else ways | in_memory).items())
            first = turn % len(in_order)
            for name, way in in_order[first:] + in_order[:first]:
                for tensor in rank.live.values():
                    tensor.fill_(-1)
                (drop_cache if state == "cold" else warm_cache)(rank.folder)
                times.setdefault((name, state), []).append(timed(way))
                for target, tensor in expected.items():
                    assert torch.equal(rank.live[target].view(torch.int16), tensor), (name, target)
    return {key: statistics.median(values) for key, values in times.items()}


def subset(rank: Rank, parts: list[Part], **options: object) -> tuple[loadplan.FileStats, float]:
    """A load of some names only, cold: what is read for what is needed."""
    names = {part.name for part in parts}
    metas = [meta for meta in loadplan.metadata(rank.folder) if meta.name in names]
    plan = loadplan.plan_loads(rank.targets, metas)
    loadplan.start_reload(rank.targets)
    stats = loadplan.load_files(
        rank.targets,
        plan,
        rank.folder,
        undeclared="skip",
        progress=False,
        **options,  # type: ignore[arg-type]
    )
    loadplan.finish_reload(rank.targets)
    return stats, stats.seconds


def show_gaps(rank: Rank, by_columns: list[Part]) -> None:
    """What it costs to read row-parallel parts with more or fewer of the gaps between."""
    for state in ("cold", "warm"):
        for gap in (256, 4 << 10, 16 << 10, 64 << 10, 1 << 20):
            (drop_cache if state == "cold" else warm_cache)(rank.folder)
            stats, seconds = subset(rank, by_columns, gap_bytes=gap)
            ratio = stats.read_nbytes / stats.needed_nbytes
            print(f"  {state}, gaps up to {gap:>8}: {seconds:6.3f} s, {ratio:.2f} x needed")


def show_batches(rank: Rank) -> None:
    """What larger and smaller batches cost, and more threads."""
    for state in ("cold", "warm"):
        for threads in (1, 2, 4, 8):
            row = []
            for mib in (1, 4, 16, 64, 256):
                seconds = []
                for _ in range(3):
                    (drop_cache if state == "cold" else warm_cache)(rank.folder)
                    options = {"threads": threads, "max_staging_bytes": mib << 20}
                    seconds.append(timed(lambda options=options: rank.load_files(**options)))  # type: ignore[misc]
                row.append(f"{mib:>4} MiB {statistics.median(seconds):6.3f} s")
            print(f"  {state}, {threads} threads, staging up to " + ", ".join(row))


def report(rank: Rank, repeat: int) -> bool:
    times = compare_ways(rank, repeat)
    whole = sum(path.stat().st_size for path in rank.files)
    assert rank.stats is not None
    print(f"{whole / 2**30:.2f} GiB in {len(rank.files)} files, {len(rank.parts)} names;")
    needed = rank.stats.needed_nbytes / 2**20
    print(f"rank {RANK} of {RANKS} needs {needed:.0f} MiB; medians of {repeat}")
    for state in ("cold", "warm"):
        mine = times["load_files", state]
        for (name, other), seconds in times.items():
            if other == state:
                print(f"  {state} {name:16}{seconds:8.3f} s {seconds / mine:6.2f} x load_files")
    by_rows = [part for part in rank.parts.values() if part.dim != 1]
    by_columns = [part for part in rank.parts.values() if part.dim == 1]
    direct, mine, ratios = [], [], []
    for _ in range(repeat):
        drop_cache(rank.folder)
        ranges = contiguous_ranges(rank.parts, rank.files)
        count = sum(span.nbytes for span in ranges)
        direct.append(count / timed(lambda ranges=ranges: read_directly(ranges)))  # type: ignore[misc]
        drop_cache(rank.folder)
        stats, seconds = subset(rank, by_rows)
        mine.append(stats.needed_nbytes / seconds)
        ratios.append(stats.read_nbytes / stats.needed_nbytes)
    of_direct = statistics.median(mine) / statistics.median(direct)
    print(f"  contiguous parts: {max(ratios):.4f} x needed is read")
    print(f"  contiguous parts, cold: {of_direct:.2f} of the bandwidth of plain direct reads")
    for state in ("cold", "warm"):
        (drop_cache if state == "cold" else warm_cache)(rank.folder)
        stats, _ = subset(rank, by_columns)
        print(
            f"  row-parallel parts, {state}: {stats.read_nbytes / stats.needed_nbytes:.2f} x needed"
        )
    checks = {
        f"at most {MAX_RATIO} x needed is read": max(ratios) <= MAX_RATIO,
        f"at least {MIN_OF_DIRECT} of direct reads": of_direct >= MIN_OF_DIRECT,
    }
    for state in ("cold", "warm"):
        mine_now = times["load_files", state]
        checks[f"{MIN_SPEEDUP} x load_file, {state}"] = (
            times["load_file", state] >= MIN_SPEEDUP * mine_now
        )
        checks[f"no rival is faster, {state}"] = mine_now <= min(
            seconds
            for (name, other), seconds in times.items()
            if other == state and name != "in memory"
        )
    for text, holds in checks.items():
        print(f"  {'ok  ' if holds else 'MISS'} {text}")
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="size of the checkpoint")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(), help="where it is made")
    parser.add_argument("--gaps", action="store_true", help="measure what gaps cost, and no more")
    parser.add_argument("--batches", action="store_true", help="the same of batches and threads")
    arguments = parser.parse_args()
    parts = model(arguments.mib)
    folder = Path(tempfile.mkdtemp(prefix="load_files-", dir=arguments.folder))
    try:
        generate(parts, folder)
        rank = Rank(parts, folder)
        if arguments.gaps:
            show_gaps(rank, [part for part in parts if part.dim == 1])
        elif arguments.batches:
            show_batches(rank)
        else:
            report(rank, arguments.repeat)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
