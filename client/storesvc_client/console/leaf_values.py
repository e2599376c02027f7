"""The values of one leaf: its first ones, and statistics of all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from storesvc.format.grids import Grid, Region, part, whole
from storesvc_client import LeafInfo, OpenCheckpoint
from storesvc_client._values.texts import ENCODED, number_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc_client._pictures.leaf_statistics import LeafStatistics

READ_BYTES: Final = 64 << 20
"""Maximum bytes that are read of a leaf: of a larger one, a sample."""

_CORNER: Final = 8
"""Rows and columns of the first values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafValues:
    """Values that were read of a leaf."""

    index: str
    """Slice of the first values, such as "[0, 0:8, 0:8]"; "" if a sample was read."""
    rows: tuple[tuple[str, ...], ...]
    """The first values; none if a sample was read."""
    statistics: "LeafStatistics | None"
    """Statistics; None for PRNG keys, whose numbers mean nothing."""


def is_readable(leaf: LeafInfo) -> bool:
    """Returns whether a page reads the leaf: whether it is an array of numbers."""
    return leaf.kind not in ENCODED


def read_values(opened: OpenCheckpoint, leaf: LeafInfo) -> LeafValues:
    """Reads a leaf, or a sample of a large one, and verifies what it reads.

    Raises:
        StoreError: As for ``OpenCheckpoint.read``.
    """
    from storesvc_client._pictures.leaf_statistics import leaf_statistics

    if leaf.size_bytes > READ_BYTES:
        sample = opened.statistics(leaf.key, budget_bytes=READ_BYTES)
        return LeafValues(index="", rows=(), statistics=sample)
    _, array = next(iter(opened.read([leaf.key])))
    shown = _first(array)
    statistics = None
    if leaf.prng_impl is None:
        statistics = leaf_statistics(leaf, _blocks(leaf, array))
    return LeafValues(
        index=_index(array.ndim, shown.shape),
        rows=tuple(tuple(map(_text, row)) for row in shown.tolist()),
        statistics=statistics,
    )


def _first(array: "NDArray[Any]") -> "NDArray[Any]":
    """Returns the first values, as a matrix; an empty one if there are none."""
    if array.size == 0:
        return array.reshape(0, 0)
    while array.ndim > 2:
        array = array[0]
    matrix = array.reshape(1, -1) if array.ndim < 2 else array
    return matrix[:_CORNER, :_CORNER]


def _blocks(
    leaf: LeafInfo, array: "NDArray[Any]"
) -> "Iterator[tuple[Region, NDArray[Any]]]":
    """Yields the chunks of a leaf."""
    grid = Grid(leaf.shape, leaf.chunk_shape, array.dtype.itemsize)
    for number in range(grid.count):
        region = grid.region(number)
        yield region, part(array, whole(leaf.shape), region)


def _index(rank: int, shape: Sequence[int]) -> str:
    """Returns the slice as it is typed in Python."""
    if rank == 0:
        return "[()]"
    if rank == 1:
        return f"[0:{shape[1]}]"
    leading = ["0"] * (rank - 2)
    return f"[{', '.join([*leading, *(f'0:{size}' for size in shape)])}]"


def _text(value: Any) -> str:
    if isinstance(value, bool | int | float | complex):
        return number_text(value)
    return str(value)
