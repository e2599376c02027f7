"""The grid of the chunks of a leaf, with the changed ones filled.

Example:
    >>> svg = chunk_map((4096, 4096), (512, 4096), changed={3, 4})
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from storesvc.format.grids import Grid, Region
from storesvc_client._pictures.leaf_colours import CHANGES, percent
from storesvc_client._pictures.planes import Cell, Plane
from storesvc_client._pictures.svg import (
    Style,
    document,
    element,
    fitted,
    note,
    number,
    words,
)
from storesvc_client._values.texts import count_text, sizes_text

MOST_CELLS: Final = 2500
"""Maximum number of cells; a cell of a larger grid stands for several chunks."""

_TITLED: Final = 600
"""Maximum number of cells with tooltips."""

_LARGEST: Final = 40.0
_TALLEST: Final = 20.0
"""Size of a cell at most: width and height."""

_CAPTION: Final = 24.0
_GAP: Final = 1.0


def chunk_map(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    *,
    changed: Collection[int] | None = None,
    width: float = 480,
) -> str:
    """Returns the map of the chunks of a leaf as SVG.

    Args:
        shape: Shape of the leaf.
        chunk_shape: Shape of its chunks.
        changed: Numbers of the changed chunks, in C order; None if that is not asked,
            or not known.
        width: Width in pixels.
    """
    grid = Grid(tuple(shape), tuple(chunk_shape), 1)
    if not grid.count:
        return note("no chunks: the leaf has no elements", width=width)
    plane = Plane.of(grid.counts)
    cells = [*plane.cells(MOST_CELLS, changed or ())]
    side = cells[0].side
    columns, rows = -(-plane.columns // side), -(-plane.rows // side)
    wide = min(width / columns, _LARGEST)
    size = wide, min(wide, _TALLEST)
    if len(cells) <= _TITLED:
        body = [_rectangle(cell, size, _title(cell, grid, changed)) for cell in cells]
    else:
        body = [*_paths(cells, size)]
    caption = _caption(grid, side, changed)
    height = rows * size[1] + _CAPTION
    body.append(words(fitted(caption, width), 0, height - 7, fill_opacity=0.8))
    return document(body, label=f"map of {caption}", width=width, height=height)


def _caption(grid: Grid, side: int, changed: Collection[int] | None) -> str:
    chunks = f"{count_text(grid.count, 'chunk')} of {sizes_text(grid.chunk_shape)}"
    parts = [chunks]
    if changed is not None:
        parts.append(f"{len(changed):,} changed")
    if side > 1:
        parts.append(f"a cell stands for up to {side * side:,}")
    return ", ".join(parts)


def _rectangle(cell: Cell, size: tuple[float, float], title: str) -> str:
    x, y, width, height = _box(cell, size)
    style = _style(_level(cell))
    return element("rect", title=title, x=x, y=y, width=width, height=height, **style)


def _paths(cells: Sequence[Cell], size: tuple[float, float]) -> Iterator[str]:
    """Yields one path for all cells of a colour, so that there are few elements."""
    by_level: dict[int, list[str]] = {}
    for cell in cells:
        x, y, width, height = map(number, _box(cell, size))
        square = f"M{x} {y}h{width}v{height}h-{width}z"
        by_level.setdefault(_level(cell), []).append(square)
    for level, squares in sorted(by_level.items()):
        yield element("path", d="".join(squares), **_style(level))


def _box(cell: Cell, size: tuple[float, float]) -> tuple[float, float, float, float]:
    (wide, tall), gap = size, min(_GAP, size[0] / 5)
    x, y = cell.left // cell.side * wide, cell.top // cell.side * tall
    return x, y, wide - gap, tall - gap


def _level(cell: Cell) -> int:
    """Returns the index of the colour of a cell; 0 if nothing in it changed."""
    share = cell.marked / cell.count
    return next(at for at, (_, _, most) in enumerate(CHANGES) if share <= most)


def _style(level: int) -> Style:
    if not level:
        return {"fill": "currentColor", "fill_opacity": 0.16}
    return {"fill": CHANGES[level][1]}


def _title(cell: Cell, grid: Grid, changed: Collection[int] | None) -> str:
    if cell.count == 1:
        chunk = cell.first
        lines = [
            f"chunk {sizes_text(grid.index(chunk))}",
            _region_text(grid.region(chunk)),
        ]
        if changed is not None:
            lines.append("changed" if cell.marked else "unchanged")
        return "\n".join(lines)
    rows = [*cell.numbers]
    first, last = grid.index(rows[0][0]), grid.index(rows[-1][-1])
    lines = [f"{cell.count:,} chunks, {sizes_text(first)} to {sizes_text(last)}"]
    if changed is not None:
        share = percent(cell.marked / cell.count)
        lines.append(f"{cell.marked:,} changed, {share}")
    return "\n".join(lines)


def _region_text(region: Region) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"
