"""Plan files in words: what one says, and how two differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from ._library import DTYPE_OF
from .plan import KINDS, Box, LoadPlan, box_at
from .plan_files import FileInfo

ORIGINS = ("checkpoint", "constant", "live bytes", "computed")
ARRANGEMENTS = ("transposed", "reversed", "repeated")
ORDERS = [
    " and ".join(word for bit, word in enumerate(ARRANGEMENTS) if n >> bit & 1) for n in range(8)
]
_MAX_LISTED = 20
_MAX_COMPARED = 5000  # names, letter by letter


class Landing(NamedTuple):
    """A write, as boxes: of a checkpoint tensor and of a target."""

    target: str
    origin: str  # one of ORIGINS
    source: str  # the name; the operator and some of the names behind it; empty
    names: tuple[str, ...]  # all names behind it
    from_boxes: tuple[Box, ...]
    to_boxes: tuple[Box, ...]
    is_hull: bool  # the boxes hold more than what is meant
    order: str  # how the elements are arranged otherwise than in the checkpoint tensor; empty


class Target(NamedTuple):
    """A live tensor as the plan knows it; ``shares`` is the first name of its storage."""

    name: str
    shares: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


# What moves a terminal's cursor, colours its text or turns the direction of a line.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
        0xFFFE,
        0xFFFF,
    )
}


def printable(line: str) -> str:
    """Names may hold anything, in files that others made above all."""
    return line.translate(_CONTROLS)


@lru_cache(maxsize=1 << 16)
def text_of_box(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def text_of_boxes(boxes: Iterable[Box]) -> str:
    shown = [text_of_box(box) for box in boxes]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return " ".join(shown[:8]) + more


def text_of_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def text_of_nbytes(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def targets_of(plan: LoadPlan) -> list[Target]:
    names, shared, numbers = plan._handle.targets()
    items = iter(numbers)
    targets = []
    for name, shares in zip(names, shared, strict=True):
        dtype, _, itemsize, rank = (next(items) for _ in range(4))
        shape = tuple(next(items) for _ in range(rank))
        strides = tuple(next(items) // itemsize for _ in range(rank))
        nbytes = itemsize
        for extent in shape:
            nbytes *= extent
        targets.append(Target(name, shares, text_of_dtype(DTYPE_OF[dtype]), shape, strides, nbytes))
    return targets


def landings_of(plan: LoadPlan) -> Iterator[Landing]:
    """Every write, names in declared order."""
    numbers, operators, behind = plan._handle.landings()
    declared = list(plan.entries)
    targets = plan._handle.targets()[0]
    rest = iter(behind)
    names_of = [tuple(declared[next(rest)] for _ in range(next(rest))) for _ in operators]
    at = 0
    while at < len(numbers):
        target, kind, index, how, num_from, num_to = numbers[at : at + 6]
        at += 6
        from_boxes, at = _boxes_at(numbers, at, num_from)
        to_boxes, at = _boxes_at(numbers, at, num_to)
        origin = ORIGINS[kind]
        names: tuple[str, ...] = ()
        source = ""
        if origin == "checkpoint":
            source = declared[index]
            names = (source,)
        elif origin == "computed":
            names = names_of[index]
            more = ", ..." if len(names) > 4 else ""
            source = f"{operators[index]} of {', '.join(names[:4])}{more}"
        name = targets[target] if target >= 0 else ""
        yield Landing(
            name, origin, source, names, from_boxes, to_boxes, bool(how & 1), ORDERS[how >> 1]
        )


def _boxes_at(numbers: list[int], at: int, count: int) -> tuple[tuple[Box, ...], int]:
    boxes = []
    for _ in range(count):
        box, at = box_at(numbers, at)
        boxes.append(box)
    return tuple(boxes), at


def overview(plan: LoadPlan, info: FileInfo, path: str) -> str:
    saved = [f"saved by loadplan {info.loadplan}", f"torch {info.torch}"]
    if info.tag:
        saved.append(f"tag {info.tag!r}")
    if info.placement is not None:
        saved.append(f"placement {info.placement!r}")
    targets = targets_of(plan)
    storages = len({target.shares for target in targets})
    lines = [
        printable(f"{path}: {', '.join(saved)}"),
        f"{len(targets)} targets{f' in {storages} storages' if storages < len(targets) else ''}; "
        f"holds {info.num_operators} operators, {info.num_constants} constants, "
        f"{info.num_premises} premises",
        plan.report(),
    ]
    return "\n".join(lines)


def names_like(plan: LoadPlan, name: str) -> str:
    """What follows the error that ``name`` is none of the plan's."""
    found = [known for known in plan.entries if name in known or fnmatchcase(known, name)]
    if not found:
        found = get_close_matches(name, islice(plan.entries, _MAX_COMPARED), 3)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"; names like it: {', '.join(f'`{known}`' for known in found[:3])}{more}" if found else ""
    )


