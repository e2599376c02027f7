"""A treemap of a checkpoint: leaves by bytes, coloured by dtype or by change.

Example:
    >>> svg = treemap(opened.leaves.values(), width=960, height=480)

A rectangle is divided into areas in proportion, with sides as equal as possible. The
algorithm is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000); equal
parts, such as layers, are rows that are read as text is.

Example:
    >>> whole = Rectangle(x=0.0, y=0.0, width=6.0, height=4.0)
    >>> [part.area for part in divided(whole, [3, 2, 1])]
    [12.0, 8.0, 4.0]

Groups by path are divided by area, the largest first, as long as there are rectangles
left and the parts can be seen. A group that is not divided is one tile; children that
are too small or too many share a tile of their group, the rest. The children of one
group have areas in proportion to their bytes; between groups, headers and margins take
a little.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, TypeAlias

from storesvc_client._pictures.svg import (
    DTYPE_COLOURS,
    FONT,
    GREY,
    Style,
    document,
    draw_rect,
    fit_text,
    ink_on,
    note,
    text_width,
    words,
)
from storesvc_client._values.models import LeafInfo
from storesvc_client._views.texts import (
    count_text,
    dtype_text,
    key_text,
    natural_key,
    printable,
    shape_text,
    size_text,
)

Shares: TypeAlias = Mapping[str, float | None]
"""Share of changed chunks by key, from 0 to 1; None: not known. Leaves without an entry
are unchanged."""

OTHER: Final = "other"
UNKNOWN: Final = "not known"

CHANGES: Final = (
    ("unchanged", "#8d99a6", 0.0),
    ("up to 25 % changed", "#e8c35a", 0.25),
    ("up to 50 %", "#e89a3c", 0.5),
    ("up to 75 %", "#d9653b", 0.75),
    ("up to 100 %", "#b03a48", 1.0),
)
"""Names, colours and upper limits of shares of changed chunks."""

_PREFERRED: Final = {"float32": 0, "bfloat16": 1, "float16": 1, "float64": 2}
"""Colours that dtypes have unless a larger one has them."""


@dataclass(frozen=True, slots=True)
class ByDtype:
    """Colours by dtype; leaves together have the dtype of most of their bytes."""

    colours: Mapping[str, str]
    """Colours by entry of the legend, in its order."""
    title: str = "dtype"
    """Words for "by ..."."""

    @classmethod
    def from_leaves(cls, leaves: Iterable[LeafInfo]) -> "ByDtype":
        """Returns the colours of the dtypes with the most bytes; the others share
        grey."""
        free, colours = [*DTYPE_COLOURS], {}
        for dtype, _ in _bytes_by_dtype(leaves).most_common(len(free)):
            wanted = DTYPE_COLOURS[_PREFERRED.get(dtype, -1)]
            colour = wanted if wanted in free else free[0]
            free.remove(colour)
            colours[dtype] = colour
        return cls({**colours, OTHER: GREY})

    def entry(self, leaves: Sequence[LeafInfo]) -> str:
        """Returns the entry of the legend that leaves belong to together."""
        if len(leaves) == 1:
            dtype = dtype_text(leaves[0])
        else:
            ((dtype, _),) = _bytes_by_dtype(leaves).most_common(1)
        return dtype if dtype in self.colours else OTHER

    def remark(self, leaves: Sequence[LeafInfo]) -> str:
        """Returns what a tooltip adds about leaves; "" for nothing."""
        return "" if len(leaves) == 1 else ", ".join(_bytes_by_dtype(leaves))


@dataclass(frozen=True, slots=True)
class ByChange:
    """Colours by share of changed chunks; leaves together have their share of bytes."""

    shares: Shares
    title: str = "share of changed chunks"

    @property
    def colours(self) -> Mapping[str, str]:
        return {name: colour for name, colour, _ in CHANGES} | {UNKNOWN: GREY}

    def entry(self, leaves: Sequence[LeafInfo]) -> str:
        share = changed_share(leaves, self.shares)
        if share is None:
            return UNKNOWN
        # beyond 1 only by rounding, or by a server that counts wrongly
        return next(
            (name for name, _, most in CHANGES if share <= most), CHANGES[-1][0]
        )

    def remark(self, leaves: Sequence[LeafInfo]) -> str:
        share = changed_share(leaves, self.shares)
        return "change not known" if share is None else f"{percent(share)} changed"


Colouring: TypeAlias = ByDtype | ByChange


def changed_share(leaves: Sequence[LeafInfo], shares: Shares) -> float | None:
    """Returns the share of changed bytes; None if that of a leaf is not known."""
    changed, total = 0.0, 0
    for leaf in leaves:
        share = shares.get(leaf.key, 0.0)
        if share is None:
            return None
        changed += share * leaf.size_bytes
        total += leaf.size_bytes
    return changed / total if total else 0.0


def percent(share: float) -> str:
    """Returns a share as text; 0 % and 100 % only if nothing or everything counts."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{share:.0%}".replace("%", " %")


