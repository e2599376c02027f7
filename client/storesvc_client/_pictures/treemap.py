"""A treemap of a checkpoint: leaves by bytes, coloured by dtype or by change.

Example:
    >>> svg = treemap(opened.leaves.values(), width=960, height=480)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from storesvc_client._pictures.leaf_colours import (
    ByChange,
    ByDtype,
    Colouring,
    Shares,
    percent,
)
from storesvc_client._pictures.rectangles import Rectangle
from storesvc_client._pictures.svg import (
    FONT,
    Style,
    document,
    element,
    fitted,
    ink_on,
    note,
    text_width,
    words,
)
from storesvc_client._pictures.treemap_layout import Group, Tile, place_tiles
from storesvc_client._values.texts import (
    count_text,
    dtype_text,
    key_text,
    printable,
    shape_text,
    size_text,
)
from storesvc_client._values.values import LeafInfo

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
        leaves: Leaves of a checkpoint.
        width: Width in pixels.
        height: Height in pixels, with the legend.
        changed: Shares of changed chunks, which then give the colours; None: dtypes do.
        most: Maximum number of rectangles.
    """
    every = [*leaves]
    whole = Rectangle(x=0.0, y=0.0, width=width, height=height - _LEGEND)
    layout = place_tiles(every, whole, most=most)
    if not layout.tiles:
        return note("no leaf has bytes" if every else "no leaves", width=width)
    total = sum(tile.size_bytes for tile in layout.tiles)
    rule: Colouring = ByDtype.of(every) if changed is None else ByChange(changed)
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
    yield element(
        "rect",
        title=_tooltip(tile, rule, total),
        x=at.x + gap,
        y=at.y + gap,
        width=at.width - 2 * gap,
        height=at.height - 2 * gap,
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
    shortened = fitted(tile.name, room)
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
    yield element(
        "rect",
        title=f"{printable(group.key)}\n{count_text(group.leaf_count, 'leaf')}\n{size}",
        x=at.x + _GAP,
        y=at.y + _GAP,
        width=at.width - 2 * _GAP,
        height=at.height - 2 * _GAP,
        fill="currentColor",
        fill_opacity=0.12,
        data_key=group.key,
    )
    name = fitted(group.name, at.width - 10)
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
        yield element("rect", x=x + 1, y=y - 9, width=10, height=10, rx=2, fill=colour)
        yield words(name, x + 16, y)
        yield words(share, middle, y, fill_opacity=0.7)
        x = middle + text_width(share) + 12
    if x + text_width(counts) <= width:
        yield words(counts, width, y, text_anchor="end", fill_opacity=0.7)