def plan_of_name(plan: LoadPlan, name: str) -> str:
    """One name in full."""
    entry = plan.entries[name]
    lines = [f"{name}: {entry.kind}" + (f" ({entry.reason})" if entry.reason else "")]
    lines.append(
        f"  {text_of_dtype(entry.dtype)} {list(entry.shape)}; reads {text_of_nbytes(entry.nbytes)}"
    )
    if entry.reads:
        lines.append(f"  reads {text_of_boxes(entry.reads)}")
    behind = [landing for landing in landings_of(plan) if name in landing.names]
    own = [landing for landing in behind if landing.origin == "checkpoint"]
    for landing, write in zip(own, entry.writes, strict=True):
        casts = " -> ".join(text_of_dtype(dtype) for dtype in write.casts)
        about = "about " if landing.is_hull else ""
        lines.append(
            f"  {about}{text_of_boxes(landing.from_boxes)} -> `{landing.target}` "
            f"{text_of_boxes(landing.to_boxes)}"
            + "".join(f", {word}" for word in (landing.order, casts and f"cast {casts}") if word)
        )
        lines.append(
            f"    region: byte {write.target_offset}, {list(write.shape)} items of "
            f"{write.target_itemsize}, strides {list(write.target_strides)} bytes, from byte "
            f"{write.source_offset}, strides {list(write.source_strides)}"
        )
    for landing in behind:
        if landing.origin == "computed":
            where = f"`{landing.target}` {text_of_boxes(landing.to_boxes)}"
            lines.append(f"  {landing.source} -> {where}")
    for other, boxes in entry.inputs.items():
        if other != name:
            lines.append(f"  computed together with `{other}` {text_of_boxes(boxes)}")
    return "\n".join(map(printable, lines))


def json_lines(plan: LoadPlan, info: FileInfo, name: str | None) -> Iterator[str]:
    """Everything that a file says, as lines of one JSON object, a name on each.

    Of one name only where it is given.
    """
    encode = json.JSONEncoder().encode  # with indentation it would be the slow one
    entries = _named(entries_as_json(plan, name), encode)
    if name is not None:
        yield from ("{", *entries, "}")
        return
    nameless = [item for item in landings_of(plan) if item.origin != "checkpoint"]
    values = {
        "saved": {**vars(info), "placement": repr(info.placement)},
        "targets": [target._asdict() for target in targets_of(plan)],
        "nameless": [landing._asdict() for landing in nameless],
        "uncovered": {n: vars(item) for n, item in plan.uncovered.items()},
        "overlaps": [vars(item) for item in plan.overlaps],
    }
    yield "{"
    for key, value in values.items():
        yield f"{encode(key)}: {encode(value)},"
    yield '"names": {'
    yield from entries
    yield "}}"


def _named(items: Iterable[tuple[str, Any]], encode: Callable[[Any], str]) -> Iterator[str]:
    line = ""
    for name, value in items:
        if line:
            yield line + ","
        line = f"{encode(name)}: {encode(value)}"
    if line:
        yield line


