"""Places: where the elements of an array are in a buffer, before the buffer exists.

A place is what NumPy has of a view, without memory: an offset, a shape, and strides. A
restore is planned with places, allocates memory later, and makes the views then.

>>> stacked = Place.of_array((2, 3, 4), itemsize=4)
>>> second = stacked.part(((1, 2), (0, 3), (0, 4)))
>>> second
Place(start=48, shape=(1, 3, 4), strides=(48, 16, 4))
>>> second.join([slice(0, 2), slice(2, 3)]).transpose([1, 0])
Place(start=48, shape=(4, 3), strides=(4, 16))
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Region, whole

ALIASED_BYTES: Final = 1 << 10
"""Addresses so many bytes apart share few of the 64 sets of a first cache."""

PADDING_BYTES: Final = 64
"""Bytes of a cache line."""

PACKED_BYTES: Final = 64 << 10
"""Arrays smaller than this are copied as they are."""

SHORT: Final = 4
"""Elements along an axis that NumPy needs longer to begin with than to copy."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an array in a buffer."""

    start: int
    """Offset of the first element, in bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from an element to the next one along each axis."""

    @classmethod
    def of_array(cls, shape: tuple[int, ...], itemsize: int) -> Self:
        """Returns the place of an array in C order at the start of a buffer."""
        return cls(0, shape, _strides(shape, itemsize))

    def view(self, memory: NDArray[np.uint8], dtype: "np.dtype[Any]") -> NDArray[Any]:
        """Returns its elements in a buffer."""
        return np.ndarray(self.shape, dtype, memory, self.start, self.strides)

    def stop(self, itemsize: int) -> int:
        """Returns the offset behind its last element; it has one, and no negative
        strides."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.start + last + itemsize

    def is_contiguous(self, itemsize: int) -> bool:
        """Returns whether it is one range of bytes in C order."""
        wanted = zip(
            self.shape, self.strides, _strides(self.shape, itemsize), strict=True
        )
        return all(own == packed for n, own, packed in wanted if n > 1)

    def part(self, region: Region) -> "Place":
        """Returns the place of a region of it."""
        moved = sum(a * s for (a, _), s in zip(region, self.strides, strict=True))
        return Place(self.start + moved, measure(region), self.strides)

    def move(self, size_bytes: int) -> "Place":
        """Returns it so many bytes further on."""
        return Place(self.start + size_bytes, self.shape, self.strides)

    def transpose(self, axes: Sequence[int]) -> "Place":
        """Returns it with its axes in another order."""
        return Place(
            self.start,
            tuple(self.shape[axis] for axis in axes),
            tuple(self.strides[axis] for axis in axes),
        )

    def step(self, axis: int, times: int, first: int) -> "Place":
        """Returns every ``times``-th index of an axis, from ``first`` on."""
        shape, strides = [*self.shape], [*self.strides]
        start = self.start + first * strides[axis]
        shape[axis], strides[axis] = shape[axis] // times, strides[axis] * times
        return Place(start, tuple(shape), tuple(strides))

    def joined_from(self, first: int, stop: int) -> int:
        """Returns the first of the axes up to ``stop``, not before ``first``, that can
        be joined: the elements are at equal distances in C order."""
        at, stride = stop, 0
        while at > first:
            n, own = self.shape[at - 1], self.strides[at - 1]
            if n != 1:
                if stride and own != stride:
                    break
                stride = own * n
            at -= 1
        return at

    def join(self, groups: Iterable[slice]) -> "Place":
        """Returns it with one axis for each group of neighbouring axes that can be
        joined."""
        shape, strides = list[int](), list[int]()
        for group in groups:
            sizes, own = self.shape[group], self.strides[group]
            long = [s for n, s in zip(sizes, own, strict=True) if n != 1]
            shape.append(math.prod(sizes))
            strides.append(long[-1] if long else 0)
        return Place(self.start, tuple(shape), tuple(strides))

    def divide(self, shapes: Iterable[tuple[int, ...]]) -> "Place":
        """Returns it with each axis divided into the axes of a shape."""
        strides = list[int]()
        found = tuple(shapes)
        for shape, stride in zip(found, self.strides, strict=True):
            strides += _strides(shape, stride)
        return Place(self.start, tuple(chain.from_iterable(found)), tuple(strides))


def measure(region: Region) -> tuple[int, ...]:
    """Returns the shape of a region."""
    return tuple(stop - start for start, stop in region)


def is_empty(region: Region) -> bool:
    """Returns whether a region has no elements."""
    return any(start >= stop for start, stop in region)


def within(region: Region, outer: Region) -> Region:
    """Returns a region as a part of another one."""
    return tuple(
        (a - first, b - first) for (a, b), (first, _) in zip(region, outer, strict=True)
    )


def list_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[Region, int]]:
    """Yields the fewest boxes that a contiguous range of an array consists of, each
    with the place of its first element."""
    if not shape:
        yield (), start
        return
    behind = math.prod(shape[1:])
    low, high = -(-start // behind), stop // behind
    if low > high:  # within one index
        yield from _list_boxes_at(shape, high, start, stop)
        return
    if start < low * behind:
        yield from _list_boxes_at(shape, low - 1, start, low * behind)
    if low < high:
        yield ((low, high), *whole(shape[1:])), low * behind
    if high * behind < stop:
        yield from _list_boxes_at(shape, high, high * behind, stop)


def _list_boxes_at(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[Region, int]]:
    first = index * math.prod(shape[1:])
    for box, place in list_boxes(shape[1:], start - first, stop - first):
        yield ((index, index + 1), *box), place + first


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def copy_elements(into: NDArray[Any], array: NDArray[Any]) -> None:
    """Copies an array, and casts it if the dtypes differ.

    Two orders of axes would take several times as long:

    - Few elements follow each other in ``into``: NumPy copies along that axis, and
      starts again after each few. So each index of the axis is copied by itself.
    - Elements that follow each other in ``into`` are a multiple of ``ALIASED_BYTES``
      apart in the array: they share a few lines of a cache, and each evicts the one
      before. So the array is packed first with other distances.
    """
    last = min(range(into.ndim), key=partial(_distance, into), default=0)
    if array.ndim > 1 and array.nbytes >= PACKED_BYTES:
        if array.shape[last] <= SHORT:
            each = np.moveaxis(into, last, 0), np.moveaxis(array, last, 0)
            for part, elements in zip(*each, strict=True):
                copy_elements(part, elements)
            return
        if array.strides[last] % ALIASED_BYTES == 0:
            array = _pack(array, last)
    np.copyto(into, array, casting="unsafe")


def _pack(array: NDArray[Any], last: int) -> NDArray[Any]:
    """Returns a copy in which indices of an axis are at other distances."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    shape, at = [array.shape[axis] for axis in axes], axes.index(last) + 1
    inner, more = math.prod(shape[at:]), PADDING_BYTES // array.itemsize
    padded = np.empty((*shape[:at], inner + more), array.dtype)[..., :inner]
    packed = padded.reshape(shape).transpose(np.argsort(axes))
    np.copyto(packed, array)
    return packed


def _distance(array: NDArray[Any], axis: int) -> int:
    """Returns the distance of the elements along an axis that has several."""
    return array.strides[axis] if array.shape[axis] > 1 else sys.maxsize
