"""Random loaders, written as people write them: Python text over ``live`` and ``weights``.

A program is a list of statements, each of which belongs to the turn of one checkpoint tensor (or
comes after the loop).  The generator runs every statement on real tensors as it draws it, so that
a program is one that eager torch accepts.  `render` gives the text of the loader; a statement that
needs what another name's turn left behind is guarded, since a loader may be called with some of
its names only.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
U8, I8, I16, I32, I64 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64

DTYPES = [F32, F32, F32, F32, BF16, BF16, F16, F64, I32, I64, U8, I8]
SAME_SIZE = {F32: I32, BF16: I16, F16: I16, F64: I64, I32: F32, I64: F64, U8: I8, I8: U8}
ANYTHING = math.inf  # the bound of values that may be NaN or of any size
LARGEST = 1000.0  # arithmetic stops here, so that casts stay defined
MOST_ELEMENTS = 400


@dataclass(frozen=True)
class Statement:
    at: int  # the checkpoint tensor in whose turn it runs; their number: after the loop
    text: str
    uses: tuple[str, ...] = ()
    defines: str = ""


@dataclass(frozen=True)
class TargetSpec:
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_parameter: bool


@dataclass(frozen=True)
class Program:
    sources: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    storages: tuple[tuple[int, torch.dtype], ...]  # elements, dtype
    targets: tuple[TargetSpec, ...]
    statements: tuple[Statement, ...]
    threads: int = 0  # of a pool that runs the turns; 0: no pool
    no_grad: bool = False
    overlaps: str = "fallback"
    values: int = 0  # seed of the values and of the order of arrival

    def names(self) -> list[str]:
        return [f"w{index}" for index in range(len(self.sources))]


def random_values(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values of a plain kind: at most 8, for integers at most 100."""
    unit = torch.rand(tuple(shape), generator=generator, dtype=F64)
    if dtype is U8:
        return (unit * 100).floor().to(dtype)
    if not dtype.is_floating_point:
        return (unit * 200 - 100).floor().to(dtype)
    return (unit * 16 - 8).to(dtype)


def target_views(program: Program, storages: Sequence[Tensor]) -> dict[str, Tensor]:
    live: dict[str, Tensor] = {}
    for index, spec in enumerate(program.targets):
        view = storages[spec.storage].as_strided(spec.shape, spec.stride, spec.offset)
        is_leaf = spec.is_parameter and spec.dtype.is_floating_point
        live[f"t{index}"] = nn.Parameter(view) if is_leaf else view
    return live


# ------------------------------------------------------------------ text
def render(program: Program) -> str:
    """The loader: one function per turn, what several turns need in ``held``."""
    count = len(program.sources)
    home = {s.defines: s.at for s in program.statements if s.defines}
    home.update({f"w{index}": index for index in range(count)})
    readers: dict[str, set[int]] = {}
    for statement in program.statements:
        for name in statement.uses:
            if home[name] != statement.at:
                readers.setdefault(name, set()).add(statement.at)
    lines = ["def load_weights(live, weights):", "    held = {}"]
    turns = []
    for at in range(count + 1):
        body = _render_turn(program, at, home, readers)
        if not body and at == count:
            continue
        argument = f"w{at}" if at < count else ""
        lines += [
            f"    def turn{at}({argument}):",
            *(f"        {line}" for line in body or ["pass"]),
        ]
        turns.append(f"turn{at}")
    lines += ["    turns = [" + ", ".join(turns[:count]) + "]"]
    if program.threads:
        lines += [
            f"    with ThreadPoolExecutor({program.threads}) as pool:",
            "        list(pool.map(lambda item: turns[int(item[0][1:])](item[1]), weights))",
        ]
    else:
        lines += ["    for name, w in weights:", "        turns[int(name[1:])](w)"]
    if len(turns) > count:
        lines.append(f"    turn{count}()")
    if program.no_grad:
        lines.insert(0, "@torch.no_grad()")
    return "\n".join(lines) + "\n"


