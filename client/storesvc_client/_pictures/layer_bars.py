"""Pictures of what a leaf or a model is divided into: the chunks and the blocks of a
leaf, and the share of changed bytes in each layer.

A grid of any rank is drawn in two dimensions: the last axis that is cut is the columns.
The other axes are the rows, in C order. A grid that is much taller than wide, such as
one of a vector, is wrapped. Cells of a grid with very many are merged.

Example:
    >>> Plane.of((4, 2, 8))
    Plane(count=64, columns=8)
    >>> divmod(10, 8)  # row and column of chunk 10
    (1, 2)
    >>> svg = chunk_map((4096, 4096), (512, 4096), changed={3, 4})
    >>> svg = sharding_grid((4096, 1024), leaf.sharding)
    >>> svg = layer_bars(opened.leaves.values(), changed_shares(run.diff(100, 200)))
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from storesvc.format.grids import Grid
from storesvc_client._pictures.svg import (
    DTYPE_COLOURS,
    FONT,
    GREY,
    Style,
    document,
    draw_rect,
    element,
    fit_text,
    note,
    number,
    text_width,
    words,
)
from storesvc_client._pictures.treemap import CHANGES, Shares, changed_share, percent
from storesvc_client._values.models import Diff, LeafInfo
from storesvc_client._views.texts import (
    count_text,
    natural_key,
    printable,
    size_text,
    sizes_text,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc.format.trees import SavedSharding

_TALLEST_PLANES: Final = 4
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
        if rows > max(_SHORTEST, _TALLEST_PLANES * columns):
            # as many rows follow each other in one, evenly if possible
            wanted = math.isqrt(rows // columns)
            even = (n for n in range(wanted, 2 * wanted + 1) if n and rows % n == 0)
            columns *= next(even, max(wanted, 1))
        return cls(count, columns)

    @property
    def rows(self) -> int:
        return -(-self.count // self.columns)

    def cells(self, most: int, marked: Iterable[int] = ()) -> "Iterator[Cell]":
        """Yields at most some cells, each of which stands for a square of the plane."""
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
        return sum(map(len, self.numbers))


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
        changed: Numbers of the changed chunks, in C order; None if that is not asked,
            or not known.
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
        body = []
        for cell in cells:
            title, style = _title(cell, grid, changed), _style(_level(cell))
            body.append(draw_rect(*_box(cell, size), title=title, **style))
    else:
        body = [*_paths(cells, size)]
    parts = [f"{count_text(grid.count, 'chunk')} of {sizes_text(grid.chunk_shape)}"]
    if changed is not None:
        parts.append(f"{len(changed):,} changed")
    if side > 1:
        parts.append(f"a cell stands for up to {side * side:,}")
    caption = ", ".join(parts)
    height = rows * size[1] + _CAPTION
    body.append(words(fit_text(caption, width), 0, height - 7, fill_opacity=0.8))
    return document(body, label=f"map of {caption}", width=width, height=height)


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
            f"[{', '.join(f'{a}:{b}' for a, b in grid.region(chunk))}]",
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


_DIGITS: Final = "0123456789"


def layers_of(keys: Iterable[str]) -> dict[str, str]:
    """Returns the layer of each key: the key up to its numbered part with the most
    siblings, at least two, such as "layers/3". Without such a part, it is the key
    without its last part, and at most four parts of it.

    >>> keys = [*(f"mu/0/layers/{at}/w" for at in range(3)), "mu/0/embed/w"]
    >>> [*layers_of(keys).values()]
    ['mu/0/layers/0', 'mu/0/layers/1', 'mu/0/layers/2', 'mu/0/embed']
    """
    parts_of = {key: tuple(key.split("/")) for key in keys}
    siblings = defaultdict[tuple[str, ...], set[str]](set)
    for parts in parts_of.values():
        for at, part in enumerate(parts):
            if part[-1:] in _DIGITS and part:
                siblings[*parts[:at], part.rstrip(_DIGITS)].add(part)
    return {
        key: "/".join(_layer_keys(parts, siblings)) for key, parts in parts_of.items()
    }


def _layer_keys(
    parts: tuple[str, ...], siblings: Mapping[tuple[str, ...], set[str]]
) -> tuple[str, ...]:
    most, length = 2, 0
    for at, part in enumerate(parts):
        if part[-1:] in _DIGITS and part:
            count = len(siblings[*parts[:at], part.rstrip(_DIGITS)])
            if count > most:
                most, length = count, at + 1
    return parts[:length] if length else parts[: min(max(len(parts) - 1, 1), 4)]


MOST_SHARDS: Final = 1024
"""Maximum number of cells; a cell of a larger grid stands for several blocks."""

_MOST_DEVICES: Final = 1 << 20
_LARGEST_BLOCK: Final = 150.0
_LINE: Final = 16.0
_BLOCK_GAP: Final = 1.5


def sharding_grid(
    shape: Sequence[int], sharding: "SavedSharding | None", *, width: float = 480
) -> str:
    """Returns the grid of the blocks of a leaf as SVG."""
    if sharding is None:
        return note("saved without a mesh", width=width)
    device_count = math.prod(sharding.axis_sizes)
    if device_count > _MOST_DEVICES:
        text = f"a mesh of {device_count:,} devices is too large to draw"
        return note(text, width=width)
    sizes = dict(zip(sharding.axis_names, sharding.axis_sizes, strict=True))
    # blocks along each dimension
    counts = [math.prod(sizes[axis] for axis in axes) for axes in sharding.spec]
    counts += [1] * (len(shape) - len(counts))
    devices = _devices(sharding)
    plane = Plane.of(counts)
    cells = [*plane.cells(MOST_SHARDS)]
    side = cells[0].side
    columns, rows = -(-plane.columns // side), -(-plane.rows // side)
    wide = min(width / columns, _LARGEST_BLOCK)
    tall = min(max(wide / 2, 12.0), 2 * FONT + 8)
    lines = _describe_blocks(shape, sharding, counts, devices.shape[1])
    body = list[str]()
    for cell in cells:
        body += _draw_block(cell, devices, shape, counts, (wide, tall))
    top = rows * tall + _LINE
    for at, text in enumerate(lines):
        opacity = 1.0 if at == 0 else 0.8
        shown = fit_text(text, width)
        body.append(words(shown, 0, top + at * _LINE, fill_opacity=opacity))
    height = top + (len(lines) - 1) * _LINE + 6
    return document(body, label="; ".join(lines), width=width, height=height)


def _devices(sharding: "SavedSharding") -> "NDArray[np.int64]":
    """Returns the devices of each block: a row for a block, in C order. A checkpoint
    does not store their numbers: they are numbered by their place in the mesh."""
    mesh = np.arange(math.prod(sharding.axis_sizes)).reshape(sharding.axis_sizes)
    used = [axis for axes in sharding.spec for axis in axes]
    order = [sharding.axis_names.index(axis) for axis in used]
    replicas = [at for at in range(mesh.ndim) if at not in order]
    blocks = math.prod(sharding.axis_sizes[at] for at in order)
    return mesh.transpose(*order, *replicas).reshape(blocks, -1)


def _describe_blocks(
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


def _draw_block(
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
    gap = min(_BLOCK_GAP, wide / 5)
    if cell.count == 1:
        where = _region_text(cell.first, shape, counts)
    else:
        where = count_text(cell.count, "block")
    yield draw_rect(
        *(x, y, wide - gap, tall - gap),
        title=f"{where}\n{count_text(len(held), 'device')}: {_ranges(held, 12)}",
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


MOST_GROUPS: Final = 40
"""Maximum number of layers with a bar of their own."""

_ROW: Final = 20.0
_BAR: Final = 10.0
_NAME: Final = 220.0
"""Maximum width of the names."""

_REMARK: Final = 162.0
"""Width of the texts on the right of the bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """The leaves of a layer, and their changed bytes."""

    name: str
    leaf_count: int
    size_bytes: int
    share: float | None
    """Share of changed bytes, from 0 to 1; None: not known."""

    @property
    def changed_bytes(self) -> float:
        """Changed bytes; of an unknown change, all."""
        return self.size_bytes * (1.0 if self.share is None else self.share)


