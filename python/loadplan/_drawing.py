"""Plans as drawings (SVG): which boxes of which checkpoint tensors land where in a target.

Each target is a map of its elements; targets and names that differ in numbers only share one map
and one line of its legend, so that a model of 70,000 names fits on a page that people read.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice, product
from math import ceil, prod, sqrt
from typing import TypeAlias

from ._inspect import (
    Landing,
    Target,
    landings_of,
    printable,
    targets_of,
    text_of_boxes,
    text_of_nbytes,
)
from .plan import Box, LoadPlan

WIDTH, MARGIN, MAP_WIDTH = 1240, 28, 384
_BAR, _LOW, _HIGH = 30, 84, 190  # heights of maps: of vectors, of few boxes, of many
_LEGEND_X = MARGIN + MAP_WIDTH + 32
_LINE, _THUMB = 40, 46  # a line of a legend, and the checkpoint tensor in front of it
_FOLD_TARGETS, _FOLD_NAMES = 16, 12  # more of them are shown by pattern
_MAX_PANELS, _MAX_LINES, _MAX_TILES, _MAX_MEMBERS = 80, 12, 400, 256
_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f",
    "#8cd17d", "#499894",
)  # fmt: skip
_ELSEWHERE = "#eaeef2"
_FILL = {"constant": "url(#constant)", "live bytes": "url(#live)"}

_STYLE = """
text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: #24292f }
.title { font-size: 20px; font-weight: 600 } .name { font-size: 13px; font-weight: 600 }
.mono { font-family: ui-monospace, 'DejaVu Sans Mono', monospace; font-size: 11px }
.quiet { fill: #6e7781; font-size: 11px } .map { fill: url(#bare); stroke: #8c959f }
.box { stroke: #fff; stroke-width: .6 } .thumb { stroke: #afb8c1 } .rule { stroke: #d8dee4 }
"""
_PATTERNS = """
<pattern id="bare" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="7" height="7" fill="#fff"/><rect width="1.6" height="7" fill="#e5534b" opacity=".5"/></pattern>
<pattern id="constant" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" fill="#d0d7de"/><circle cx="2" cy="2" r=".9" fill="#6e7781"/></pattern>
<pattern id="live" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" fill="#efe3c8"/><rect width="5" height="1.4" fill="#b08d4f"/></pattern>
<pattern id="derived" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<rect width="1.3" height="6" fill="#fff" opacity=".65"/></pattern>
"""  # noqa: E501

ColourOf: TypeAlias = Callable[[Landing], tuple[str, bool]]


def folded(name: str, everywhere: bool = False) -> str:
    """Names that differ in numbers only are one: ``layers.12.w`` is ``layers.*.w``."""
    return re.sub(r"\d+" if everywhere else r"(?<![^.])\d+(?![^.])", "*", name)


def escape(text: str, quote: bool = True) -> str:
    """Control characters are none of XML."""
    return html.escape(printable(text), quote)


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


@dataclass
class _Group:
    """Targets of one pattern, shape and dtype; the first one stands for all."""

    title: str
    members: list[Target] = field(default_factory=list)


class _Svg:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", tip: str = "") -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text, quote=False)}{title}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, tip: str = "", kind: str = "box"
    ) -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        style = f' fill="{fill}"' if fill else ""
        self.parts.append(
            f'<rect x="{x:.4g}" y="{y:.6g}" width="{max(w, 0.4):.4g}" height="{max(h, 0.4):.4g}"'
            f' class="{kind}"{style}' + (f">{title}</rect>" if title else "/>")
        )

    def rule(self, y: float) -> None:
        self.parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:g}" y2="{y:g}" class="rule"/>'
        )

    def page(self, height: float) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}"><style>{_STYLE}</style><defs>{_PATTERNS}</defs>'
            f'<rect width="100%" height="100%" fill="#fff"/>{chr(10).join(self.parts)}</svg>\n'
        )


class _Page:
    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.svg = _Svg()
        self.y = 0.0
        self.landings: dict[str, list[Landing]] = {}
        for landing in landings_of(plan):
            self.landings.setdefault(landing.target, []).append(landing)
        kinds = plan._entries._kinds
        self.derived = {n for n, kind in zip(plan.entries, kinds, strict=True) if kind == 1}
        self.fallbacks = [n for n, kind in zip(plan.entries, kinds, strict=True) if kind == 2]
        self.uncovered = plan.uncovered

    def elsewhere(self, target: Target) -> bool:
        """Whether its bytes are written as those of another target that lies there too."""
        return (
            target.shares != target.name
            and target.name not in self.landings
            and target.name not in self.uncovered
        )

    def head(self, path: str, shown: list[Target], total: int) -> None:
        svg = self.svg
        svg.text(MARGIN, 42, path, "title")
        which = f"{len(shown)} of {total} targets" if len(shown) != total else f"{total} targets"
        counts = self.plan.report().split("\n", 1)[0].removeprefix("load plan: ")
        svg.text(MARGIN, 64, f"{counts}; {which}", "quiet")
        x = float(MARGIN)
        for fill, text in (
            ("#4e79a7", "copied"), ("derived", "cast or computed"), (_FILL["constant"], "constant"),
            (_FILL["live bytes"], "live bytes kept"), (_ELSEWHERE, "written as another target"),
            ("", "not written by the plan"),
        ):  # fmt: skip
            if fill == _ELSEWHERE:
                svg.box(x, 78, 18, 12, fill, kind="thumb")
            elif fill == "derived":
                svg.box(x, 78, 18, 12, "#4e79a7")
                svg.box(x, 78, 18, 12, "url(#derived)")
            else:
                svg.box(x, 78, 18, 12, fill, kind="box" if fill else "map")
            svg.text(x + 24, 88, text, "quiet")
            x += 40 + 6.3 * len(text)
        self.y = 112

    def panel(self, group: _Group, fold_names: bool) -> None:
        target = group.members[0]
        landings = self.landings.get(target.name, [])
        lines = self._lines(landings, fold_names)
        self.svg.rule(self.y)
        top = self.y + 22
        self.svg.text(MARGIN, top, _shortened(group.title, 140), "name", target.name)
        self.svg.text(MARGIN, top + 17, self._about(group, landings), "quiet")
        top += 30
        colours = {key: self._colour(index, ls[0]) for index, (key, ls) in enumerate(lines.items())}
        key_of = {id(landing): key for key, ls in lines.items() for landing in ls}
        height = self._map(target, landings, lambda item: colours[key_of[id(item)]], top)
        legend = self._legend(target, lines, colours, top)
        members = self._members(group, top + height + 10) if len(group.members) > 1 else 0
        self.y = top + max(height + members, legend) + 22

    def _about(self, group: _Group, landings: list[Landing]) -> str:
        target = group.members[0]
        parts = [f"{list(target.shape)} {target.dtype}", text_of_nbytes(target.nbytes)]
        names = {name for landing in landings for name in landing.names}
        parts.append(f"from {len(names)} name{'s' if len(names) != 1 else ''}")
        if len(group.members) > 1:
            parts.insert(0, f"{len(group.members)} targets, the first one shown")
        if target.shares != target.name:
            parts.append(f"lies in the storage of {target.shares}")
        missing = self.uncovered.get(target.name)
        if missing is not None:
            parts.append(f"{text_of_nbytes(missing.nbytes)} not written by the plan")
        return "  ·  ".join(parts)

    def _lines(self, landings: list[Landing], fold: bool) -> dict[str, list[Landing]]:
        """The lines of the legend: each name, or each pattern of names."""
        fold = fold or len({landing.source for landing in landings}) > _FOLD_NAMES
        lines: dict[str, list[Landing]] = {}
        for landing in landings:
            source = landing.source or landing.origin
            lines.setdefault(folded(source) if fold else source, []).append(landing)
        if len(lines) > _MAX_LINES and fold:
            everywhere: dict[str, list[Landing]] = {}
            for key, some in lines.items():
                everywhere.setdefault(folded(key, True), []).extend(some)
            return everywhere
        return lines

    def _colour(self, index: int, landing: Landing) -> tuple[str, bool]:
        """The fill, and whether it is hatched."""
        fill = _FILL.get(landing.origin, _COLOURS[index % len(_COLOURS)])
        return fill, landing.origin == "computed" or landing.source in self.derived

    def _map(
        self, target: Target, landings: list[Landing], colour_of: ColourOf, top: float
    ) -> float:
        shape = (1,) * (2 - len(target.shape)) + target.shape
        lead, (rows, columns) = shape[:-2], shape[-2:]
        tiles = min(prod(lead), _MAX_TILES)
        across = max(1, min(tiles, ceil(sqrt(tiles * 1.6))))
        down = max(1, ceil(tiles / across))
        gap = 3 if tiles > 1 else 0
        width = (MAP_WIDTH - gap * (across - 1)) / across
        flat = _LOW if len(landings) <= 6 else _HIGH
        height = _HIGH if tiles > 4 else flat if rows > 1 or tiles > 1 else _BAR
        high = (height - gap * (down - 1)) / down
        place: dict[tuple[int, ...], tuple[float, float]] = {}
        for number, index in enumerate(islice(product(*map(range, lead)), tiles)):
            x = MARGIN + number % across * (width + gap)
            y = top + number // across * (high + gap)
            place[index] = x, y
            self.svg.box(x, y, width, high, "", kind="map")
        for x, y in place.values() if self.elsewhere(target) else ():
            self.svg.box(x, y, width, high, _ELSEWHERE, f"written as {target.shares}", "thumb")
        for landing in landings:
            fill, hatched = colour_of(landing)
            tip = f"{landing.source or landing.origin} {text_of_boxes(landing.from_boxes)}"
            for box in landing.to_boxes:
                for x0, y0, w, h in _tiles(box, place, rows, columns, width, high):
                    self.svg.box(x0, y0, w, h, fill, f"{tip} → {text_of_boxes([box])}")
                    if hatched:
                        self.svg.box(x0, y0, w, h, "url(#derived)")
        if prod(lead) > tiles:
            self.svg.text(MARGIN, top + height + 14, f"first {tiles} of {prod(lead)}", "quiet")
            return height + 18.0
        return float(height)

    def _legend(
        self,
        target: Target,
        lines: dict[str, list[Landing]],
        colours: dict[str, tuple[str, bool]],
        top: float,
    ) -> float:
        y = top
        for key, landings in islice(lines.items(), _MAX_LINES):
            self._thumb(landings[0], colours[key], y)
            x = _LEGEND_X + _THUMB + 12
            self.svg.text(x, y + 12, _shortened(key, 100), "mono", key)
            self.svg.text(x, y + 27, self._lands(landings), "quiet")
            y += _LINE
        if not lines:
            text = "nothing of its own that the plan writes"
            if self.elsewhere(target):
                text = f"the same bytes as {target.shares}, see there"
            self.svg.text(_LEGEND_X, y + 11, _shortened(text, 120), "quiet")
            y += _LINE
        if len(lines) > _MAX_LINES:
            self.svg.text(_LEGEND_X, y + 11, f"and {len(lines) - _MAX_LINES} more", "quiet")
            y += 18
        return y - top

    def _thumb(self, landing: Landing, colour: tuple[str, bool], y: float) -> None:
        """The checkpoint tensor, with the boxes that land; a swatch where there is none."""
        fill, hatched = colour
        entry = self.plan.entries[landing.source] if landing.from_boxes else None
        shape = (1,) * (2 - len(entry.shape)) + entry.shape if entry else (1, 1)
        place: dict[tuple[int, ...], tuple[float, float]] = {(): (float(_LEGEND_X), y)}
        high = 30 if shape[-2] > 1 or entry is None else 12
        if entry is not None:
            self.svg.box(_LEGEND_X, y, _THUMB, high, "#eaeef2", kind="thumb")
        for box in landing.from_boxes if entry else (((0, 1), (0, 1)),):
            for x0, y0, w, h in _tiles(box[-2:], place, shape[-2], shape[-1], _THUMB, high):
                self.svg.box(x0, y0, max(w, 1.5), max(h, 1.5), fill)
                if hatched:
                    self.svg.box(x0, y0, max(w, 1.5), max(h, 1.5), "url(#derived)")

    def _lands(self, landings: list[Landing]) -> str:
        first = landings[0]
        origins = {landing.from_boxes for landing in landings}
        about = "about " if first.is_hull else ""
        if len(landings) == 1:
            left = text_of_boxes(first.from_boxes)
            text = f"{about}{left} → {text_of_boxes(first.to_boxes)}".lstrip()
        else:
            each = f"each {text_of_boxes(first.from_boxes)}" if len(origins) == 1 else "cut apart"
            text = f"× {len(landings)}, {each if first.from_boxes else ''} → first " + (
                f"{text_of_boxes(first.to_boxes)}"
            )
        if first.origin == "checkpoint" and first.source in self.plan.entries:
            entry = self.plan.entries[first.source]
            reason = f", {entry.reason}" if entry.kind == "derived" and entry.reason else ""
            order = first.order and f", {first.order}"
            text += f"   ({entry.kind}{reason}{order}, of {list(entry.shape)})"
        return _shortened(text, 125)

    def _members(self, group: _Group, top: float) -> float:
        """A square for each target of the group; those that are filled in another way stand out."""
        usual = self._signature(group.members[0])
        others = 0
        for number, member in enumerate(group.members[:_MAX_MEMBERS]):
            same = self._signature(member) == usual
            others += not same
            x, y = MARGIN + number % 32 * 12, top + number // 32 * 12
            self.svg.box(x, y, 10, 10, "#afb8c1" if same else "#cf222e", member.name)
        rows = ceil(min(len(group.members), _MAX_MEMBERS) / 32)
        text = "all are filled like the first" if not others else f"{others} are filled otherwise"
        self.svg.text(MARGIN, top + rows * 12 + 12, text, "quiet")
        return 10 + rows * 12 + 18.0

    def _signature(self, target: Target) -> list[tuple[object, ...]]:
        return [
            (folded(item.source), item.origin, item.from_boxes, item.to_boxes)
            for item in self.landings.get(target.name, [])
        ]

    def foot(self, left_out: int) -> None:
        if left_out:
            self.svg.rule(self.y)
            self.svg.text(MARGIN, self.y + 22, f"{left_out} more groups of targets; use --target")
            self.y += 34
        patterns: dict[str, list[str]] = {}
        for name in self.fallbacks:
            patterns.setdefault(folded(name), []).append(name)
        if not patterns:
            return
        self.svg.rule(self.y)
        number = len(self.fallbacks)
        text = f"{number} name{'s go' if number != 1 else ' goes'} through the loader"
        self.svg.text(MARGIN, self.y + 22, text, "name")
        self.y += 34
        for pattern, names in islice(patterns.items(), _MAX_LINES):
            count = f"× {len(names)}  " if len(names) > 1 else ""
            shown = pattern if len(names) > 1 else names[0]
            self.svg.text(MARGIN, self.y + 11, _shortened(f"{count}{shown}", 150), "mono")
            reason = self.plan.entries[names[0]].reason
            self.svg.text(MARGIN, self.y + 26, _shortened(reason, 170), "quiet")
            self.y += _LINE


def _tiles(
    box: Box,
    place: dict[tuple[int, ...], tuple[float, float]],
    rows: int,
    columns: int,
    width: float,
    height: float,
) -> Iterator[tuple[float, float, float, float]]:
    """Where a box of the target lies on its map, a rectangle for each tile that it meets."""
    bounds = ((0, 1),) * (2 - len(box)) + box
    (row, row_end), (column, column_end) = bounds[-2:]
    for index in product(*(range(*bound) for bound in bounds[:-2])):
        if index not in place:
            continue
        x, y = place[index]
        yield (
            x + width * column / max(columns, 1),
            y + height * row / max(rows, 1),
            width * (column_end - column) / max(columns, 1),
            height * (row_end - row) / max(rows, 1),
        )


def _groups(targets: Iterable[Target], fold: bool, everywhere: bool = False) -> list[_Group]:
    groups: dict[tuple[object, ...], _Group] = {}
    for target in targets:
        title = folded(target.name, everywhere) if fold else target.name
        key = (title, target.shape, target.dtype) if fold else (target.name,)
        groups.setdefault(key, _Group(title)).members.append(target)
    for group in groups.values():
        if len(group.members) == 1:
            group.title = group.members[0].name
    return list(groups.values())


def draw(plan: LoadPlan, title: str, pattern: str | None = None) -> str:
    """The drawing of a plan, or of its targets whose names are like ``pattern``."""
    targets = targets_of(plan)
    shown = [t for t in targets if pattern is None or fnmatchcase(t.name, pattern)]
    if not shown:
        raise ValueError(f"no target of the plan is like `{pattern}`")
    page = _Page(plan)
    page.head(title, shown, len(targets))
    fold = len(shown) > _FOLD_TARGETS
    groups = _groups(shown, fold)
    if len(groups) > _MAX_PANELS:
        groups = _groups(shown, fold, everywhere=True)
    for group in groups[:_MAX_PANELS]:
        page.panel(group, fold)
    page.foot(max(len(groups) - _MAX_PANELS, 0))
    return page.svg.page(page.y + 10)