def _render_turn(
    program: Program, at: int, home: dict[str, int], readers: dict[str, set[int]]
) -> list[str]:
    body: list[str] = []
    sure = {f"w{at}"}
    fetched: set[str] = set()
    if f"w{at}" in readers:
        body.append(f'held["w{at}"] = w{at}')
    for statement in program.statements:
        if statement.at != at:
            continue
        for name in statement.uses:
            if home[name] != at and name not in fetched:
                fetched.add(name)
                # The last reader drops it, as a loader that pairs tensors does.
                take = (
                    f'held.pop("{name}", None)' if readers[name] == {at} else f'held.get("{name}")'
                )
                body.append(f"{name} = {take}")
        lines = statement.text.split("\n")
        if statement.defines in readers:
            lines.append(f'held["{statement.defines}"] = {statement.defines}')
        unsure = [name for name in dict.fromkeys(statement.uses) if name not in sure]
        if unsure:
            if statement.defines:
                body.append(f"{statement.defines} = None")
            body.append("if " + " and ".join(f"{name} is not None" for name in unsure) + ":")
            lines = [f"    {line}" for line in lines]
        elif statement.defines:
            sure.add(statement.defines)
        body += lines
    return body


def describe(program: Program) -> str:
    lines = [f"# overlaps={program.overlaps!r}, values={program.values}"]
    for index, (shape, dtype) in enumerate(program.sources):
        lines.append(f"# w{index}: {dtype} {list(shape)}")
    for index, spec in enumerate(program.targets):
        kind = "parameter" if spec.is_parameter else "buffer"
        lines.append(
            f"# t{index}: {spec.dtype} {list(spec.shape)} strides {list(spec.stride)} "
            f"offset {spec.offset} of storage {spec.storage}, a {kind}"
        )
    return "\n".join(lines) + "\n" + render(program)


def without(program: Program, index: int) -> Program:
    """The program without a statement and those that need what it defines."""
    dropped: set[str] = set()
    kept = []
    for position, statement in enumerate(program.statements):
        if position == index or dropped & set(statement.uses):
            dropped.add(statement.defines or "-")
        else:
            kept.append(statement)
    return replace(program, statements=tuple(kept))