def changed_shares(diff: Diff) -> Shares:
    """Returns the share of changed chunks of the leaves that two checkpoints do not
    have in common."""
    shares: dict[str, float | None] = {}
    for one in diff.differences:
        match one.kind:
            case "unknown":
                shares[one.key] = None
            case "content" if one.chunk_count:
                shares[one.key] = one.changed_chunk_count / one.chunk_count
            case _:
                shares[one.key] = 1.0
    return shares


def layer_changes(
    leaves: Iterable[LeafInfo], changed: Shares, *, most: int = MOST_GROUPS
) -> list[LayerChange]:
    """Returns the layers with the most changed bytes in natural order, and the others
    as one."""
    by_key = {leaf.key: leaf for leaf in leaves}
    groups = defaultdict[str, list[LeafInfo]](list)
    for key, layer in layers_of(by_key).items():
        groups[layer].append(by_key[key])
    layers = [_layer(name, found, changed) for name, found in groups.items()]
    layers.sort(key=lambda one: (-one.changed_bytes, natural_key(one.name)))
    shown, left = layers[:most], layers[most:]
    shown.sort(key=lambda one: natural_key(one.name))
    if left:
        rest = [leaf for one in left for leaf in groups[one.name]]
        shown.append(_layer(f"{len(left):,} other", rest, changed))
    return shown


