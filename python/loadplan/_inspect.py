"""Plan files in words: what one says, and how two differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ._library import DTYPE_OF
from .plan import Box, Entry, LoadPlan, Write
from .plan_files import FileInfo

ORIGINS = ("checkpoint", "constant", "live bytes", "computed")
_MAX_LISTED = 20


class Landing(NamedTuple):
    """A write, as boxes: of a checkpoint tensor and of a target."""

    target: str
    origin: str  # one of ORIGINS
    source: str  # the name; the operator and some of the names behind it; empty
    names: tuple[str, ...]  # all names behind it
    from_boxes: tuple[Box, ...]
    to_boxes: tuple[Box, ...]
    is_hull: bool  # the boxes hold more than what is meant


class Target(NamedTuple):
    """A live tensor as the plan knows it; ``shares`` is the first name of its storage."""

    name: str
    shares: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


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


def order_of(write: Write) -> str:
    """How the elements are arranged otherwise than in the checkpoint tensor; empty where not."""
    dims = [
        (abs(to), from_ if to > 0 else -from_)
        for extent, to, from_ in zip(
            write.shape, write.target_strides, write.source_strides, strict=True
        )
        if extent > 1
    ]
    steps = [from_ for _, from_ in sorted(dims, reverse=True)]
    words = []
    if [abs(step) for step in steps] != sorted((abs(step) for step in steps), reverse=True):
        words.append("transposed")
    if any(step < 0 for step in steps):
        words.append("reversed")
    if any(step == 0 for step in steps):
        words.append("repeated")
    return " and ".join(words)


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
    items = iter(numbers)

    def boxes(count: int) -> tuple[Box, ...]:
        return tuple(
            tuple((next(items), next(items)) for _ in range(next(items))) for _ in range(count)
        )

    for target in items:
        kind, index, is_hull, num_from, num_to = (next(items) for _ in range(5))
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
        from_boxes, to_boxes = boxes(num_from), boxes(num_to)
        name = targets[target] if target >= 0 else ""
        yield Landing(name, origin, source, names, from_boxes, to_boxes, bool(is_hull))


def overview(plan: LoadPlan, info: FileInfo, path: str) -> str:
    saved = [f"saved by loadplan {info.loadplan}", f"torch {info.torch}"]
    if info.tag:
        saved.append(f"tag {info.tag!r}")
    if info.placement is not None:
        saved.append(f"placement {info.placement!r}")
    targets = targets_of(plan)
    shared = len(targets) - len({target.shares for target in targets})
    lines = [
        f"{path}: {', '.join(saved)}",
        f"{len(targets)} targets{f', {shared} of them share a storage' if shared else ''}; "
        f"holds {info.num_operators} operators, {info.num_constants} constants, "
        f"{info.num_premises} premises",
        plan.report(),
    ]
    return "\n".join(lines)


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
            + "".join(f", {word}" for word in (order_of(write), casts and f"cast {casts}") if word)
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
    return "\n".join(lines)


def as_json(plan: LoadPlan, info: FileInfo, name: str | None) -> dict[str, Any]:
    """Everything that a file says, in plain values; of one name only where it is given."""
    landings: dict[str, list[dict[str, Any]]] = {}
    for landing in landings_of(plan):
        landings.setdefault(landing.source if landing.origin == "checkpoint" else "", []).append(
            landing._asdict()
        )
    names = list(plan.entries) if name is None else [name]
    entries = {n: {**_plain(plan.entries[n]), "lands": landings.get(n, [])} for n in names}
    if name is not None:
        return entries
    return {
        "saved": {**vars(info), "placement": repr(info.placement)},
        "targets": [target._asdict() for target in targets_of(plan)],
        "names": entries,
        "nameless": landings.get("", []),
        "uncovered": {n: vars(item) for n, item in plan.uncovered.items()},
        "overlaps": [vars(item) for item in plan.overlaps],
    }


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "reason": entry.reason,
        "shape": entry.shape,
        "dtype": text_of_dtype(entry.dtype),
        "nbytes": entry.nbytes,
        "reads": entry.reads,
        "inputs": entry.inputs,
    }


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
    theirs = other.entries
    lands: dict[str, list[str]] = {}
    wanted = {
        name for name in plan.entries if name not in theirs or _raw(plan, name) != _raw(other, name)
    }
    for landing in landings_of(plan) if wanted else ():
        if landing.origin == "checkpoint" and landing.source in wanted:
            of_name = lands.setdefault(landing.source, [])
            order = order_of(plan.entries[landing.source].writes[len(of_name)])
            of_name.append(
                f"{text_of_boxes(landing.from_boxes)} -> `{landing.target}` "
                f"{text_of_boxes(landing.to_boxes)}" + (f", {order}" if order else "")
            )
    return {
        name: f"{text_of_dtype((e := plan.entries[name]).dtype)} {list(e.shape)} {e.kind}"
        + (f" ({e.reason})" if e.reason else "")
        + "".join(f"; {line}" for line in lands.get(name, []))
        for name in plan.entries
        if name in wanted
    }


def _raw(plan: LoadPlan, name: str) -> Any:
    """All that a plan says of a name, as the library hands it over."""
    index = plan._position(name)
    meta = plan._metas[index]
    reason, nbytes, reads, numbers, targets, inputs = plan._handle.entry(index)
    kind = plan._entries._kinds[index]
    others = [plan._metas[i].name for i in inputs]
    return meta[1:3], kind, reason, nbytes, reads, numbers, targets, others


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
    return "\n".join(lines)


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
