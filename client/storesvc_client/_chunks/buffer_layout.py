"""Layouts: how the wanted regions of a leaf lie in host memory, and where in it the
elements of a chunk go.

Regions that follow each other along the first dimension of a leaf lie behind one
another in memory too, as one *slab*: so a chunk of several small shards is still one
run, which a read fills in one piece. Slabs are allocated and handed over together, in
*groups*, as they live and die together: small shards get large pages that way, and
leaves share no memory.

Leaves of one shape that go to the same regions share a layout: a tree has many
leaves, and few of those.
"""

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Grid, Region, intersection

ALIGNMENT: Final = 64
"""Bytes; what XLA asks of host memory that it uses without a copy."""

GROUP_BYTES: Final = 64 << 20
"""Regions are allocated together up to so much."""

COPIED_BYTES: Final = 64 << 10
"""What XLA may copy, for want of alignment, at no cost that anyone sees."""

HUGE_PAGE_BYTES: Final = 2 << 20

NDArrayAny: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]
Index: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slab:
    """A part of a leaf that is one array in memory."""

    region: Region
    start: int
    """Of its first byte in the memory of its group."""
    size_bytes: int
    regions: tuple[Region, ...]
    """The wanted regions that it is made of."""
    inside: tuple[Index, ...]
    """Where in it each of them is."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Group:
    """Slabs that are allocated and handed over together."""

    slabs: tuple[Slab, ...]
    regions: tuple[Region, ...]
    size_bytes: int
    chunk_count: int
    """Chunks that hold any element of it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    """Where the elements of a chunk go in one piece."""

    group: int
    start: int
    """Of the first byte in the memory of the group."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Copy:
    """A part of a chunk that goes into a slab."""

    group: int
    slab: int
    source: Index
    """Of the chunk."""
    target: Index
    """Of the slab."""

    def of_rows(self, axis: int, first: int, stop: int) -> tuple[Index, Index] | None:
        """Returns source, counted from the first row, and target for some rows of the
        chunk; None where none of them goes there."""
        source, target = self.source[axis], self.target[axis]
        start, end = max(source.start, first), min(source.stop, stop)
        if start >= end:
            return None
        shift = target.start - source.start
        rows, into = (
            slice(start - first, end - first),
            slice(start + shift, end + shift),
        )
        return (
            (*self.source[:axis], rows, *self.source[axis + 1 :]),
            (*self.target[:axis], into, *self.target[axis + 1 :]),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Goal:
    """Where the elements of a chunk go."""

    within: int
    """The chunk's number within its leaf."""
    groups: tuple[int, ...]
    goes: Run | tuple[Copy, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """How the wanted regions of a leaf lie in memory."""

    grid: Grid
    row_axis: int
    """The first dimension along which a chunk is more than one; else the last."""
    row_bytes: int
    """Of a chunk that is cut along it: rows lie behind one another."""
    groups: tuple[Group, ...]
    goals: tuple[Goal, ...]
    """Of the chunks that are needed, ascending."""


def lay_out(grid: Grid, regions: Sequence[Region]) -> Layout:
    """Returns the layout of distinct regions of a leaf."""
    packed = list(_packed(_slabs(grid, regions)))
    holders: dict[int, list[tuple[int, int]]] = {}
    for number, slabs in enumerate(packed):
        for at, slab in enumerate(slabs):
            for within in grid.covering(slab.region):
                holders.setdefault(within, []).append((number, at))
    goals = [_goal(grid, n, holders[n], packed) for n in sorted(holders)]
    touched = Counter(number for goal in goals for number in goal.groups)
    groups = [_group(slabs, touched[n]) for n, slabs in enumerate(packed)]
    long = (axis for axis, n in enumerate(grid.chunk_shape) if n > 1)
    axis = next(long, len(grid.chunk_shape) - 1)
    return Layout(
        grid=grid,
        row_axis=axis,
        row_bytes=math.prod(grid.chunk_shape[axis + 1 :]) * grid.itemsize,
        groups=tuple(groups),
        goals=tuple(goals),
    )


def _slabs(grid: Grid, regions: Sequence[Region]) -> Iterator[Slab]:
    """Makes slabs of regions, none at its place in a group yet."""
    held: list[Region] = []
    for region in sorted(regions):
        if held and not _follows(grid, held, region):
            yield _slab(grid, held)
            held = []
        held.append(region)
    if held:
        yield _slab(grid, held)


def _follows(grid: Grid, held: Sequence[Region], region: Region) -> bool:
    """Whether a region can lie in memory right behind others, as it does in the
    leaf: aligned, or so small that it need not be."""
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


def _slab(grid: Grid, regions: Sequence[Region]) -> Slab:
    bounds = zip(regions[0], regions[-1], strict=True)
    region = tuple((start, stop) for (start, _), (_, stop) in bounds)
    return Slab(
        region=region,
        start=0,
        size_bytes=math.prod(_shape(region)) * grid.itemsize,
        regions=tuple(regions),
        inside=tuple(_index(each, region) for each in regions),
    )


def _packed(slabs: Iterable[Slab]) -> Iterator[list[Slab]]:
    """Packs slabs into groups, each at its place."""
    group: list[Slab] = []
    held = 0
    for slab in slabs:
        if group and held + slab.size_bytes > GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(replace(slab, start=held))
        held += slab.size_bytes + -slab.size_bytes % ALIGNMENT
    if group:
        yield group


def _group(slabs: Sequence[Slab], chunk_count: int) -> Group:
    return Group(
        slabs=tuple(slabs),
        regions=tuple(region for slab in slabs for region in slab.regions),
        size_bytes=slabs[-1].start + slabs[-1].size_bytes,
        chunk_count=chunk_count,
    )


def _goal(
    grid: Grid,
    within: int,
    holders: Sequence[tuple[int, int]],
    packed: Sequence[Sequence[Slab]],
) -> Goal:
    region = grid.region(within)
    copies = []
    for number, at in holders:
        slab = packed[number][at]
        shared = intersection(region, slab.region)
        start = _run(grid, region, slab) if region == shared else None
        if start is not None and len(holders) == 1:
            run = Run(group=number, start=slab.start + start)
            return Goal(within=within, groups=(number,), goes=run)
        copies.append(
            Copy(
                group=number,
                slab=at,
                source=_index(shared, region),
                target=_index(shared, slab.region),
            )
        )
    groups = tuple(dict.fromkeys(number for number, _ in holders))
    return Goal(within=within, groups=groups, goes=tuple(copies))


def _run(grid: Grid, region: Region, slab: Slab) -> int | None:
    """Where in a slab the elements of a chunk are one run; None where they are not."""
    shape, around = _shape(region), _shape(slab.region)
    if shape != grid.chunk_shape:  # it is stored with a margin
        return None
    start, stride, is_cut = 0, grid.itemsize, False
    for (begin, _), (origin, _), n, m in reversed(
        list(zip(region, slab.region, shape, around, strict=True))
    ):
        if is_cut and n > 1:
            return None
        is_cut = is_cut or n < m
        start += (begin - origin) * stride
        stride *= m
    return start


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _index(inner: Region, outer: Region) -> Index:
    """The index of a region in an array that holds another."""
    slices = (
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(inner, outer, strict=True)
    )
    # the ellipsis makes a view also where there is no dimension to index
    return (*slices, ...)


def allocate(size_bytes: int) -> Bytes:
    """Returns memory, unfilled, aligned for XLA where it is worth it.

    Large memory is private to its user and in huge pages, which take a fifth of the
    time to come by; it goes back to the system as soon as it is dropped.
    """
    if size_bytes < COPIED_BYTES:
        return np.empty(size_bytes, np.uint8)
    if size_bytes < HUGE_PAGE_BYTES:
        return _aligned(
            np.empty(size_bytes + ALIGNMENT, np.uint8), ALIGNMENT, size_bytes
        )
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping is far slower
    try:
        memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=own)
    except OSError:  # a process may have only so many mappings
        return _aligned(
            np.empty(size_bytes + ALIGNMENT, np.uint8), ALIGNMENT, size_bytes
        )
    raw = np.frombuffer(memory, np.uint8)
    found = _aligned(raw, HUGE_PAGE_BYTES, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start = found.ctypes.data - raw.ctypes.data
        # whole pages only: what nobody asked for must not be filled
        whole = size_bytes - size_bytes % HUGE_PAGE_BYTES
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return found


def _aligned(raw: Bytes, alignment: int, size_bytes: int) -> Bytes:
    start = -raw.ctypes.data % alignment
    return raw[start : start + size_bytes]
