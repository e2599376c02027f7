"""Buffers of a restore: regions of a leaf in host memory, filled chunk by chunk.

A layout says where the wanted regions of a leaf are in host memory, and where in it the
elements of each chunk go. Regions that follow each other along the first dimension of a
leaf also follow each other in memory, as one *segment*, so that a chunk of several
small shards is still one contiguous *span*, which one read fills. Segments are
allocated and handed over together in *groups*, because they live equally long: small
shards share large pages that way, but leaves share no memory.

Leaves of the same shape with the same wanted regions share a layout; a tree has many
leaves and few such combinations.

A leaf may also fill parts of buffers that others own (``plan_part_layout``): parts of
any strides, such as a layer of a stacked array or a transposed one. Where each axis of
a leaf is divided into several, which a buffer has in another order, a part is a region
of these.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, product
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64
from storesvc.format.grids import Grid, Region, intersection
from storesvc_client._chunks.memory import ALIGNMENT, COPIED_BYTES
from storesvc_client._values.places import Place, is_empty, list_boxes, measure, within

GROUP_BYTES: Final = 64 << 20
"""Maximum size of a group of segments, unless one segment is larger."""

_KEPT_GOALS: Final = 4096
"""Maximum chunks of a layout whose goals are kept for the next leaf: the goals of
millions of chunks would take gigabytes."""

NDArrayAny: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]
Sizes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segment:
    """A part of a leaf that is one array in memory."""

    region: Region
    """Region of the leaf; of the axes of ``sizes``, if it has some."""
    place: Place
    """Its place in the memory of its group."""
    size_bytes: int = 0
    """Size of it in a group of its own leaf."""
    is_cast: bool = False
    """True if the memory has another dtype than the leaf."""
    regions: tuple[Region, ...] = ()
    """The wanted regions that it consists of."""
    inside: tuple[Place, ...] = ()
    """The place of each of them."""
    sizes: Sizes = ()
    """The axes that each axis of the leaf is divided into; empty: they are its own."""

    def copies(self, region: Region, array: Place) -> Iterator[tuple[Place, Place]]:
        """Yields places of its elements in an array of a region of the leaf, each with
        the place that the elements go to."""
        boxes = self._divide(region, array) if self.sizes else [(array, region)]
        for found, own in boxes:
            shared = intersection(own, self.region)
            if not is_empty(shared):
                into = self.place.part(within(shared, self.region))
                yield found.part(within(shared, own)), into

    def _divide(self, region: Region, array: Place) -> Iterator[tuple[Place, Region]]:
        """Yields the boxes of divided axes that an array consists of."""
        if is_empty(region):
            return
        each = zip(self.sizes, region, strict=True)
        for boxes in product(*([*list_boxes(sizes, *along)] for sizes, along in each)):
            shapes = [measure(box) for box, _ in boxes]
            along = (
                (first - start, first - start + math.prod(shape))
                for (_, first), (start, _), shape in zip(
                    boxes, region, shapes, strict=True
                )
            )
            own = tuple(chain.from_iterable(box for box, _ in boxes))
            yield array.part(tuple(along)).divide(shapes), own

    def list_chunks(self, grid: Grid) -> Iterator[I64]:
        """Yields the numbers along each axis of the chunks that have elements of it."""
        if not self.sizes:
            for (start, stop), c in zip(self.region, grid.chunk_shape, strict=True):
                yield np.arange(start // c, -(-stop // c))
            return
        axes = iter(self.region)
        for sizes, n, c in zip(self.sizes, grid.shape, grid.chunk_shape, strict=True):
            own = tuple(islice(axes, len(sizes)))
            found = [
                start // c
                for start in range(0, n, c)
                if any(
                    not is_empty(intersection(box, own))
                    for box, _ in list_boxes(sizes, start, min(n, start + c))
                )
            ]
            yield np.array(found, np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Group:
    """Segments that are allocated and handed over together."""

    segments: tuple[Segment, ...]
    regions: tuple[Region, ...]
    size_bytes: int
    chunk_count: int
    """Number of chunks with any element in it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Span:
    """A chunk whose elements are one contiguous range of memory."""

    group: int
    start: int
    """Offset of its first byte in the memory of the group."""