def layer_bars(
    leaves: Iterable[LeafInfo],
    changed: Shares,
    *,
    most: int = MOST_GROUPS,
    width: float = 720,
) -> str:
    """Returns the bars as SVG."""
    layers = layer_changes(leaves, changed, most=most)
    if not layers:
        return note("no leaves", width=width)
    names = [fit_text(_shown(one.name), _NAME) for one in layers]
    left = max(map(text_width, names)) + 10
    body = list[str]()
    for row, (layer, name) in enumerate(zip(layers, names, strict=True)):
        body += _bar(layer, name, row * _ROW, left, width)
    total = sum(one.size_bytes for one in layers)
    known = sum(one.changed_bytes for one in layers if one.share is not None)
    label = (
        f"changed bytes by layer: {size_text(round(known))} of {size_text(total)} in "
        f"{count_text(len(layers), 'row')}"
    )
    height = len(layers) * _ROW + 4
    return document(body, label=label, width=width, height=height)


def _shown(name: str) -> str:
    """Returns the name of a layer; '' for a tree that is a single leaf."""
    return name or "''"


def _layer(name: str, leaves: Sequence[LeafInfo], changed: Shares) -> LayerChange:
    return LayerChange(
        name=name,
        leaf_count=len(leaves),
        size_bytes=sum(leaf.size_bytes for leaf in leaves),
        share=changed_share(leaves, changed),
    )


def _bar(
    layer: LayerChange, name: str, top: float, left: float, width: float
) -> Iterator[str]:
    """Yields the name of a layer, its bar and its numbers."""
    y, length = top + _ROW / 2 + 4, width - left - _REMARK
    share = "not known" if layer.share is None else percent(layer.share)
    title = (
        f"{printable(_shown(layer.name))}\n{count_text(layer.leaf_count, 'leaf')}, "
        f"{size_text(layer.size_bytes)}\n{share} changed"
    )
    bar: Style = {"x": left, "y": top + (_ROW - _BAR) / 2, "height": _BAR, "rx": 2.0}
    yield words(name, left - 10, y, text_anchor="end")
    yield element(
        "rect", title=title, **bar, width=length, fill="currentColor", fill_opacity=0.12
    )
    if layer.share is None:
        yield element("rect", **bar, width=length, fill=GREY, pointer_events="none")
    elif layer.share:
        filled = max(length * min(layer.share, 1.0), 2.0)
        colour = CHANGES[3][1]
        yield element("rect", **bar, width=filled, fill=colour, pointer_events="none")
    right = left + length
    yield words(share, right + 70, y, text_anchor="end")
    size = size_text(layer.size_bytes)
    yield words(f"of {size}", right + 76, y, fill_opacity=0.7)
