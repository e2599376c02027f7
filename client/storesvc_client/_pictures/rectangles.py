"""Squarified division of a rectangle: areas in proportion, sides as equal as possible.

The algorithm is that of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000);
equal parts, such as layers, are rows that are read as text is.

Example:
    >>> whole = Rectangle(x=0.0, y=0.0, width=6.0, height=4.0)
    >>> [part.area for part in divided(whole, [3, 2, 1])]
    [12.0, 8.0, 4.0]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A place in a picture, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Area in square pixels."""
        return self.width * self.height

    def inside(self, *, top: float, edge: float) -> "Rectangle":
        """Returns the place within a margin."""
        return Rectangle(
            x=self.x + edge,
            y=self.y + top,
            width=max(self.width - 2 * edge, 0.0),
            height=max(self.height - top - edge, 0.0),
        )


def divided(whole: Rectangle, sizes: Sequence[float]) -> list[Rectangle]:
    """Returns a part of a rectangle for each size.

    Args:
        whole: The rectangle.
        sizes: Sizes above 0, descending.
    """
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