class Copy(NamedTuple):
    """Elements of a chunk that are copied into a segment."""

    group: int
    source: Place
    """Their place in the chunk, or a part of it."""
    target: Place
    """Their place in the memory of the group."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Goal:
    """The destination of a chunk's elements."""

    within: int
    """Number of the chunk within its leaf."""
    groups: tuple[int, ...]
    holders: Sequence[tuple[int, int]]
    """Group and number of the segments that hold its elements."""
    goes: Span | tuple[Copy, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BufferLayout:
    """The memory of a leaf's wanted regions, and the destination of each chunk.

    It takes a few bytes for each chunk, of which a leaf may have millions; the goal of
    a chunk is computed when the chunk is read.
    """

    grid: Grid
    row_axis: int
    """The first dimension along which a chunk has more than one element, else the
    last."""
    row_bytes: int
    """Bytes of one row of a chunk cut along that dimension; rows are contiguous."""
    groups: tuple[Group, ...]
    chunks: I64
    """The needed chunks, ascending, by their number within the leaf."""
    holding: tuple[I64, I64]
    """A chunk, and the number of a segment that holds a part of it, over all groups;
    ascending."""
    places: tuple[tuple[int, int], ...]
    """Group of each segment, and its number within the group."""
    _goals: dict[int, Goal] = field(default_factory=dict)

    def goal(self, within: int) -> Goal:
        """Returns the destination of a needed chunk."""
        goal = self._goals.get(within)
        if goal is None:
            chunks, segments = self.holding
            first = chunks.searchsorted(within, side="left")
            last = chunks.searchsorted(within, side="right")
            holders = [self.places[n] for n in segments[first:last].tolist()]
            goal = self._find_goal(within, holders)
            if len(self.chunks) <= _KEPT_GOALS:
                self._goals[within] = goal
        return goal

    def _find_goal(self, within: int, holders: Sequence[tuple[int, int]]) -> Goal:
        region, shape = self.grid.region(within), self.grid.chunk_shape
        copies = tuple(self.copies(holders, region, shape))
        groups = tuple(dict.fromkeys(number for number, _ in holders))
        goal = Goal(within=within, groups=groups, holders=holders, goes=copies)
        if len(holders) > 1 or len(copies) != 1 or measure(region) != shape:  # padding
            return goal
        (number, at), (copy,), itemsize = *holders, copies, self.grid.itemsize
        is_whole = copy.source == Place.of_array(shape, itemsize)
        is_cast = self.groups[number].segments[at].is_cast
        if is_cast or not is_whole or not copy.target.is_contiguous(itemsize):
            return goal
        return replace(goal, goes=Span(group=number, start=copy.target.start))

    def copy_rows(self, goal: Goal, first: int, count: int) -> Sequence[Copy]:
        """Returns what to copy from some rows of a chunk."""
        axis, rows = self.row_axis, [*self.grid.region(goal.within)]
        start, stop = rows[axis][0] + first, rows[axis][1]
        rows[axis] = min(start, stop), min(start + count, stop)  # the rest is padding
        shape = [*self.grid.chunk_shape]
        shape[axis] = count
        return tuple(self.copies(goal.holders, tuple(rows), tuple(shape)))

    def copies(
        self,
        holders: Sequence[tuple[int, int]],
        region: Region,
        shape: tuple[int, ...],
    ) -> Iterator[Copy]:
        """Yields what to copy from a region of the leaf.

        Args:
            holders: See ``Goal``.
            region: The region.
            shape: Shape of the array in C order that begins with it.
        """
        array = Place.of_array(shape, self.grid.itemsize)
        for number, at in holders:
            segment = self.groups[number].segments[at]
            for source, target in segment.copies(region, array):
                yield Copy(number, source, target)


def plan_buffer_layout(grid: Grid, regions: Sequence[Region]) -> BufferLayout:
    """Returns the layout of distinct regions of a leaf."""
    return _plan(grid, list(_pack_segments(_segments(grid, regions))))


def plan_part_layout(grid: Grid, parts: Sequence[tuple[int, Segment]]) -> BufferLayout:
    """Returns the layout of parts of buffers; its groups are the buffers.

    Args:
        grid: Grid of the leaf.
        parts: Number of a buffer, ascending, and a segment in its memory.
    """
    packed = [
        [part for _, part in own] for _, own in groupby(parts, lambda one: one[0])
    ]
    return _plan(grid, packed)


def _plan(grid: Grid, packed: Sequence[Sequence[Segment]]) -> BufferLayout:
    places = [(n, at) for n, group in enumerate(packed) for at in range(len(group))]
    covered = [[_covering(grid, each) for each in group] for group in packed]
    groups = [
        Group(
            segments=tuple(segments),
            regions=tuple(region for each in segments for region in each.regions),
            size_bytes=segments[-1].place.start + segments[-1].size_bytes,
            chunk_count=len(_join_chunks(chunks)),
        )
        for segments, chunks in zip(packed, covered, strict=True)
    ]
    each = [chunks for group in covered for chunks in group]
    chunks = np.concatenate([np.empty(0, np.int64), *each])
    numbers = np.repeat(np.arange(len(each)), [len(found) for found in each])
    order = np.argsort(chunks, kind="stable")
    long = (axis for axis, n in enumerate(grid.chunk_shape) if n > 1)
    axis = next(long, len(grid.chunk_shape) - 1)
    return BufferLayout(
        grid=grid,
        row_axis=axis,
        row_bytes=math.prod(grid.chunk_shape[axis + 1 :]) * grid.itemsize,
        groups=tuple(groups),
        chunks=_join_chunks(each),
        holding=(chunks[order], numbers[order]),
        places=tuple(places),
    )


def _covering(grid: Grid, segment: Segment) -> I64:
    """Returns the chunks that overlap a segment, ascending."""
    if is_empty(segment.region):
        return np.empty(0, np.int64)  # however many chunks the other dimensions have
    chunks = np.zeros(1, np.int64)
    for along, count in zip(segment.list_chunks(grid), grid.counts, strict=True):
        chunks = np.add.outer(chunks * count, along).reshape(-1)
    return chunks


def _join_chunks(chunks: Sequence[I64]) -> I64:
    """Returns the distinct chunks of several segments, ascending."""
    if len(chunks) == 1:
        return chunks[0]
    return np.unique(np.concatenate([np.empty(0, np.int64), *chunks]))


def _segments(grid: Grid, regions: Sequence[Region]) -> Iterator[Segment]:
    """Joins regions to segments; sets no place in a group yet."""
    held: list[Region] = []
    for region in sorted(regions):
        if held and not _follows(grid, held, region):
            yield _segment(grid, held)
            held = []
        held.append(region)
    if held:
        yield _segment(grid, held)


def _follows(grid: Grid, held: Sequence[Region], region: Region) -> bool:
    """Returns whether a region can directly follow others in memory as it does in the
    leaf: it must be aligned, or so small that alignment does not matter."""
    if not region:
        return False
    (begin, _), (last_begin, last_end) = held[0][0], held[-1][0]
    across = math.prod(grid.shape[1:]) * grid.itemsize
    before = (last_end - begin) * across
    size = (region[0][1] - region[0][0]) * across
    is_full = all((0, n) == r for n, r in zip(grid.shape[1:], region[1:], strict=True))
    return (
        is_full
        and region[1:] == held[-1][1:]
        and last_begin < last_end == region[0][0] < region[0][1]
        and before + size <= GROUP_BYTES
        and (before % ALIGNMENT == 0 or size < COPIED_BYTES)
    )


def _segment(grid: Grid, regions: Sequence[Region]) -> Segment:
    bounds = zip(regions[0], regions[-1], strict=True)
    region = tuple((start, stop) for (start, _), (_, stop) in bounds)
    place = Place.of_array(measure(region), grid.itemsize)
    return Segment(
        region=region,
        place=place,
        size_bytes=math.prod(place.shape) * grid.itemsize,
        regions=tuple(regions),
    )


def _pack_segments(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Packs segments into groups and sets the place of each."""
    group: list[Segment] = []
    held = 0
    for segment in segments:
        size = segment.size_bytes
        if group and held + size > GROUP_BYTES:
            yield group
            group, held = [], 0
        place = replace(segment.place, start=held)
        inside = (place.part(within(one, segment.region)) for one in segment.regions)
        group.append(replace(segment, place=place, inside=tuple(inside)))
        held += size + -size % ALIGNMENT
    if group:
        yield group


_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


class Buffer:
    """Regions of a leaf in host memory, filled and handed over together."""

    __slots__ = (
        "chunks_left",
        "dtype",
        "fills",
        "group",
        "is_begun",
        "memory",
        "row",
    )

    def __init__(self, row: int, group: Group, dtype: "np.dtype[Any]") -> None:
        self.row = row
        """Row of the leaf in the manifest."""
        self.group = group
        self.dtype = dtype
        self.chunks_left = group.chunk_count
        self.memory = _NOTHING
        self.fills: Sequence[tuple[Place, Any]] = ()
        """Places that no chunk fills, with the value of their elements."""
        self.is_begun = False
        """True once it is allocated, also after ``drop``."""

    @property
    def regions(self) -> Sequence[Region]:
        """Regions of the leaf that it holds."""
        return self.group.regions

    @property
    def arrays(self) -> list[NDArrayAny]:
        """The elements of each region, as views of the memory."""
        return [
            self.view(place)
            for segment in self.group.segments
            for place in segment.inside
        ]

    def view(self, place: Place) -> NDArrayAny:
        """Returns the elements of a place."""
        return place.view(self.memory, self.dtype)

    def begin(self, allocate: "Callable[[int], Bytes]") -> int:
        """Allocates the memory unless it was allocated; returns the bytes that this
        took."""
        if self.is_begun:
            return 0
        self.memory = allocate(self.group.size_bytes)
        self.is_begun = True  # only now: another thread tries again, and fails too
        for place, value in self.fills:
            self.view(place)[...] = value
        return self.group.size_bytes

    def drop(self) -> None:
        """Drops the reference to the memory; the receiver of the arrays owns it."""
        self.memory = _NOTHING


TakeBuffers: TypeAlias = Callable[[Sequence[Buffer]], None]
"""Takes the arrays of buffers, which it may keep."""


def list_arrays(buffers: Iterable[Buffer]) -> Iterator[tuple[int, Region, NDArrayAny]]:
    """Yields the row, the region and the elements of each array of buffers."""
    for buffer in buffers:
        for region, array in zip(buffer.regions, buffer.arrays, strict=True):
            yield buffer.row, region, array


class RegionArrays(dict[tuple[int, Region], NDArrayAny]):
    """Elements of regions, by row and region, once buffers with them were placed."""

    def __init__(self, requests: Iterable[tuple[int, Region]]) -> None:
        super().__init__()
        rows: dict[int, dict[Region, None]] = defaultdict(dict)
        for row, region in requests:
            rows[row][region] = None
        self.wanted = [(row, [*regions]) for row, regions in rows.items()]
        """Each row once, with its distinct regions."""

    def place(self, buffers: Iterable[Buffer]) -> None:
        """Takes the arrays of buffers."""
        self.update({(row, at): array for row, at, array in list_arrays(buffers)})