def entries_as_json(plan: LoadPlan, name: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    lands: dict[str, list[dict[str, Any]]] = {}
    for landing in landings_of(plan):
        if landing.origin == "checkpoint" and name in (None, landing.source):
            lands.setdefault(landing.source, []).append(landing._asdict())
    declared = list(plan.entries)
    reasons, numbers = plan._handle.entries()
    kinds = plan._handle.kinds()
    at = 0
    found = []
    for reason in reasons:
        nbytes, num_reads = numbers[at : at + 2]
        reads, at = _boxes_at(numbers, at + 2, num_reads)
        inputs = numbers[at + 1 : at + 1 + numbers[at]]
        at += 1 + len(inputs)
        found.append((reason, nbytes, reads, inputs))
    if name is not None:
        plan._position(name)
    for index, (reason, nbytes, reads, inputs) in enumerate(found):
        if name not in (None, declared[index]):
            continue
        meta = plan._metas[index]
        yield (
            meta.name,
            {
                "kind": KINDS[kinds[index]],
                "reason": reason,
                "shape": meta.shape,
                "dtype": text_of_dtype(meta.dtype),
                "nbytes": nbytes,
                "reads": reads,
                "inputs": {declared[i]: found[i][2] for i in inputs},
                "lands": lands.get(meta.name, []),
            },
        )


class Change(NamedTuple):
    what: str  # "file", "targets", "nameless", "names", "uncovered"
    name: str
    before: str  # empty: it is new
    after: str  # empty: it is gone


Opened = tuple[LoadPlan, FileInfo]


def differences(a: Opened, b: Opened) -> list[Change]:
    """What changed from one plan to the other; empty where they do the same."""
    (plan_a, info_a), (plan_b, info_b) = a, b
    found = []
    for field in ("loadplan", "torch", "tag", "placement"):
        before, after = getattr(info_a, field), getattr(info_b, field)
        if before != after:
            found.append(Change("file", field, repr(before), repr(after)))
    if info_a.held != info_b.held:
        found.append(Change("file", "held values", _held_text(info_a), _held_text(info_b)))
    targets_a, targets_b = (
        {target.name: _target_text(target) for target in targets_of(plan)}
        for plan in (plan_a, plan_b)
    )
    found += _compare("targets", targets_a, targets_b)
    found += _compare("nameless", _nameless_texts(plan_a), _nameless_texts(plan_b))
    found += _compare("names", _name_texts(plan_a, plan_b), _name_texts(plan_b, plan_a))
    uncovered_a, uncovered_b = (
        {n: f"{u.nbytes} of {u.total_nbytes} bytes not written" for n, u in p.uncovered.items()}
        for p in (plan_a, plan_b)
    )
    found += _compare("uncovered", uncovered_a, uncovered_b)
    if not found and info_a.digest != info_b.digest:
        # The same boxes in these words: operators that read them in another order, for example.
        texts = [f"checksum {info.digest & (2**64 - 1):016x}" for info in (info_a, info_b)]
        found.append(Change("file", "order of elements", *texts))
    return found


def _held_text(info: FileInfo) -> str:
    return (
        f"{info.num_premises} premises, {info.num_constants} constants, "
        f"{info.num_operators} operators, checksum {info.held & (2**64 - 1):016x}"
    )


def _nameless_texts(plan: LoadPlan) -> dict[str, str]:
    """What no name of the checkpoint is copied to: by origin and target."""
    texts: dict[str, str] = {}
    for landing in landings_of(plan):
        if landing.origin != "checkpoint":
            key = f"{landing.source or landing.origin} -> {landing.target}"
            texts[key] = f"{texts.get(key, '')} {text_of_boxes(landing.to_boxes)}".lstrip()
    return texts


def _compare(what: str, before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    for name, text in before.items():
        if text != after.get(name, ""):
            yield Change(what, name, text, after.get(name, ""))
    for name in after.keys() - before.keys():
        yield Change(what, name, "", after[name])


def _target_text(target: Target) -> str:
    shared = "" if target.shares == target.name else f", shares `{target.shares}`"
    return f"{target.dtype} {list(target.shape)}, strides {list(target.strides)}{shared}"


def _name_texts(plan: LoadPlan, other: LoadPlan) -> dict[str, str]:
    """By name what the plan does with it, for those with which ``other`` does something else."""
    lands: dict[str, list[str]] = {}
    theirs = dict(zip(other.entries, other._handle.entry_digests(), strict=True))
    ours = zip(plan.entries, plan._handle.entry_digests(), strict=True)
    wanted = {name for name, digest in ours if theirs.get(name) != digest}
    for landing in landings_of(plan) if wanted else ():
        if landing.origin == "checkpoint" and landing.source in wanted:
            lands.setdefault(landing.source, []).append(
                f"; {text_of_boxes(landing.from_boxes)} -> `{landing.target}` "
                f"{text_of_boxes(landing.to_boxes)}" + (landing.order and f", {landing.order}")
            )
    texts = {}
    reasons, kinds = plan._handle.entries()[0], plan._handle.kinds()
    for meta, kind, reason in zip(plan._metas, kinds, reasons, strict=True):
        if meta.name in wanted:
            what = f"{text_of_dtype(meta.dtype)} {list(meta.shape)} {KINDS[kind]}"
            texts[meta.name] = f"{what} ({reason})" if reason else what
            texts[meta.name] += "".join(lands.get(meta.name, ()))
    return texts


def diff_text(changes: list[Change], a: str, b: str) -> str:
    """Changes of one kind whose words differ in numbers only are one line."""
    lines = [f"{a} -> {b}"]
    for what in ("file", "targets", "nameless", "names", "uncovered"):
        mine = [change for change in changes if change.what == what]
        if not mine:
            continue
        groups: dict[tuple[str, ...], list[Change]] = {}
        for change in mine:
            groups.setdefault(tuple(_folded(text) for text in change[1:]), []).append(change)
        lines.append(f"{what}: {len(mine)} changed")
        for group in list(groups.values())[:_MAX_LISTED]:
            first = group[0]
            more = f" (and {len(group) - 1} like it)" if len(group) > 1 else ""
            lines.append(f"  `{first.name}`{more}")
            lines.append(f"    - {first.before}" if first.before else "    new")
            lines.append(f"    + {first.after}" if first.after else "    gone")
        if len(groups) > _MAX_LISTED:
            lines.append(f"  and {len(groups) - _MAX_LISTED} other changes")
    return "\n".join(map(printable, lines))


def _folded(text: str) -> str:
    return re.sub(r"\d+", "#", text)


_STYLES = {"direct": "green", "derived": "cyan", "fallback": "yellow", "unneeded": "dim"}


def printed_by_rich(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for kind, style in _STYLES.items():
        styled.highlight_regex(rf"\b{kind}\b", style)
    styled.highlight_regex(r"`[^`]+`", "bold")
    styled.highlight_regex(r"(?m)^    - .*$", "red")
    styled.highlight_regex(r"(?m)^    \+ .*$", "green")
    Console(soft_wrap=True, highlight=False).print(styled)
