"""Buffers of a restore: regions of a leaf in host memory, filled chunk by chunk."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from storesvc.format.grids import Region
from storesvc_client._chunks.buffer_layout import Bytes, Group, NDArrayAny

_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


class Buffer:
    """Regions of a leaf in host memory, filled and handed over together."""

    __slots__ = (
        "chunks_left",
        "dtype",
        "group",
        "is_begun",
        "memory",
        "row",
        "segments",
    )

    def __init__(self, row: int, group: Group, dtype: "np.dtype[Any]") -> None:
        self.row = row
        """Row of the leaf in the manifest."""
        self.group = group
        self.dtype = dtype
        self.chunks_left = group.chunk_count
        self.memory = _NOTHING
        self.segments: Sequence[NDArrayAny] = ()
        self.is_begun = False
        """True once it is allocated, also after ``drop``."""

    @property
    def regions(self) -> Sequence[Region]:
        """Regions of the leaf that it holds."""
        return self.group.regions

    @property
    def arrays(self) -> list[NDArrayAny]:
        """The elements of each region, as views of the memory."""
        together = zip(self.segments, self.group.segments, strict=True)
        return [array[index] for array, segment in together for index in segment.inside]

    def begin(self, allocate: "Callable[[int], Bytes]") -> int:
        """Allocates the memory unless it was allocated; returns the bytes that this
        took."""
        if self.is_begun:
            return 0
        self.is_begun = True
        self.memory = allocate(self.group.size_bytes)
        self.segments = [
            self.memory[segment.start : segment.start + segment.size_bytes]
            .view(self.dtype)
            .reshape([stop - start for start, stop in segment.region])
            for segment in self.group.segments
        ]
        return self.group.size_bytes

    def drop(self) -> None:
        """Drops the reference to the memory; the receiver of the arrays owns it."""
        self.memory, self.segments = _NOTHING, ()