def _bytes_by_dtype(leaves: Iterable[LeafInfo]) -> Counter[str]:
    sizes = Counter[str]()
    for leaf in leaves:
        sizes[dtype_text(leaf)] += leaf.size_bytes
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A place in a picture, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        return self.width * self.height

    def inside(self, *, top: float, edge: float) -> "Rectangle":
        """Returns the place within a margin."""
        return Rectangle(
            x=self.x + edge,
            y=self.y + top,
            width=max(self.width - 2 * edge, 0.0),
            height=max(self.height - top - edge, 0.0),
        )


def divide_rectangle(whole: Rectangle, sizes: Sequence[float]) -> list[Rectangle]:
    """Returns a part of a rectangle for each size."""
    if len(sizes) > 1 and sizes[0] == sizes[-1]:
        return _rows(whole, len(sizes))
    total = float(sum(sizes))
    unit = whole.area / total if total else 0.0
    placed = list[Rectangle]()
    rest, start = whole, 0
    while start < len(sizes):
        stop, area = _row(sizes, start, unit, min(rest.width, rest.height))
        if stop == len(sizes):
            area = rest.area  # the last row takes what rounding left over
        parts, rest = _cut(rest, [size * unit for size in sizes[start:stop]], area)
        placed += parts
        start = stop
    return placed


