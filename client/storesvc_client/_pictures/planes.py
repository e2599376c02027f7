"""Draws a grid of any rank in two dimensions: the last axis that is cut is the columns.

The other axes are the rows, in C order. A grid that is much taller than wide, such as
one of a vector, is wrapped. Cells of a grid with very many are merged.

Example:
    >>> Plane.of((4, 2, 8))
    Plane(count=64, columns=8)
    >>> divmod(10, 8)  # row and column of chunk 10
    (1, 2)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_TALLEST: Final = 4
"""Rows for each column from which a grid is wrapped."""

_SHORTEST: Final = 16
"""Rows, or cells of a vector, up to which a grid is never wrapped."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A grid in two dimensions."""

    count: int
    """Number of its cells, in C order; the last row may be shorter."""
    columns: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Plane":
        """Returns the plane of a grid with some cells along each axis."""
        count = math.prod(counts)
        columns = next((n for n in reversed(counts) if n > 1), 1)
        rows = count // columns
        if rows == 1 and columns > _SHORTEST:  # a vector
            rows, columns = columns, 1
        if rows > max(_SHORTEST, _TALLEST * columns):
            columns *= _wrapped(rows, math.isqrt(rows // columns))
        return cls(count, columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return -(-self.count // self.columns)

    def cells(self, most: int, marked: Iterable[int] = ()) -> "Iterator[Cell]":
        """Yields at most some cells, each of which stands for a square of the plane.

        Args:
            most: Maximum number of cells.
            marked: Numbers of cells of the grid to be counted.
        """
        side = 1
        while math.prod(-(-n // side) for n in (self.rows, self.columns)) > most:
            side += 1
        down, across = -(-self.rows // side), -(-self.columns // side)
        numbers = np.fromiter(marked, np.int64)
        row, column = np.divmod(numbers, self.columns)
        found = np.bincount(
            row // side * across + column // side, minlength=down * across
        )
        for at in range(down * across):
            top, left = (n * side for n in divmod(at, across))
            cell = Cell(self, top, left, side, marked=int(found[at]))
            if cell.count:
                yield cell


def _wrapped(rows: int, wanted: int) -> int:
    """Returns how many rows follow each other in one, evenly if possible."""
    even = (n for n in range(wanted, 2 * wanted + 1) if n and rows % n == 0)
    return next(even, max(wanted, 1))


@dataclass(frozen=True, slots=True)
class Cell:
    """A square of a plane, clipped to it."""

    plane: Plane
    top: int
    left: int
    side: int
    marked: int
    """Number of the cells of the grid in it that are marked."""

    @property
    def first(self) -> int:
        """Number of its first cell of the grid."""
        return self.top * self.plane.columns + self.left

    @property
    def numbers(self) -> Iterator[range]:
        """Numbers of its cells of the grid, row by row."""
        columns, count = self.plane.columns, self.plane.count
        right = min(self.left + self.side, columns)
        for row in range(self.top, min(self.top + self.side, self.plane.rows)):
            start, stop = row * columns + self.left, row * columns + right
            yield range(min(start, count), min(stop, count))

    @property
    def count(self) -> int:
        """Number of its cells of the grid."""
        return sum(map(len, self.numbers))
