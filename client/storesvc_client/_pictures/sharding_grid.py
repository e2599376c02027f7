"""The blocks of a sharded leaf, and the devices that held each when it was saved.

A checkpoint stores names and sizes of the mesh's axes and the axes that split each
dimension, but not the numbers of devices: they are numbered by their place in the mesh,
in C order.

Example:
    >>> svg = sharding_grid((4096, 1024), leaf.sharding)
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from storesvc_client._pictures.planes import Cell, Plane
from storesvc_client._pictures.svg import (
    DTYPE_COLOURS,
    FONT,
    document,
    element,
    fitted,
    note,
    text_width,
    words,
)
from storesvc_client._values.texts import count_text, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc.format.trees import SavedSharding

MOST_SHARDS: Final = 1024
"""Maximum number of cells; a cell of a larger grid stands for several blocks."""

_MOST_DEVICES: Final = 1 << 20
_LARGEST: Final = 150.0
_LINE: Final = 16.0
_GAP: Final = 1.5


def sharding_grid(
    shape: Sequence[int], sharding: "SavedSharding | None", *, width: float = 480
) -> str:
    """Returns the grid of the blocks of a leaf as SVG.

    Args:
        shape: Shape of the leaf.
        sharding: Mesh and PartitionSpec; None if the leaf had none.
        width: Width in pixels.
    """
    if sharding is None:
        return note("saved without a mesh", width=width)
    device_count = math.prod(sharding.axis_sizes)
    if device_count > _MOST_DEVICES:
        text = f"a mesh of {device_count:,} devices is too large to draw"
        return note(text, width=width)
    counts = _block_counts(shape, sharding)
    devices = _devices(sharding)
    plane = Plane.of(counts)
    cells = [*plane.cells(MOST_SHARDS)]
    side = cells[0].side
    columns, rows = -(-plane.columns // side), -(-plane.rows // side)
    wide = min(width / columns, _LARGEST)
    tall = min(max(wide / 2, 12.0), 2 * FONT + 8)
    lines = _caption(shape, sharding, counts, devices.shape[1])
    body = list[str]()
    for cell in cells:
        body += _drawn(cell, devices, shape, counts, (wide, tall))
    top = rows * tall + _LINE
    for at, text in enumerate(lines):
        opacity = 1.0 if at == 0 else 0.8
        shown = fitted(text, width)
        body.append(words(shown, 0, top + at * _LINE, fill_opacity=opacity))
    height = top + (len(lines) - 1) * _LINE + 6
    return document(body, label="; ".join(lines), width=width, height=height)


def _block_counts(shape: Sequence[int], sharding: "SavedSharding") -> list[int]:
    """Returns the number of blocks along each dimension."""
    sizes = dict(zip(sharding.axis_names, sharding.axis_sizes, strict=True))
    counts = [math.prod(sizes[axis] for axis in axes) for axes in sharding.spec]
    return [*counts, *([1] * (len(shape) - len(counts)))]


def _devices(sharding: "SavedSharding") -> "NDArray[np.int64]":
    """Returns the devices of each block: a row for a block, in C order."""
    mesh = np.arange(math.prod(sharding.axis_sizes)).reshape(sharding.axis_sizes)
    used = [axis for axes in sharding.spec for axis in axes]
    order = [sharding.axis_names.index(axis) for axis in used]
    replicas = [at for at in range(mesh.ndim) if at not in order]
    blocks = math.prod(sharding.axis_sizes[at] for at in order)
    return mesh.transpose(*order, *replicas).reshape(blocks, -1)


def _caption(
    shape: Sequence[int],
    sharding: "SavedSharding",
    counts: Sequence[int],
    replicas: int,
) -> list[str]:
    mesh = ", ".join(
        f"{name}={size}"
        for name, size in zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    )
    devices = count_text(math.prod(sharding.axis_sizes), "device")
    lines = [printable(f"mesh of {devices}: {mesh}")]
    for dim, (axes, count) in enumerate(zip(sharding.spec, counts, strict=False)):
        if axes:
            size = -(-shape[dim] // count) if dim < len(shape) else 0
            along = printable(", ".join(axes))
            blocks = count_text(count, "block")
            lines.append(f"dimension {dim}: {blocks} of {size:,} along {along}")
    whole = "the leaf" if math.prod(counts) == 1 else "each block"
    lines.append(f"{whole} on {count_text(replicas, 'device')}")
    return lines


def _drawn(
    cell: Cell,
    devices: "NDArray[np.int64]",
    shape: Sequence[int],
    counts: Sequence[int],
    size: tuple[float, float],
) -> Iterator[str]:
    """Yields a cell, with its devices if they fit."""
    wide, tall = size
    blocks = [block for row in cell.numbers for block in row]
    held = np.unique(devices[blocks])
    x, y = cell.left // cell.side * wide, cell.top // cell.side * tall
    gap = min(_GAP, wide / 5)
    if cell.count == 1:
        where = _region_text(cell.first, shape, counts)
    else:
        where = count_text(cell.count, "block")
    yield element(
        "rect",
        title=f"{where}\n{count_text(len(held), 'device')}: {_ranges(held, 12)}",
        x=x,
        y=y,
        width=wide - gap,
        height=tall - gap,
        fill=DTYPE_COLOURS[cell.first % len(DTYPE_COLOURS)],
        fill_opacity=0.4,
    )
    for most in (6, 3, 1):
        text = _ranges(held, most)
        if text_width(text) <= wide - 8 and tall >= FONT + 3:
            place = x + (wide - gap) / 2, y + (tall - gap) / 2 + 4
            yield words(text, *place, text_anchor="middle", pointer_events="none")
            return


def _region_text(block: int, shape: Sequence[int], counts: Sequence[int]) -> str:
    """Returns the indices of a block; all blocks of a dimension but the last ones have
    one size."""
    index: tuple[Any, ...] = np.unravel_index(block, counts) if counts else ()
    parts = []
    for at, n, count in zip(index, shape, counts, strict=False):
        size = -(-n // count)
        parts.append(f"{min(int(at) * size, n)}:{min((int(at) + 1) * size, n)}")
    return f"[{', '.join(parts)}]"


def _ranges(numbers: "NDArray[np.int64]", most: int) -> str:
    """Returns ascending numbers as text, such as "0-3, 8-11", with some ranges."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = np.split(numbers, cuts)
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(parts[:most]) + ("…" if len(parts) > most else "")
