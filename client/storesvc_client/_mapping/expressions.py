"""Expressions: an array of the target as a map of index regions of stored arrays.

Each expression has a shape and a dtype. ``destinations`` says where the elements of
stored arrays go in the memory of a region, so that they are read into it.

If that cannot be said, the region is built: ``requests`` returns the regions of stored
arrays that it needs, and ``build`` makes it of their elements, which it gets in the
same order. Either way a part of the target reads what it needs, and nothing more. No
expression here computes with elements, ``arithmetic.py`` has some that do; ``Cast``
alone changes them.

>>> stored = Source("float32", (4, 6), row=0, kind=0, stored_chunk_shape=(4, 6))
>>> swapped = Transpose.make(stored, [1, 0])
>>> [(source.row, region) for source, region in swapped.requests(((0, 2), (0, 4)))]
[(0, ((0, 4), (0, 2)))]
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES, is_floating
from storesvc.format.grids import (
    MAX_CHUNK_BYTES,
    Region,
    choose_chunk_shape,
    part,
    shape_problem,
)
from storesvc_client._values.places import (
    Place,
    copy_elements,
    list_boxes,
    measure,
    within,
)

MAX_RUNS: Final = 1024
"""Maximum contiguous ranges that a region of a reshaped array is read in; if it has
more, what is between them is read, too."""

FEW_RUNS: Final = 4
"""Ranges of a divided axis that are planned one by one, whatever their size."""

LARGE_RUN_BYTES: Final = 256 << 10
"""Size from which on a range is rather read into its place than copied."""

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Iterator[Array]
"""Elements of the requested regions, in the order of the requests."""
Requests: TypeAlias = Iterator[tuple["Source", Region]]
Destinations: TypeAlias = Iterator[tuple["Expression", Region, Place]]


@dataclass(frozen=True)
class Expression(ABC):
    """An array that is made of stored arrays.

    ``make`` of each class checks its arguments, and raises ``ValueError`` with a
    message that says what was expected.
    """

    dtype: str
    shape: Shape

    @abstractmethod
    def requests(self, region: Region) -> Requests:
        """Yields the regions of stored arrays that a region needs, which has
        elements."""

    @abstractmethod
    def build(self, region: Region, arrays: Arrays) -> Array:
        """Returns the elements of a region; takes what it requested. They may be a view
        that must not be written to."""

    def destinations(self, region: Region, place: Place) -> Destinations:
        """Yields the expressions that fill a place of a region, with their regions and
        the parts of the place; itself if its elements must be built."""
        yield self, region, place

    @property
    @abstractmethod
    def chunk_shape(self) -> Shape:
        """Shape of regions that need few chunks of the stored arrays."""

    @property
    def grid_shape(self) -> Shape:
        """Shape of the regions that are read one by one, within ``chunk_shape``."""
        sizes = zip(self.chunk_shape, self.shape, strict=True)
        wanted = tuple(max(1, min(c, n)) for c, n in sizes)
        if math.prod(wanted) * DTYPES[self.dtype].itemsize <= MAX_CHUNK_BYTES:
            return wanted  # larger ones would need more stored chunks
        return choose_chunk_shape(self.shape, DTYPES[self.dtype].itemsize, wanted)

    def sources(self) -> Iterator["Source"]:
        """Returns the stored arrays, each as often as it is used."""
        return iter(())

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Source(Expression):
    """A stored array; equal to others of its shape and dtype."""

    row: int = field(compare=False)
    """Row of its leaf."""
    kind: int = field(compare=False)
    """Kind of its leaf."""
    stored_chunk_shape: Shape

    @property
    def chunk_shape(self) -> Shape:
        return self.stored_chunk_shape

    def requests(self, region: Region) -> Requests:
        yield self, region

    def build(self, region: Region, arrays: Arrays) -> Array:  # noqa: ARG002 - as in all
        return next(arrays)

    def sources(self) -> Iterator["Source"]:
        return iter((self,))


@dataclass(frozen=True)
class Fill(Expression):
    """An array of one value, made of nothing."""

    element: bytes
    """The value as it is stored: 0.0 and -0.0 differ."""

    @classmethod
    def make(cls, shape: Sequence[int], dtype: str, value: float) -> "Fill":
        """Returns an array of a value."""
        check_value(dtype, value)
        element = np.full((), value, DTYPES[dtype]).tobytes()
        return cls(dtype, _check_shape(shape), element)

    def requests(self, region: Region) -> Requests:  # noqa: ARG002 - as in all
        yield from ()

    def build(self, region: Region, arrays: Arrays) -> Array:  # noqa: ARG002 - as in all
        memory = np.frombuffer(self.element, np.uint8)
        return np.broadcast_to(memory.view(DTYPES[self.dtype])[0], measure(region))

    @property
    def chunk_shape(self) -> Shape:
        return self.shape


@dataclass(frozen=True)
class _Moved(Expression):
    """Elements of other expressions at other places."""

    @abstractmethod
    def places(self, region: Region, place: Place) -> Destinations:
        """See ``destinations``; does not yield itself."""

    def is_direct(self, region: Region, place: Place) -> bool:  # noqa: ARG002 - some do
        """Returns whether elements of a region go to a place in few pieces."""
        return True

    def cover(self, region: Region) -> Region:
        """Returns the region, or a larger one that is built in few pieces."""
        return region

    def destinations(self, region: Region, place: Place) -> Destinations:
        if self.is_direct(region, place):
            return self.places(region, place)
        return super().destinations(region, place)

    def _pieces(self, covered: Region) -> Destinations:
        itemsize = DTYPES[self.dtype].itemsize
        return self.places(covered, Place.of_array(measure(covered), itemsize))

    def requests(self, region: Region) -> Requests:
        for one, inside, _ in self._pieces(self.cover(region)):
            yield from one.requests(inside)

    def build(self, region: Region, arrays: Arrays) -> Array:
        covered, dtype = self.cover(region), DTYPES[self.dtype]
        found = np.empty(measure(covered), dtype)
        memory = found.reshape(-1).view(np.uint8)
        for one, inside, place in self._pieces(covered):
            copy_elements(place.view(memory, dtype), one.build(inside, arrays))
        return part(found, covered, region)


@dataclass(frozen=True)
class _Changed(_Moved):
    """Elements of one expression."""

    inner: Expression

    @property
    def chunk_shape(self) -> Shape:
        return self.inner.chunk_shape

    def sources(self) -> Iterator[Source]:
        return self.inner.sources()


@dataclass(frozen=True)
class Cast(_Changed):
    """Floating-point numbers in another dtype."""

    @classmethod
    def make(cls, inner: Expression, dtype: str) -> Expression:
        """Returns it in a floating-point dtype."""
        if not (is_floating(inner.dtype) and is_floating(dtype)):
            raise ValueError(
                f"cast: expected floating-point dtypes, got {inner.dtype} to {dtype}"
            )
        return inner if dtype == inner.dtype else cls(dtype, inner.shape, inner)

    def places(self, region: Region, place: Place) -> Destinations:
        return self.inner.destinations(region, place)

    def is_direct(self, region: Region, place: Place) -> bool:
        # else it is cast twice, as a copy cannot
        found = self.places(region, place)
        return all(one.dtype == self.inner.dtype for one, _, _ in found)

    def requests(self, region: Region) -> Requests:
        return self.inner.requests(region)

    def build(self, region: Region, arrays: Arrays) -> Array:
        return self.inner.build(region, arrays).astype(DTYPES[self.dtype])


@dataclass(frozen=True)
class Transpose(_Changed):
    """Axes in another order."""

    axes: tuple[int, ...]

    @classmethod
    def make(cls, inner: Expression, axes: Sequence[int]) -> "Transpose":
        """Returns it with the axes in an order."""
        if sorted(axes) != [*range(len(inner.shape))]:
            raise ValueError(
                f"transpose: expected each of the axes 0 to {len(inner.shape) - 1} "
                f"once for an array of shape {list(inner.shape)}, got {list(axes)}"
            )
        return cls(
            inner.dtype, tuple(inner.shape[a] for a in axes), inner, axes=tuple(axes)
        )

    @property
    def chunk_shape(self) -> Shape:
        inner = self.inner.chunk_shape
        return tuple(inner[axis] for axis in self.axes)

    def places(self, region: Region, place: Place) -> Destinations:
        axes = np.argsort(self.axes).tolist()
        inside = tuple(region[axis] for axis in axes)
        return self.inner.destinations(inside, place.transpose(axes))


@dataclass(frozen=True)
class Slice(_Changed):
    """A range along an axis."""

    axis: int
    start: int
    stop: int

    @classmethod
    def make(cls, inner: Expression, axis: int, start: int, stop: int) -> "Slice":
        """Returns a range along an axis."""
        axis = check_axis("slice", inner, axis)
        if not 0 <= start <= stop <= inner.shape[axis]:
            raise ValueError(
                f"slice: expected 0 <= start <= stop <= {inner.shape[axis]}, the size "
                f"of axis {axis}, got start {start} and stop {stop}"
            )
        shape = _put(inner.shape, axis, (stop - start,))
        return cls(inner.dtype, shape, inner, axis=axis, start=start, stop=stop)

    @classmethod
    def take(cls, inner: Expression, axis: int, index: int) -> Expression:
        """Returns what is at an index of an axis, without the axis."""
        shape = _put(inner.shape, axis, ())
        return Reshape.make(cls.make(inner, axis, index, index + 1), shape)

    def places(self, region: Region, place: Place) -> Destinations:
        along = tuple(at + self.start for at in region[self.axis])
        return self.inner.destinations(_put(region, self.axis, (along,)), place)


@dataclass(frozen=True)
class Repeat(_Changed):
    """Each index of an axis several times, one after another."""

    axis: int
    times: int

    @classmethod
    def make(cls, inner: Expression, axis: int, times: int) -> "Repeat":
        """Returns it with each index of an axis repeated."""
        axis = check_axis("repeat", inner, axis)
        if times < 1:
            raise ValueError(f"repeat: expected times of at least 1, got {times}")
        shape = _check_shape(_put(inner.shape, axis, (inner.shape[axis] * times,)))
        return cls(inner.dtype, shape, inner, axis=axis, times=times)

    def _divide(self, region: Region) -> Region:
        start, stop = region[self.axis]
        wanted = ((start // self.times, -(-stop // self.times)),)
        return _put(region, self.axis, wanted)

    def cover(self, region: Region) -> Region:
        inside = self._divide(region)
        along = tuple(at * self.times for at in inside[self.axis])
        return _put(inside, self.axis, (along,))

    def is_direct(self, region: Region, place: Place) -> bool:  # noqa: ARG002 - as in all
        return self.cover(region) == region

    def places(self, region: Region, place: Place) -> Destinations:
        for first in range(self.times):
            every = place.step(self.axis, self.times, first)
            yield from self.inner.destinations(self._divide(region), every)


@dataclass(frozen=True)
class Join(_Moved):
    """Arrays one after another along an axis."""

    parts: tuple[Expression, ...]
    axis: int

    @classmethod
    def make(cls, parts: Sequence[Expression], axis: int) -> "Join":
        """Returns arrays one after another along an axis that they have."""
        first = parts[0]
        axis = check_axis("concatenate", first, axis)
        wanted = _put(first.shape, axis, (0,)), first.dtype
        for each in parts:
            others = each.shape[:axis], each.shape[axis + 1 :]
            if wanted != ((*others[0], 0, *others[1]), each.dtype):
                raise ValueError(
                    f"expected arrays to join that fit {first}, got {each}"
                )
        size = sum(each.shape[axis] for each in parts)
        shape = _check_shape(_put(first.shape, axis, (size,)))
        return cls(first.dtype, shape, tuple(parts), axis)

    @classmethod
    def stack(cls, parts: Sequence[Expression], axis: int) -> "Join":
        """Returns arrays of one shape along a new axis."""
        rank = len(parts[0].shape) + 1
        if not -rank <= axis < rank:
            raise ValueError(
                f"stack: expected an axis from {-rank} to {rank - 1}, got {axis}"
            )
        axis %= rank
        shapes = ((*each.shape[:axis], 1, *each.shape[axis:]) for each in parts)
        return cls.make([*map(Reshape.make, parts, shapes)], axis)

    @classmethod
    def pad(cls, inner: Expression, axis: int, size: int, value: float) -> "Join":
        """Returns an array with a longer axis, and a value in the new elements."""
        axis = check_axis("pad", inner, axis)
        if size < inner.shape[axis]:
            raise ValueError(
                f"pad: expected a size of at least {inner.shape[axis]} for axis "
                f"{axis}, got {size}; slice makes an axis shorter"
            )
        new = _put(inner.shape, axis, (size - inner.shape[axis],))
        return cls.make([inner, Fill.make(new, inner.dtype, value)], axis)

    @property
    def chunk_shape(self) -> Shape:
        return self.parts[0].chunk_shape

    @cached_property
    def _starts(self) -> Array:
        """Start of each part along the axis, and the end of the last one."""
        return np.cumsum([0, *(each.shape[self.axis] for each in self.parts)])

    def places(self, region: Region, place: Place) -> Destinations:
        start, stop = region[self.axis]
        first = int(self._starts.searchsorted(start, side="right")) - 1
        last = int(self._starts.searchsorted(stop, side="left"))
        for number in range(first, last):
            begin, end = self._starts[number : number + 2].tolist()
            if begin < end:
                low, high = max(start, begin), min(stop, end)
                inside = _put(region, self.axis, ((low - begin, high - begin),))
                own = within(_put(region, self.axis, ((low, high),)), region)
                yield from self.parts[number].destinations(inside, place.part(own))

    def sources(self) -> Iterator[Source]:
        return chain.from_iterable(each.sources() for each in self.parts)


@dataclass(frozen=True)
class Reshape(_Changed):
    """The same elements in the same order, with other axes."""

    @classmethod
    def make(cls, inner: Expression, shape: Sequence[int]) -> Expression:
        """Returns it in a shape, of which one size may be -1."""
        known = math.prod(n for n in shape if n != -1)
        size = math.prod(inner.shape)
        sizes = [n if n != -1 else size // max(known, 1) for n in shape]
        is_open = [*shape].count(-1) > 1 or (-1 in shape and not known)
        if is_open or min([0, *sizes]) < 0 or math.prod(sizes) != size:
            raise ValueError(
                f"reshape: expected a shape of {size} elements, as {list(inner.shape)} "
                f"has, with at most one -1, got {list(shape)}"
            )
        wanted = _check_shape(sizes)
        return inner if wanted == inner.shape else cls(inner.dtype, wanted, inner)

    @cached_property
    def _groups(self) -> list[tuple[slice, slice]]:
        """The fewest axes of both shapes that have the same elements, in order."""
        groups, source, target = list[tuple[slice, slice]](), 0, 0
        a, b = self.inner.shape, self.shape
        while source < len(a) or target < len(b):
            first, second, left, right = source, target, 1, 1
            while first == source or second == target or left != right:
                can_source, can_target = source < len(a), target < len(b)
                if can_source and (left <= right or not can_target):
                    left, source = left * a[source], source + 1
                elif can_target:
                    right, target = right * b[target], target + 1
                else:
                    break
            groups.append((slice(first, source), slice(second, target)))
        return groups

    @cached_property
    def chunk_shape(self) -> Shape:
        found: list[int] = []
        chunk = self.inner.chunk_shape
        if all(map(operator.ge, chunk, self.inner.shape)):
            return self.shape
        for source, target in self._groups:
            sizes = zip(chunk[source], self.inner.shape[source], strict=True)
            left = math.prod(min(c, max(n, 1)) for c, n in sizes)
            wanted = []
            for n in reversed(self.shape[target]):
                wanted.append(max(1, min(n, left)))
                left = max(1, left // max(n, 1))
            found += reversed(wanted)
        return tuple(found)

    def cover(self, region: Region) -> Region:
        found = list(region)
        for _, target in self._groups:
            sizes, along = self.shape[target], found[target]
            while (cut := _last_cut(along, sizes)) and (
                math.prod(b - a for a, b in along[:cut]) > MAX_RUNS
            ):
                along[cut] = (0, sizes[cut])
            found[target] = along
        return tuple(found)

    def _list_runs(
        self, region: Region, place: Place
    ) -> list[Iterator[tuple[tuple[int, int], Region]]]:
        """Returns the contiguous ranges of each group of axes, with their boxes."""
        return [
            _runs(region[axes], self.shape[axes], cut)
            for (_, axes), cut in zip(self._groups, self._cuts(place), strict=True)
        ]

    def _count_runs(self, region: Region, place: Place) -> int:
        """Returns the number of contiguous ranges of a region."""
        each = zip(self._groups, self._cuts(place), strict=True)
        counts = (_count_runs(region[t], self.shape[t], cut) for (_, t), cut in each)
        return math.prod(counts)

    def _cuts(self, place: Place) -> list[int]:
        """Returns the first axis of each group from which on its axes can be joined."""
        return [place.joined_from(t.start, t.stop) - t.start for _, t in self._groups]

    def _join(self, boxes: Iterable[Region], region: Region, place: Place) -> Place:
        """Returns the place of a box of each group, with an axis for each group."""
        box = tuple(chain.from_iterable(boxes))
        return place.part(within(box, region)).join(
            target for _, target in self._groups
        )

    def is_direct(self, region: Region, place: Place) -> bool:
        return self._count_runs(region, place) <= MAX_RUNS

    @cached_property
    def axis_sizes(self) -> tuple[Shape, ...]:
        """The axes that each axis of a stored array is divided into; empty if it is not
        one of a stored array, or joins some."""
        sources = (self.inner.shape[source] for source, _ in self._groups)
        if not isinstance(self.inner, Source) or any(
            len(each) != 1 for each in sources
        ):
            return ()
        return tuple(self.shape[target] for _, target in self._groups)

    def destinations(self, region: Region, place: Place) -> Destinations:
        if self.axis_sizes and self._is_scattered(region, place):
            return iter([(self, region, place)])
        return super().destinations(region, place)

    def _is_scattered(self, region: Region, place: Place) -> bool:
        """Returns whether a region goes to a place in many small ranges."""
        if self._count_runs(region, place) <= FEW_RUNS:
            return False
        first = (next(runs)[1] for runs in self._list_runs(region, place))
        found, itemsize = self._join(first, region, place), DTYPES[self.dtype].itemsize
        is_small = math.prod(found.shape) * itemsize < LARGE_RUN_BYTES
        return is_small or not found.is_contiguous(itemsize)

    def places(self, region: Region, place: Place) -> Destinations:
        sources = [self.inner.shape[source] for source, _ in self._groups]
        for ranges in product(*self._list_runs(region, place)):
            runs = [run for run, _ in ranges]
            flat = self._join((box for _, box in ranges), region, place)
            boxes = [
                [
                    (box, (start - run[0], start + math.prod(measure(box)) - run[0]))
                    for box, start in list_boxes(shape, *run)
                ]
                for shape, run in zip(sources, runs, strict=True)
            ]
            for found in product(*boxes):
                own = flat.part(tuple(goes for _, goes in found))
                inside = tuple(range_ for box, _ in found for range_ in box)
                sizes = [measure(box) for box, _ in found]
                yield from self.inner.destinations(inside, own.divide(sizes))


def _last_cut(along: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int:
    """Returns the last axis that a region does not take whole; 0 if there is none."""
    for axis in reversed(range(len(sizes))):
        if along[axis] != (0, sizes[axis]):
            return axis
    return 0


def _runs(
    region: Region, shape: Shape, cut: int = 0
) -> Iterator[tuple[tuple[int, int], Region]]:
    """Yields the contiguous ranges of a region of an array, each with its box; a range
    has one index of each axis before ``cut``."""
    cut = max(cut, _last_cut(region, shape))
    behind = math.prod(shape[cut + 1 :])
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if not shape:
        yield (0, 1), ()
        return
    for index in product(*(range(start, stop) for start, stop in region[:cut])):
        first = sum(at * stride for at, stride in zip(index, strides, strict=False))
        start, stop = region[cut]
        box = (*((at, at + 1) for at in index), *region[cut:])
        yield (first + start * behind, first + stop * behind), box


def _count_runs(region: Region, shape: Shape, cut: int) -> int:
    """Returns the number of such ranges."""
    return math.prod(measure(region[: max(cut, _last_cut(region, shape))]))


def check_axis(what: str, inner: Expression, axis: int) -> int:
    """Returns an axis counted from the first one."""
    rank = len(inner.shape)
    if not -rank <= axis < rank:
        raise ValueError(
            f"{what}: expected an axis of the shape {list(inner.shape)}, got {axis}"
        )
    return axis % rank


def check_value(dtype: str, value: float) -> None:
    """Checks that a dtype has a value."""
    try:
        with np.errstate(all="raise"):
            found = np.full((), value, DTYPES[dtype])
        is_held = bool(found == value) or (is_floating(dtype) and value != value)  # noqa: PLR0124 - NaN
    except (OverflowError, FloatingPointError, ValueError, TypeError):
        is_held = False
    if not is_held and not (is_floating(dtype) and isinstance(value, float)):
        raise ValueError(f"expected a value that {dtype} has, got {value!r}")


def _check_shape(shape: Sequence[int]) -> Shape:
    if problem := shape_problem(shape):
        raise ValueError(problem)
    return tuple(shape)


def _put(values: tuple[Any, ...], axis: int, new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns values with others in the place of the one of an axis."""
    return (*values[:axis], *new, *values[axis + 1 :])