def without_source(program: Program) -> Program:
    """The program without its last checkpoint tensor, where no statement needs it."""
    last = len(program.sources) - 1
    if last < 1 or any(s.at == last or f"w{last}" in s.uses for s in program.statements):
        return program
    statements = [replace(s, at=last) if s.at > last else s for s in program.statements]
    return replace(program, sources=program.sources[:-1], statements=tuple(statements))


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Drops statements and names for as long as the program fails."""
    smaller = True
    while smaller:
        smaller = False
        for index in reversed(range(len(program.statements))):
            if index >= len(program.statements):
                continue
            candidate = without(program, index)
            if fails(candidate):
                program, smaller = candidate, True
        candidate = without_source(program)
        if candidate is not program and fails(candidate):
            program, smaller = candidate, True
    for simpler in (replace(program, threads=0), replace(program, no_grad=True)):
        if simpler != program and fails(simpler):
            program = simpler
    return program


# ------------------------------------------------------------------ generator
@dataclass
class Value:
    """A tensor of the program as the generator knows it."""

    text: str  # a variable, or an expression over ``live``
    tensor: Tensor
    root: str  # the memory that it shows: `s0` for a storage of targets
    uses: tuple[str, ...]
    bound: dict[str, float] = field(repr=False)

    @property
    def most(self) -> float:
        return self.bound[self.root]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def can_cast(value: Value, dtype: torch.dtype) -> bool:
    """Whether a cast is defined, and the same for every layout."""
    if value.dtype == dtype:
        return True
    if value.most == ANYTHING:
        return False
    if not value.dtype.is_floating_point or dtype.is_floating_point:
        return dtype is not F16 or value.most < 30000
    # What a target held before an update is not bounded by this program.
    return dtype is not U8 and value.most < 120 and not value.root.startswith("s")


class Generator:
    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.values = torch.Generator().manual_seed(self.rng.getrandbits(30))
        self.statements: list[Statement] = []
        self.bound: dict[str, float] = {}
        self.at = 0
        self.reads = False
        self.count = 0
        self.kept: list[Value] = []  # of earlier turns
        self.turn: list[Value] = []  # of this turn

    # -------------------------------------------------------------- drawing
    def chance(self, percent: float) -> bool:
        return self.rng.random() * 100 < percent

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randrange(len(options))]

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def new_name(self) -> str:
        self.count += 1
        return f"r{self.count - 1}"

    def run(self) -> Program:
        rng = self.rng
        self.usual = self.pick(DTYPES)
        sources = []
        for _ in range(self.between(1, 5)):
            shape = tuple(self.between(1, 6) for _ in range(self.pick([1, 2, 2, 2, 2, 3])))
            sources.append((shape if not self.chance(4) else (), self._dtype()))
        self.disjoint = self.chance(6)
        storages, targets = self._draw_targets(len(sources))
        threads = self.pick([2, 3]) if self.disjoint else self.pick([0] * 15 + [1])
        self.program = Program(
            tuple(sources),
            tuple(storages),
            tuple(targets),
            (),
            threads=threads,
            no_grad=not threads and self.chance(50),
            overlaps=self.pick(["fallback", "last_wins"]),
            values=rng.getrandbits(30),
        )
        live = target_views(
            self.program, [random_values(self.values, (n,), dtype) for n, dtype in storages]
        )
        self.env: dict[str, Any] = {"torch": torch, "nn": nn, "live": live}
        for index, (_, dtype) in enumerate(storages):
            self.bound[f"s{index}"] = 8.0 if dtype.is_floating_point else 100.0
        self.slots = self._draw_slots()
        with torch.no_grad():
            for index, (shape, dtype) in enumerate(sources):
                self._turn_of(index, random_values(self.values, shape, dtype))
            self._after_the_loop()
        return replace(self.program, statements=tuple(self._needed()))

    def _needed(self) -> list[Statement]:
        """Without most of what no write uses."""
        needed: set[str] = set()
        statements = []
        for statement in reversed(self.statements):
            if not statement.defines or statement.defines in needed or self.chance(5):
                needed |= set(statement.uses)
                statements.append(statement)
        return statements[::-1]

    def _draw_targets(
        self, num_sources: int
    ) -> tuple[list[tuple[int, torch.dtype]], list[TargetSpec]]:
        storages: list[tuple[int, torch.dtype]] = []
        targets: list[TargetSpec] = []
        for index in range(num_sources if self.disjoint else self.between(1, 3)):
            shape = [self.between(2, 9) for _ in range(self.pick([1, 2, 2, 2, 3]))]
            dtype = self._dtype()
            order = list(range(len(shape)))
            if self.chance(20):
                self.rng.shuffle(order)
            stride = [0] * len(shape)
            step = 1
            for dim in reversed(order):
                stride[dim] = step
                step *= shape[dim] + (1 if self.chance(4) else 0)
            offset = self.pick([0, 0, 0, 0, 3])
            storages.append((offset + step + self.pick([0, 0, 2]), dtype))
            spec = TargetSpec(index, dtype, tuple(shape), tuple(stride), offset, self.chance(50))
            targets.append(spec)
            if not self.disjoint and self.chance(8):  # another name over the same memory
                rows = self.between(1, shape[0])
                targets.append(
                    replace(spec, shape=(rows, *shape[1:]), is_parameter=self.chance(50))
                )
        return storages, targets

    def _dtype(self) -> torch.dtype:
        """Mostly one dtype, so that many names are plain copies."""
        return self.usual if self.chance(75) else self.pick(DTYPES)

    def _draw_slots(self) -> list[tuple[int, str]]:
        """Parts of the targets, apart from each other, that names are given as their places."""
        slots = []
        seen = set()
        for index, spec in enumerate(self.program.targets):
            if spec.storage in seen:
                continue
            seen.add(spec.storage)
            whole = self.live_text(index)
            dim = self.between(0, len(spec.shape) - 1)
            parts = self.pick([1, 2, 3, 4])
            if self.disjoint or parts == 1 or spec.shape[dim] < parts:
                slots.append((index, whole))
                continue
            step = spec.shape[dim] // parts
            for part in range(parts):
                length = step if part < parts - 1 else spec.shape[dim] - step * part
                slots.append((index, f"{whole}.narrow({dim}, {step * part}, {length})"))
        self.rng.shuffle(slots)
        return slots

    def live_text(self, index: int) -> str:
        spec = self.program.targets[index]
        needs_data = spec.is_parameter and not self.program.no_grad
        return f'live["t{index}"]' + (".data" if needs_data or self.chance(10) else "")

    def live_value(self, text: str) -> Value:
        spec = self.program.targets[int(re.findall(r'"t(\d+)"', text)[0])]
        return Value(text, eval(text, self.env), f"s{spec.storage}", (), self.bound)

    # -------------------------------------------------------------- statements
    def attempt(self, text: str, uses: Sequence[str], defines: str = "") -> bool:
        """Runs the statement and keeps it, unless torch refuses it."""
        try:
            exec(text, self.env)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        result = self.env.get(defines) if defines else None
        if isinstance(result, Tensor) and not 0 < result.numel() <= MOST_ELEMENTS:
            return False
        self.statements.append(Statement(self.at, text, tuple(dict.fromkeys(uses)), defines))
        return True

    def define(
        self, expression: str, uses: Sequence[Value], most: float | None = None, lines: str = "{}"
    ) -> Value | None:
        """`r = expression`; ``most`` None: a view of the first of ``uses``."""
        name = self.new_name()
        text = lines.replace("{}", f"{name} = {expression}").replace("{r}", name)
        names = [used for value in uses for used in value.uses]
        if not self.attempt(text, names, name):
            return None
        tensor = self.env[name]
        root = name
        if most is None:
            root = uses[0].root
        else:
            self.bound[name] = most
        value = Value(name, tensor, root, (name,), self.bound)
        self.turn.append(value)
        return value

    def _turn_of(self, index: int, tensor: Tensor) -> None:
        self.at, self.turn, self.reads = index, [], False
        name = f"w{index}"
        self.env[name] = tensor
        self.bound[name] = 8.0 if tensor.dtype.is_floating_point else 100.0
        weight = Value(name, tensor, name, (name,), self.bound)
        self.turn.append(weight)
        if self.chance(6):  # a name that this rank skips
            return
        if self.chance(4):
            self._change_source(weight)
        for _ in range(self.pick([1, 1, 1, 2, 2, 3])):
            self._move(weight)
        if self.chance(5):
            self._constant()
        if self.chance(4) and not self.disjoint:
            self._live_to_live()
        # What a name whose value is read leaves behind is not seen by any trace: a name that only
        # it is combined with looks unneeded.  Such loaders are left out here.
        if not self.reads:
            self.kept += self.turn

    def _after_the_loop(self) -> None:
        self.at, self.turn = len(self.program.sources), []
        if self.disjoint:
            return
        if self.kept and self.chance(15):
            self._move(self.pick(self.kept))
        if self.chance(8):
            self._live_to_live()
        if self.chance(8):
            self._constant()
        if self.chance(6):
            place = self._place(any_place=True)
            if place is not None:
                self._in_place(place)

    def _operand(self, like: Value) -> Value:
        """Something to combine ``like`` with: of this turn, or (a group) of an earlier one."""
        if self.kept and not self.disjoint and self.chance(30):
            return self.pick(self.kept)
        return self.pick(self.turn or [like])

    def _move(self, start: Value) -> None:
        place = self._place()
        if place is None:
            return
        value = self._views(start, self.between(0, 3))
        for _ in range(self.pick([0, 0, 0, 1, 1, 1, 2, 3])):
            value = self._views(self._transform(value), self.between(0, 1))
        if self.chance(3):
            self._read(value, place)
        else:
            self._write(value, place)
        if self.chance(5):
            self._in_place(place)

    def _place(self, any_place: bool = False) -> Value | None:
        if self.disjoint:
            text = self.live_text(min(self.at, len(self.program.targets) - 1))
        elif self.slots and not any_place and not self.chance(5):
            text = self.slots.pop()[1]
        elif any_place or self.chance(12):
            text = self.live_text(self.between(0, len(self.program.targets) - 1))
        else:
            return None
        place = self.live_value(text)
        for _ in range(self.pick([0, 0, 0, 1])):
            tail = self._view_text(place, for_write=True)
            try:
                tensor = eval(place.text + tail, self.env)
            except (RuntimeError, IndexError):
                continue
            if tensor.numel():
                place = Value(place.text + tail, tensor, place.root, (), self.bound)
        return place

    # -------------------------------------------------------------- views
    def _views(self, value: Value, count: int) -> Value:
        for _ in range(count):
            if self.chance(3):
                viewed = self._view_dtype(value)
            else:
                viewed = self.define(value.text + self._view_text(value), [value])
            value = viewed or value
        return value

    def _view_dtype(self, value: Value) -> Value | None:
        if value.dtype not in SAME_SIZE:
            return None
        viewed = self.define(f"{value.text}.view({SAME_SIZE[value.dtype]})", [value])
        if viewed is not None:
            self.bound[value.root] = ANYTHING
        return viewed

    def _view_text(self, value: Value, for_write: bool = False) -> str:
        shape = value.shape
        rank = len(shape)
        if rank == 0:
            return self.pick([".unsqueeze(0)", ".view(1)", "[None]", ".reshape(-1)"])
        dim = self.between(0, rank - 1)
        extent = shape[dim]
        start = self.between(0, extent - 1)
        length = self.between(1, extent - start)
        other = self.between(0, rank - 1)
        full = ":, " * dim
        options = [
            f".narrow({dim}, {start}, {length})",
            f".narrow({dim - rank}, {start}, {length})",
            f"[{full}{start}:{start + length}]",
            f"[..., {self.between(0, max(0, shape[-1] - 2))}:]",
            f"[{full}::2]",
            f"[{full}{start}]",
            f".select({dim}, {start})",
            f".chunk(2, {dim})[{0 if extent == 1 else self.between(0, 1)}]",
            f".split({(extent + 1) // 2}, dim={dim})[0]",
            f".tensor_split(2, {dim})[1]",
            f".unbind({dim})[{start}]",
            f".transpose({dim}, {other})",
            f".swapaxes({dim}, {other})",
            f".unsqueeze({dim})",
            ".squeeze()",
            "[None]",
            ".mT" if rank >= 2 else ".detach()",
            ".t()" if rank <= 2 else ".flatten(0, 1)",
            f".permute({', '.join(map(str, self.rng.sample(range(rank), rank)))})",
            f".movedim({dim}, {other})",
            f".reshape({self._other_shape(shape)})" if not for_write else ".detach()",
            f".view({self._other_shape(shape)})",
            ".view(-1)",
        ]
        if extent % 2 == 0:
            options.append(f".unflatten({dim}, (2, {extent // 2}))")
        if rank >= 2:
            options.append(".diagonal()")
        if not for_write:
            options += [
                ".flatten()",
                f".expand(2, {', '.join(['-1'] * rank)})",
                f".unfold({dim}, {self.between(1, extent)}, 1)",
            ]
        return str(self.pick(options))

    def _other_shape(self, shape: tuple[int, ...]) -> str:
        numel = math.prod(shape)
        divisors = [d for d in range(1, numel + 1) if numel % d == 0]
        return f"{self.pick(divisors)}, -1"

    # -------------------------------------------------------------- new tensors
    def _mask(self, shape: tuple[int, ...]) -> str:
        numel = math.prod(shape)
        if numel <= 8 and len(shape) == 1:
            return f"torch.tensor({[self.chance(50) for _ in range(numel)]})"
        step = self.between(2, 3)
        return f"(torch.arange({numel}) % {step} == 0).view({', '.join(map(str, shape))})"

    def _indices(self, extent: int, *, distinct: bool = False) -> str:
        if distinct:
            return f"torch.tensor({self.rng.sample(range(extent), extent)})"
        count = self.between(1, extent + 1)
        return f"torch.tensor({[self.between(0, extent - 1) for _ in range(count)]})"

    def _transform(self, value: Value) -> Value:
        if self.chance(30):
            new = self._arithmetic(value)
        elif self.chance(12):
            new = self._scratch(value)
        else:
            new = self._movement(value)
        return new or value

    def _movement(self, value: Value) -> Value | None:
        x, shape, rank = value.text, value.shape, len(value.shape)
        if self.chance(25):
            dtype = self.pick(DTYPES)
            if not can_cast(value, dtype):
                return None
            device = self.pick(["", "", ', device="cpu"'])
            return self.define(f"{x}.to(dtype={dtype}{device})", [value], value.most)
        if self.chance(30):
            return self._join(value)
        options = [
            f"{x}.clone()",
            f"{x}.contiguous().clone()",
            f"{x}.cpu().clone()",
            f"torch.clone({x})",
            f"{x}.to(live['t0'].device).clone()",
        ]
        if rank:
            dim = self.between(0, rank - 1)
            extent = shape[dim]
            full = ":, " * dim
            options += [
                f"{x}.transpose({dim}, {self.between(0, rank - 1)}).contiguous().clone()",
                f"{x}.flip({dim})",
                f"{x}.roll({self.between(1, 3)}, {dim})",
                f"{x}.index_select({dim}, {self._indices(extent)})",
                f"{x}[{full}{self._indices(extent)}]",
                f"{x}[{self._mask(shape)}]",
                f"{x}[{full}{[self.between(0, extent - 1) for _ in range(extent)]}]",
                f"{x}.repeat_interleave(2, dim={dim})",
                f"{x}.repeat({', '.join('2' if d == dim else '1' for d in range(rank))})",
                f"torch.nn.functional.pad({x}, (0, {self.between(1, 2)}))",
                f"{x}.masked_fill({self._mask(shape)}, 2)",
                f"torch.where({self._mask(shape)}, {x}, 3)",
                f"torch.where({self._mask(shape)}, {x}, torch.zeros_like({x}))",
                f"torch.tril({x})" if rank >= 2 else f"{x}.flip(0)",
                f"{x}.take_along_dim({self._indices(extent)}"
                f".view({', '.join('-1' if d == dim else '1' for d in range(rank))}), {dim})",
            ]
            if self.chance(12):
                return self._moved_constant(value, dim)
        return self.define(self.pick(options), [value], max(value.most, 3.0))

    def _moved_constant(self, value: Value, dim: int) -> Value | None:
        """An index that is moved to the device of the weights, and read back."""
        x = value.text
        name = f"i{self.count}"
        lines = f"{name} = {self._indices(value.shape[dim])}.to({x}.device)\n{{}}"
        expression = self.pick(
            [
                f"{x}.index_select({dim}, {name})",
                f"{x}.narrow({dim}, {name}[0].item(), 1).clone()",
                f"{x}.narrow({dim}, {name}.tolist()[-1], 1).clone()",
                f"{x}.narrow({dim}, int({name}.max()), 1).clone()",
            ]
        )
        return self.define(expression, [value], value.most, lines)

    def _join(self, value: Value) -> Value | None:
        other = self._operand(value)
        if other.dtype != value.dtype:
            other = value
        x, y, rank = value.text, other.text, len(value.shape)
        dim = self.between(0, max(0, rank - 1))
        most = max(value.most, other.most)
        options = [
            f"torch.stack([{x}, {x}], {dim})",
            f"torch.cat([{x}, {x}], {dim})",
            f"torch.hstack([{x}, {x}])",
        ]
        if other.shape == value.shape:
            options = [
                f"torch.stack([{x}, {y}], {dim})",
                f"torch.stack([{x}, {y}], -1).flatten(-2)",
                f"torch.cat([{x}, {y}], {dim})",
                f"torch.where({self._mask(value.shape)}, {x}, {y})",
            ]
        elif len(other.shape) == rank:
            options.append(f"torch.cat([{x}, {y}], {dim})")
        if rank and self.chance(10):
            tail = list(value.shape)
            options = [f"torch.cat([{x}, torch.ones({tail}, dtype={value.dtype})], {dim})"]
        return self.define(self.pick(options), [value, other], max(most, 1.0))

    def _scratch(self, value: Value) -> Value | None:
        """A tensor that is made empty (or not) and filled piece by piece."""
        x, shape = value.text, value.shape
        if not shape:
            return None
        device = self.pick([f"{x}.device", "live['t0'].device", '"cpu"'])
        make = self.pick(
            [
                f"torch.empty({list(shape)}, dtype={value.dtype}, device={device})",
                f"torch.empty_like({x})",
                f"{x}.new_empty({list(shape)})",
                f"torch.zeros({list(shape)}, dtype={value.dtype}, device={device})",
                f"{x}.new_zeros({list(shape)})",
                f"torch.full({list(shape)}, 2, dtype={value.dtype}, device={device})",
            ]
        )
        other = self._operand(value)
        if other.shape != shape or not can_cast(other, value.dtype):
            other = value
        cut = self.between(0, shape[0])
        lines = ["{}"]
        if cut:
            lines.append(f"{{r}}[:{cut}] = {x}[:{cut}]")
        if cut < shape[0]:
            lines.append(f"{{r}}[{cut}:].copy_({other.text}[{cut}:])")
        if self.chance(15):
            lines.append("{r}[0] = 1")
        if self.chance(10) and value.dtype.is_floating_point and value.most < LARGEST:
            lines.append("{r}.mul_(2)")
        most = max(2 * value.most, other.most, 2.0)
        return self.define(make, [value, other], most, "\n".join(lines))

    def _arithmetic(self, value: Value) -> Value | None:
        x, most = value.text, value.most
        if most > LARGEST or not value.dtype.is_floating_point:
            return None
        other = self._operand(value)
        pairs = []
        if other.most <= LARGEST and other.dtype.is_floating_point:
            y = other.text
            pairs = [
                (f"{x} * {y}", most * other.most),
                (f"{x} + {y}", most + other.most),
                (f"torch.maximum({x}, {y})", max(most, other.most)),
                (f"{x}.float() * {y}.float()", most * other.most),
                (f"{x} - {y}.mean()", most + other.most),
            ]
        options = [
            (f"-{x}", most),
            (f"{x} + 1", most + 1),
            (f"1 + {x}", most + 1),
            (f"{x} * 2", most * 2),
            (f"{x} / 3", most),
            (f"{x}.abs()", most),
            (f"{x}.float().sigmoid()", 1.0),
            (f"{x}.sum(-1, keepdim=True)" if value.shape else f"{x}.sum()", most * 400),
            (f"{x}.amax(0)" if value.shape else f"{x}.abs()", most),
            (f"{x}.clamp(-1, 1)", 1.0),
            (f"({x} > 0).to({value.dtype})", 1.0),
            (f"torch.round({x})", most + 1),
        ]
        if most <= 8:
            options += [(f"-{x}.float().exp()", 3000.0), (f"{x}.exp()", 3000.0)]
        if len(value.shape) == 2:
            options.append((f"{x}.float() @ {x}.float().t()", most * most * 10))
        options += pairs * 2
        expression, bound = self.pick(options)
        uses = [value, other] if (expression, bound) in pairs else [value]
        return self.define(expression, uses, bound)

    # -------------------------------------------------------------- writes
    def _match(self, value: Value, place: Value) -> tuple[Value, Value] | None:
        """Parts of both with one shape."""
        source: Value | None = value
        while source is not None and len(source.shape) > len(place.shape):
            cut = (
                ".flatten(0, 1)" if self.chance(50) else f"[{self.between(0, source.shape[0] - 1)}]"
            )
            source = self.define(source.text + cut, [source])
        if source is None:
            return None
        while len(place.shape) > len(source.shape) and self.chance(70):
            place = self.live_value_of(place, f"[{self.between(0, place.shape[0] - 1)}]")
        for back in range(1, len(source.shape) + 1):
            have, want = source.shape[-back], place.shape[-back]
            if have > want:
                tail = f".narrow({-back}, {self.between(0, have - want)}, {want})"
                cropped = self.define(source.text + tail, [source])
                if cropped is None:
                    return None
                source = cropped
            elif have < want and (have > 1 or self.chance(70)):
                tail = f".narrow({-back}, {self.between(0, want - have)}, {have})"
                place = self.live_value_of(place, tail)
        return source, place

    def live_value_of(self, place: Value, tail: str) -> Value:
        return Value(
            place.text + tail, eval(place.text + tail, self.env), place.root, (), self.bound
        )

    def _wrote(self, place: Value, most: float) -> None:
        self.bound[place.root] = max(place.most, most)

    def _write(self, value: Value, place: Value) -> None:
        if value.root == place.root and self.chance(90):
            return
        if not can_cast(value, place.dtype):
            return
        matched = self._match(value, place)
        if matched is None:
            return
        source, place = matched
        x, p = source.text, place.text
        options = [f"{p}.copy_({x})"] * 8 + [f"{p}[...] = {x}"] * 3
        options += [f"{p}.copy_({x}, non_blocking=True)", f"{p}.data.copy_({x})"]
        if place.shape:
            options += [f"{p}[:] = {x}"] * 2
            if source.shape == place.shape:
                rows = place.shape[0]
                options += [
                    f"{p}[{self._indices(rows, distinct=True)}] = {x}",
                ]
                # Of one element torch checks that it fits.
                if (source.dtype, place.dtype) != (U8, I8):
                    options += [f"{p}[{self._mask(place.shape)}] = {x}[{self._mask(place.shape)}]"]
                if source.dtype == place.dtype:
                    order = self._indices(rows, distinct=True)
                    options += [
                        f"{p}.index_copy_(0, {order}, {x})",
                        f"torch.where({self._mask(place.shape)}, {x}, 0, out={p})",
                    ]
        text = self.pick(options)
        # One mask for both sides.
        if text.startswith(f"{p}[(torch") or text.startswith(f"{p}[torch.tensor([T"):
            mask = self._mask(place.shape)
            text = f"{p}[{mask}] = {x}[{mask}]"
        if self.attempt(text, source.uses):
            self._wrote(place, source.most)

    def _in_place(self, place: Value) -> None:
        p = place.text
        if place.most > LARGEST or not place.dtype.is_floating_point:
            return
        options = [
            (f"{p}.mul_(2)", 4 * place.most),
            (f"{p}.add_(1)", place.most + 2),
            (f"{p}.neg_()", place.most),
            (f"{p}.copy_(-{p}.float().exp())", ANYTHING),
            (f"{p}.copy_({p}.clone() * 2)", 4 * place.most),
            (f"{p}.clamp_(-2, 2)", place.most),
        ]
        others = [v for v in self.turn if v.shape == place.shape and v.most < LARGEST]
        others = [v for v in others if v.dtype.is_floating_point]
        uses: tuple[str, ...] = ()
        if others and self.chance(40):
            other = self.pick(others)
            options = [
                (f"{p}.add_({other.text})", 2 * (place.most + other.most)),
                (f"{p}.sub_({other.text}, alpha=2)", 2 * (place.most + 2 * other.most)),
            ]
            uses = other.uses
        text, most = self.pick(options)
        if self.attempt(text, uses):
            self._wrote(place, most)

    def _constant(self) -> None:
        place = self._place()
        if place is None:
            return
        p, shape = place.text, place.shape
        counted = f"torch.arange({math.prod(shape)}).remainder(7).reshape({list(shape)})"
        options = [
            f"{p}.zero_()",
            f"{p}.fill_(2)",
            f"{p}[...] = 3",
            f"{p}.copy_({counted})",
            f"{p}.masked_fill_({self._mask(shape)}, 1)" if shape else f"{p}.fill_(1)",
            f"nn.init.ones_({p})",
            f"nn.init.constant_({p}, 4)",
            f"{p}.index_fill_(0, torch.tensor([0]), 2)" if shape else f"{p}.zero_()",
            f"{p}.copy_(torch.ones({list(shape)}))",
        ]
        if self.attempt(self.pick(options), ()):
            self._wrote(place, 8.0)

    def _change_source(self, weight: Value) -> None:
        w = weight.text
        options = [f"{w}.zero_()", f"{w}[...] = 2", f"{w}.fill_(1)"]
        if weight.shape:
            options += [f"{w}[0] = 0", f"{w}[:1].zero_()"]
        if weight.dtype.is_floating_point:
            options += [f"{w}.mul_(2)", f"{w}.add_(1)", f"{w}.neg_()"]
        if self.attempt(self.pick(options), weight.uses):
            self.bound[weight.root] = 2 * weight.most + 1

    def _live_to_live(self) -> None:
        index = self.between(0, len(self.program.targets) - 1)
        value = self.live_value(self.live_text(index))
        if self.chance(50):
            tail = self._view_text(value, for_write=True)
            try:
                value = self.live_value_of(value, tail)
            except (RuntimeError, IndexError):
                return
        if not value.tensor.numel():
            return
        if self.chance(50):
            copy = self.pick([".clone()", ".contiguous().clone()", ".detach().clone()"])
            made = self.define(value.text + copy, [value], value.most)
            if made is None:
                return
            made.root = value.root  # what it holds is no better known
            value = made
        place = self._place(any_place=True)
        if place is not None:
            self._write(value, place)

    def _read(self, value: Value, place: Value) -> None:
        """A loader that looks at a value."""
        if value.dtype != place.dtype or value.most == ANYTHING:
            return
        x, p = value.text, place.text
        options = [
            f"{p}.fill_({x}.reshape(-1)[0].item())",
            f"{p}.fill_({x}.max().item())",
            f"{p}.fill_({x}.reshape(-1).tolist()[-1])",
            f"if ({x} > 0).any():\n    {p}.fill_(3)",
            f"try:\n    s = {x}.reshape(-1)[0].item()\n"
            f"except RuntimeError:\n    s = 1\n{p}.fill_(s)",
        ]
        if value.dtype in (F32, F64, I32, I64):
            options.append(f"{p}.copy_(torch.from_numpy({x}.numpy().copy()).reshape(-1)[0])")
        if self.attempt(self.pick(options), value.uses):
            self._wrote(place, max(value.most, 3.0))
            self.reads = True


def generate(seed: str) -> Program:
    return Generator(seed).run()