def _rows(whole: Rectangle, count: int) -> list[Rectangle]:
    """Returns equal parts, from left to right and from top to bottom."""
    ratio = whole.height / whole.width if whole.width else 1.0
    rows = min(max(round(math.sqrt(count * min(ratio, count))), 1), count)
    ends = [count * (row + 1) // rows for row in range(rows)]
    parts, y, start = list[Rectangle](), whole.y, 0
    for end in ends:
        height = whole.height * (end - start) / count
        width = whole.width / (end - start)
        parts += [
            Rectangle(x=whole.x + at * width, y=y, width=width, height=height)
            for at in range(end - start)
        ]
        y, start = y + height, end
    return parts


def _row(
    sizes: Sequence[float], start: int, unit: float, side: float
) -> tuple[int, float]:
    """Returns the end of the row that begins at `start`, and its area: sizes join it
    while its worst ratio of sides gets better."""
    largest = sizes[start] * unit
    area, worst = largest, _ratio(largest, largest, largest, side)
    stop = start + 1
    while stop < len(sizes):
        smallest = sizes[stop] * unit
        next_worst = _ratio(area + smallest, largest, smallest, side)
        if next_worst > worst:
            break
        area, worst = area + smallest, next_worst
        stop += 1
    return stop, area


def _ratio(area: float, largest: float, smallest: float, side: float) -> float:
    """Returns the worst ratio of sides in a row along a side."""
    thickness = area / side if side else 0.0
    if not thickness * thickness or not smallest:
        return float("inf")
    return max(largest / thickness**2, thickness**2 / smallest)


def _cut(
    whole: Rectangle, areas: Sequence[float], area: float
) -> tuple[list[Rectangle], Rectangle]:
    """Cuts a row off along the shorter side, and divides it; returns the rest, too."""
    stands = whole.width >= whole.height
    side = whole.height if stands else whole.width
    longer = whole.width if stands else whole.height
    thickness = min(area / side if side else 0.0, longer)
    parts, at, total = list[Rectangle](), 0.0, sum(areas)
    for one in areas:
        length = side * one / total if total else 0.0
        parts.append(
            Rectangle(x=whole.x, y=whole.y + at, width=thickness, height=length)
            if stands
            else Rectangle(x=whole.x + at, y=whole.y, width=length, height=thickness)
        )
        at += length
    if stands:
        x, width = whole.x + thickness, whole.width - thickness
        rest = Rectangle(x=x, y=whole.y, width=width, height=whole.height)
    else:
        y, height = whole.y + thickness, whole.height - thickness
        rest = Rectangle(x=whole.x, y=y, width=whole.width, height=height)
    return parts, rest


HEADER: Final = 17.0
"""Height of the header of a group."""

_EDGE: Final = 2.0
_THIN_EDGE: Final = 1.0
_HEADED_WIDTH: Final = 64.0
_HEADED_HEIGHT: Final = 48.0
"""Smallest size of a group with a header."""

_LEVELS: Final = 3
"""Maximum number of headers within each other."""

_LEAST_AREA: Final = 36.0
"""Area in square pixels below which children are not drawn one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A rectangle of a leaf, of a group that is not divided, or of a rest."""

    place: Rectangle
    key: str
    """Key of the leaf or of the group; for a rest, of the group that it belongs to."""
    name: str
    """The last parts of the key, or "other"."""
    leaves: tuple[LeafInfo, ...]
    size_bytes: int
    is_rest: bool
    opens: str
    """Name of the group without a header whose largest tile it is; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that is divided into tiles, below its header."""

    place: Rectangle
    key: str
    name: str
    leaf_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tiles and groups; a group comes before the groups within it."""

    tiles: tuple[Tile, ...]
    groups: tuple[Group, ...]
    empty_count: int
    """Leaves without bytes, which have no area."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Leaves whose keys begin with the same parts."""

    name: str
    depth: int
    """Number of parts that the keys share."""
    leaves: "Sequence[tuple[list[str], LeafInfo]]"
    size_bytes: int
    is_rest: bool = False

    @property
    def is_divisible(self) -> bool:
        return len(self.leaves) > 1 and not self.is_rest

    @property
    def key(self) -> str:
        return "/".join(self.leaves[0][0][: self.depth])

    def children(self) -> "tuple[list[_Part], int]":
        """Returns the children, largest first, and the depth where the keys differ."""
        paths = [path for path, _ in self.leaves]
        first, last, depth = min(paths), max(paths), self.depth
        while depth < len(first) and [first[depth]] == last[depth : depth + 1]:
            depth += 1
        below: dict[str, list[tuple[list[str], LeafInfo]]] = {}
        for entry in self.leaves:
            path = entry[0]
            below.setdefault(path[depth] if depth < len(path) else "", []).append(entry)
        children = [
            _Part(name, depth + 1, found, sum(leaf.size_bytes for _, leaf in found))
            for name, found in below.items()
        ]
        children.sort(key=lambda child: -child.size_bytes)
        return children, depth

    def tile(self, place: Rectangle, opens: str) -> Tile:
        """Returns the tile of a part that is not divided."""
        leaves = tuple(leaf for _, leaf in self.leaves)
        key, name = self.key, self.name or count_text(len(leaves), "leaf")
        if len(leaves) == 1:
            path = self.leaves[0][0]
            key, name = leaves[0].key, "/".join(path[max(self.depth - 1, 0) :])
        return Tile(
            place=place,
            key=key,
            name=name,
            leaves=leaves,
            size_bytes=self.size_bytes,
            is_rest=self.is_rest,
            opens=opens,
        )

    def group(self, place: Rectangle, depth: int) -> Group:
        """Returns the group of a part that is divided at a depth."""
        path = self.leaves[0][0]
        return Group(
            place=place,
            key="/".join(path[:depth]),
            name="/".join(path[self.depth - 1 : depth]),
            leaf_count=len(self.leaves),
            size_bytes=self.size_bytes,
        )


def place_tiles(leaves: Iterable[LeafInfo], whole: Rectangle, *, most: int) -> Tiling:
    every = [*leaves]
    seen = [(leaf.key.split("/"), leaf) for leaf in every if leaf.size_bytes]
    tiles, groups = list[Tile](), list[Group]()
    root = _Part("", 0, seen, sum(leaf.size_bytes for _, leaf in seen))
    waiting = [(-whole.area, 0, 0, root, whole, "")] if seen else []
    waiting_bytes, number = root.size_bytes, 0
    while waiting:
        _, _, level, part, place, opens = heappop(waiting)
        free = most - len(tiles) - len(groups) - len(waiting)
        share = free * part.size_bytes // max(waiting_bytes, 1)
        waiting_bytes -= part.size_bytes
        children, depth = part.children() if part.is_divisible else ([], part.depth)
        has_room = place.width >= _HEADED_WIDTH and place.height >= _HEADED_HEIGHT
        is_headed = 0 < level <= _LEVELS and has_room
        inner = _inner(place, is_top=level == 0, is_headed=is_headed)
        chosen = _chosen(children, depth, inner.area, share - is_headed)
        if len(chosen) < 2:
            tiles.append(part.tile(place, opens))
            continue
        if is_headed:
            groups.append(part.group(place, depth))
        # the largest tile of the outermost group without a header has its name
        opens = "" if is_headed else opens or part.name
        places = divide_rectangle(inner, [child.size_bytes for child in chosen])
        for child, at in zip(chosen, places, strict=True):
            number += 1
            below = level + is_headed if level else 1
            heappush(waiting, (-at.area, number, below, child, at, opens))
            waiting_bytes += child.size_bytes
            opens = ""
    return Tiling(
        tiles=tuple(tiles), groups=tuple(groups), empty_count=len(every) - len(seen)
    )


def _chosen(
    children: Sequence[_Part], depth: int, area: float, share: int
) -> list[_Part]:
    """Returns the children that get rectangles, largest first: those that can be seen,
    as many as the share allows, and a rest of the others; none of none."""
    if not children:
        return []
    total = sum(child.size_bytes for child in children)
    seen = sum(child.size_bytes * area >= _LEAST_AREA * total for child in children)
    chosen = [*children]
    if not seen == len(children) <= share:
        kept = max(min(seen, share - 1), 0)
        chosen, left = chosen[:kept], chosen[kept:]
        entries = [entry for child in left for entry in child.leaves]
        size = sum(child.size_bytes for child in left)
        is_rest = len(left) > 1
        chosen.append(
            _Part("other", depth, entries, size, is_rest=True) if is_rest else left[0]
        )
    return sorted(chosen, key=lambda one: (-one.size_bytes, natural_key(one.name)))


def _inner(place: Rectangle, *, is_top: bool, is_headed: bool) -> Rectangle:
    """Returns the place for the children of a group."""
    if is_top:
        return place
    if is_headed:
        return place.inside(top=HEADER, edge=_EDGE)
    is_wide = min(place.width, place.height) > 12 * _THIN_EDGE
    edge = _THIN_EDGE if is_wide else 0.0
    return place.inside(top=edge, edge=edge)


MOST_RECTANGLES: Final = 1500
"""Maximum number of tiles and groups; a page with them still scrolls smoothly."""

_LEGEND: Final = 26.0
"""Height of the legend."""

_SHORTEST: Final = 7
"""Characters of a name below which it is left out."""

_PAD: Final = 4.0
_GAP: Final = 0.5
"""Half of the width of the gaps between tiles."""


def treemap(
    leaves: Iterable[LeafInfo],
    *,
    width: float = 960,
    height: float = 480,
    changed: Shares | None = None,
    most: int = MOST_RECTANGLES,
) -> str:
    """Returns a treemap as SVG; tiles have their key in ``data-key``.

    Args:
        height: Height in pixels, with the legend.
        changed: Shares of changed chunks, which then give the colours; None: dtypes do.
    """
    every = [*leaves]
    whole = Rectangle(x=0.0, y=0.0, width=width, height=height - _LEGEND)
    layout = place_tiles(every, whole, most=most)
    if not layout.tiles:
        return note("no leaf has bytes" if every else "no leaves", width=width)
    total = sum(tile.size_bytes for tile in layout.tiles)
    rule: Colouring = (
        ByDtype.from_leaves(every) if changed is None else ByChange(changed)
    )
    body = [part for group in layout.groups for part in _group(group, total)]
    for tile in layout.tiles:
        body += _tile(tile, rule, total)
    empty = f", {layout.empty_count:,} without bytes" if layout.empty_count else ""
    counts = f"{count_text(len(every), 'leaf')}{empty}, {size_text(total)}"
    # a tile has the mean change of its leaves, and so perhaps the colour of none
    alone = [(leaf,) for leaf in every]
    parts = alone if changed is None else [tile.leaves for tile in layout.tiles]
    body += _legend(parts, rule, counts, width, height)
    return document(
        body, label=f"treemap of {counts}, by {rule.title}", width=width, height=height
    )


def _tile(tile: Tile, rule: Colouring, total: int) -> Iterator[str]:
    """Yields the rectangle of a tile, and its texts if they fit."""
    at, colour = tile.place, rule.colours[rule.entry(tile.leaves)]
    gap = min(_GAP, at.width / 4, at.height / 4)
    yield draw_rect(
        *(at.x + gap, at.y + gap, at.width - 2 * gap, at.height - 2 * gap),
        title=_tooltip(tile, rule, total),
        fill=colour,
        data_key=tile.key,
    )
    name = _label(tile, at.width - 2 * _PAD)
    if not name or at.height < FONT + 6:
        return
    ink = ink_on(colour)
    style: Style = {"fill": ink, "pointer_events": "none"}
    yield words(name, at.x + _PAD, at.y + FONT + 4, **style)
    size = size_text(tile.size_bytes)
    if at.height >= 2 * FONT + 12 and text_width(size) <= at.width - 2 * _PAD:
        yield words(size, at.x + _PAD, at.y + 2 * FONT + 7, **style)


def _label(tile: Tile, room: float) -> str:
    """Returns the text in a tile: its name, and that of the group that it opens; of a
    numbered one at least the number."""
    names = [f"{tile.opens}/{tile.name}", tile.opens] if tile.opens else []
    number = tile.name[len(tile.name.rstrip("0123456789")) :]
    for name in (*names, tile.name, *([f"…{number}"] if number else [])):
        if text_width(name) <= room:
            return printable(name)
    shortened = fit_text(tile.name, room)
    return shortened if len(shortened) >= _SHORTEST else ""


def _tooltip(tile: Tile, rule: Colouring, total: int) -> str:
    share = f"{size_text(tile.size_bytes)}, {percent(tile.size_bytes / total)}"
    remark = rule.remark(tile.leaves)
    remark = f"\n{remark}" if remark else ""
    if len(tile.leaves) == 1:
        (leaf,) = tile.leaves
        array = dtype_text(leaf) + shape_text(leaf)
        return f"{printable(key_text(leaf))}\n{array}\n{share}{remark}"
    name = printable(tile.key) or "the tree"
    name = f"{name}: its smaller parts" if tile.is_rest else name
    return f"{name}\n{count_text(len(tile.leaves), 'leaf')}\n{share}{remark}"


def _group(group: Group, total: int) -> Iterator[str]:
    """Yields the frame of a group, and the text of its header."""
    at = group.place
    size = f"{size_text(group.size_bytes)}, {percent(group.size_bytes / total)}"
    yield draw_rect(
        *(at.x + _GAP, at.y + _GAP, at.width - 2 * _GAP, at.height - 2 * _GAP),
        title=f"{printable(group.key)}\n{count_text(group.leaf_count, 'leaf')}\n{size}",
        fill="currentColor",
        fill_opacity=0.12,
        data_key=group.key,
    )
    name = fit_text(group.name, at.width - 10)
    size = size_text(group.size_bytes)
    yield words(name, at.x + 5, at.y + FONT + 2, pointer_events="none")
    if text_width(name) + text_width(size) + 20 <= at.width:
        right = at.x + at.width - 5
        style: Style = {
            "text_anchor": "end",
            "fill_opacity": 0.7,
            "pointer_events": "none",
        }
        yield words(size, right, at.y + FONT + 2, **style)


def _legend(
    parts: Iterable[Sequence[LeafInfo]],
    rule: Colouring,
    counts: str,
    width: float,
    height: float,
) -> Iterator[str]:
    """Yields the entries of the legend that parts belong to, and the counts."""
    sizes = Counter[str]()
    for leaves in parts:
        sizes[rule.entry(leaves)] += sum(leaf.size_bytes for leaf in leaves)
    total, x, y = sum(sizes.values()), 0.0, height - 7
    for name, colour in rule.colours.items():
        if not sizes[name]:
            continue
        share = percent(sizes[name] / total)
        middle = x + 16 + text_width(name) + 4
        if middle + text_width(share) > width:
            return
        yield draw_rect(x + 1, y - 9, 10, 10, rx=2, fill=colour)
        yield words(name, x + 16, y)
        yield words(share, middle, y, fill_opacity=0.7)
        x = middle + text_width(share) + 12
    if x + text_width(counts) <= width:
        yield words(counts, width, y, text_anchor="end", fill_opacity=0.7)
