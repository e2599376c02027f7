"""Assembles the chunks of a restore in host memory buffers.

``Assembly`` holds the plan of a restore and its progress: the chunks needed, where the
bytes of each go, and which buffers are complete. A ``ChunkSource`` reads the bytes and
passes them on either in pieces as they arrive (``add``), or as whole chunks that it has
read into ``destination`` or copies with ``copy_elements``. Received data is not
trusted: a piece that was not requested is rejected, and the checksum of every chunk is
compared with the manifest. A wrong byte cannot reach the caller, because of the order:

1. Bytes are written into a buffer only while its chunk is incomplete.
2. A chunk is verified as a whole, before or after its elements are copied.
3. A verified chunk is complete, once; later pieces of it are rejected.
4. A buffer is handed over when all its chunks are complete.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import CHECKSUM_BYTES, DTYPES
from storesvc.format.grids import Region, intersection
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Tree
from storesvc_client._chunks.buffers import (
    Buffer,
    BufferLayout,
    Bytes,
    Copy,
    Goal,
    NDArrayAny,
    Span,
    TakeBuffers,
    plan_buffer_layout,
)
from storesvc_client._chunks.memory import allocate
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import NEVER, Deadline
from storesvc_client._values.places import copy_elements, within
from storesvc_client.errors import DataLossError, LimitError, UnavailableError

PROGRESS_BYTES: Final = 64 << 10
"""Bytes of chunks reported to the meter together: one report takes as long as reading
one small chunk."""

_FEW_CHUNKS: Final = 16
"""Chunks of a leaf that take less time to plan together than one by one."""

_KEPT_CHUNKS: Final = 512
"""Maximum chunks of a leaf whose layout is kept for later restores."""

_KEPT_RANGES: Final = 4096
"""Maximum ranges of rows whose copies are kept until the restore ends."""

_FEW_COPIES: Final = 16
"""Copies of a range that take little memory: 360 bytes each."""

_plan_again = lru_cache(maxsize=64)(plan_buffer_layout)

_SHOWN: Final = 4
"""Maximum data files listed in a message."""

_log = logging.getLogger("storesvc_client")


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk that is not complete yet."""

    goal: Goal
    layout: BufferLayout
    buffers: Sequence[Buffer]
    """Buffers of its leaf."""
    dtype: "np.dtype[Any]"
    """Its dtype as it is stored."""
    into: Bytes | None = None
    """Memory of its pieces: part of a buffer, or scratch memory to copy from."""
    received: int = 0
    """Bytes received, including the stored checksum."""
    checksum: int = 0
    tail: bytes = b""

    def view(self, copy: Copy) -> NDArrayAny:
        """Returns the allocated memory that a copy goes to."""
        return self.buffers[copy.group].view(copy.target)

    def copy(self, copies: Iterable[Copy], memory: Bytes) -> None:
        """Copies elements from memory into the allocated buffers."""
        for copy in copies:
            copy_elements(self.view(copy), copy.source.view(memory, self.dtype))

    def ranges(self, least: int) -> Iterator[tuple[int, int, Bytes | None]]:
        """Yields ranges of its bytes, whole rows: each that goes to one contiguous
        place and is large enough, with its memory, and what is between them."""
        assert not isinstance(self.goal.goes, Span)
        row, itemsize = self.layout.row_bytes, self.dtype.itemsize
        copies = sorted(self.goal.goes, key=lambda copy: copy.source.start)
        starts = [copy.source.start // row * row for copy in copies]
        done = last = 0
        for copy, start, next_start in zip(
            copies, starts, [*starts[1:], math.inf], strict=True
        ):
            stop = -(-copy.source.stop(itemsize) // row) * row
            found = self.view(copy)
            if (
                last <= start
                and stop <= next_start
                and found.nbytes == stop - start >= least
                and found.dtype == self.dtype
                and found.flags.c_contiguous
                and copy.source.is_contiguous(itemsize)
            ):
                if done < start:
                    yield done, start, None
                yield start, stop, found.reshape(-1).view(np.uint8)
                done = stop
            last = max(last, stop)
        if done < self.layout.grid.chunk_bytes:
            yield done, self.layout.grid.chunk_bytes, None


Planned: TypeAlias = tuple[int, BufferLayout, Sequence[Buffer]]
"""A row, and the buffers that its chunks fill, one for each group of the layout."""


def _plan_buffers(
    tree: Tree, wanted: Iterable[tuple[int, Sequence[Region]]]
) -> Iterator[Planned]:
    """Plans new buffers for rows of a tree, each with the distinct regions of it to
    read."""
    layouts: dict[tuple[int, tuple[Region, ...]], BufferLayout] = {}
    for row, regions in wanted:
        grid, key = tree.grids[row], (id(tree.grids[row]), tuple(regions))
        if key not in layouts:
            is_small = grid.count <= _KEPT_CHUNKS
            plan = _plan_again if is_small else plan_buffer_layout
            layouts[key] = plan(grid, key[1])
        dtype = DTYPES[tree.leaves[row].dtype]
        yield (
            row,
            layouts[key],
            [Buffer(row, group, dtype) for group in layouts[key].groups],
        )


class ChunkSource(Protocol):
    """Reads stored chunks."""

    def read(self, ordinals: Sequence[int], assembly: "Assembly") -> None:
        """Reads the chunks and passes each to the assembly."""


class Assembly:
    """The buffers of a restore and their progress."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        *,
        shared: Sequence[Planned] = (),
        name: str,
        place: TakeBuffers,
        meter: Meter | None = None,
        deadline: Deadline = NEVER,
        within: "Assembly | None" = None,
        allocate: Callable[[int], Bytes] = allocate,
    ) -> None:
        """Plans a restore.

        Args:
            manifest: Manifest of the checkpoint.
            wanted: Rows of leaves, each with the distinct regions of it to read.
            shared: Other rows, whose chunks fill buffers that they share.
            name: Name of the checkpoint in messages.
            place: Called with buffers once they are complete and verified, in the
                thread that added the last piece of each.
            meter: Measures phases and bytes; None creates one without progress reports.
            deadline: Deadline of the restore.
            within: The assembly that this one is a part of; its deadline applies, its
                memory is used, and its meter gets everything except the bytes.
            allocate: Returns memory for a buffer of a size in bytes.
        """
        outer = None if within is None else within.meter
        self.meter: Meter = meter or Meter("restore", name, within=outer)
        self._within = within
        self.buffer_bytes = 0
        """Size of all buffers: the bytes returned, before a cast."""
        self._manifest = manifest
        self._name = name
        self._place = place
        self._deadline = deadline
        self.allocate: Callable[[int], Bytes] = within.allocate if within else allocate
        """Returns memory for a buffer of a size in bytes."""
        self._lock = threading.Lock()
        tree = manifest.tree
        self._is_missing = np.zeros(tree.chunk_count, np.bool_)
        """For each chunk, whether it is needed and not complete."""
        self._missing = 0
        """Number of such chunks."""
        self._chunks: dict[int, _Chunk] = {}
        """Such chunks: all chunks of leaves with few chunks, and the chunks of other
        leaves whose reading has begun."""
        self._parts: dict[int, tuple[BufferLayout, Sequence[Buffer]]] = {}
        """Layout and buffers of each row."""
        self._row_copies: dict[Any, Sequence[Copy]] = {}
        """Copies of rows of chunks, which other leaves of a layout need, too."""
        first_chunk = tree.first_chunk.tolist()
        for row, layout, buffers in _plan_buffers(tree, wanted):
            self._plan(row, layout, buffers, first_chunk[row])
            for buffer in buffers:
                self.buffer_bytes += buffer.group.size_bytes
                if not buffer.chunks_left:  # the leaf has no elements
                    buffer.begin(self.allocate)
                    self._place([buffer])
        for row, layout, buffers in shared:
            self._plan(row, layout, buffers, first_chunk[row])
        once = {buffer for _, _, buffers in shared for buffer in buffers}
        self.buffer_bytes += sum(buffer.group.size_bytes for buffer in once)
        self._lengths: list[int] = tree.stored_lengths.tolist()
        self._unreported_bytes = 0
        self._suspects: set[int] = set()
        """Chunks that failed their first verification."""
        self.held_bytes = 0
        """Bytes of the buffers that are allocated and not handed over."""
        self.peak_bytes = 0
        """Maximum of ``held_bytes``."""
        self.meter.total_bytes += int(tree.stored_lengths[self._is_missing].sum())

    @property
    def missing(self) -> list[int]:
        """Chunks that are not complete, ascending."""
        with self._lock:
            missing: list[int] = np.flatnonzero(self._is_missing).tolist()
        return missing

    def check_complete(self) -> None:
        """Checks that each chunk was read, so that no leaf is returned in part.

        Raises:
            DataLossError: A source ended without an error and without some chunks.
        """
        if missing := self.missing:
            raise DataLossError(
                f"{self._name}: expected all chunks, got none of {len(missing)} of "
                f"them, such as {self._manifest.tree.describe_chunk(missing[0])}; this "
                "is a bug of the client, please report it"
            )

    def restart(self, ordinals: Iterable[int]) -> list[int]:
        """Discards the pieces of incomplete chunks and returns those chunks."""
        with self._lock:
            left = [ordinal for ordinal in ordinals if self.needs(ordinal)]
            # From the first byte: a stream can be resumed at a chunk, not within one.
            for ordinal in left:
                self._chunks.pop(ordinal, None)
        return left

    def _chunk(self, ordinal: int) -> _Chunk:
        """Returns a chunk that is needed and not complete."""
        chunk = self._chunks.get(ordinal)
        if chunk is None:
            if not self.needs(ordinal):
                raise KeyError(ordinal)
            row, within = self._manifest.tree.locate(ordinal)
            layout, buffers = self._parts[row]
            fresh = _Chunk(layout.goal(within), layout, buffers, self._dtype(row))
            chunk = self._chunks.setdefault(ordinal, fresh)
        return chunk

    def add(self, ordinal: int, offset: int, piece: memoryview) -> None:
        """Adds the next piece of a chunk.

        Raises:
            DataLossError: The piece was not requested, or the chunk is corrupt for the
                second time.
        """
        # 1. Reject what was not requested, before any memory is touched.
        chunk = self._chunk(ordinal) if self.needs(ordinal) else None
        length = self._lengths[ordinal] if chunk else 0
        if chunk is None or offset != chunk.received or offset + len(piece) > length:
            raise DataLossError(
                f"{self._name}: received bytes {offset} to "
                f"{offset + len(piece)} of chunk {ordinal}, which were not requested"
            )
        if chunk.into is None:
            self.begin([ordinal])
            own = self.destination(ordinal)
            size_bytes = length - CHECKSUM_BYTES
            chunk.into = own if own is not None else np.empty(size_bytes, np.uint8)
        elements = piece[: max(0, length - CHECKSUM_BYTES - offset)]
        copied_from = self.meter.clock()
        # np.copyto releases the GIL; assigning slices of a memoryview does not.
        np.copyto(
            chunk.into[offset : offset + len(elements)],
            np.frombuffer(elements, np.uint8),
        )
        verified_from = self.meter.clock()
        chunk.checksum = crc32c(elements, chunk.checksum)
        self.meter.spend("copy", copied_from, verified_from)
        self.meter.spend("verify", verified_from)
        chunk.tail += bytes(piece[len(elements) :])
        chunk.received += len(piece)
        # 2. Verify the whole chunk. 3. Only then is it complete.
        if chunk.received == length and self._verify(ordinal, chunk):
            if not self.is_contiguous(ordinal):
                self.copy_elements(ordinal, chunk.into)
            self.finish([ordinal])

    def _verify(self, ordinal: int, chunk: "_Chunk") -> bool:
        """Verifies a chunk that arrived in pieces; returns False if it must be read
        again, because the first read may have been corrupted in transit.

        Raises:
            DataLossError: The chunk is corrupt for the second time.
        """
        try:
            self.check(ordinal, chunk.checksum, chunk.tail)
        except DataLossError:
            if ordinal in self._suspects:
                raise
            self._suspects.add(ordinal)
            self._chunks[ordinal] = replace(
                chunk, into=None, received=0, checksum=0, tail=b""
            )
            return False
        if ordinal in self._suspects:
            self.log_corrupted(ordinal)
        return True

    def log_corrupted(self, ordinal: int) -> None:
        """Logs that a chunk was corrupt in the first read and correct in the second."""
        _log.warning(
            "%s %s was corrupted in transit; the second read is correct",
            *(self._name, self._manifest.tree.describe_chunk(ordinal)),
        )

    def length(self, ordinal: int) -> int:
        """Returns the stored size of a chunk in bytes, checksum included."""
        return self._lengths[ordinal]

    def needs(self, ordinal: int) -> bool:
        """Returns whether a chunk is needed and not complete."""
        is_ordinal = 0 <= ordinal < len(self._is_missing)  # a server may send others
        return is_ordinal and bool(self._is_missing[ordinal])

    def is_contiguous(self, ordinal: int) -> bool:
        """Returns whether a chunk is one contiguous range of a buffer."""
        return isinstance(self._chunk(ordinal).goal.goes, Span)

    def begin(self, ordinals: Iterable[int]) -> int:
        """Allocates the buffers of chunks unless allocated; returns the bytes that this
        took."""
        taken = 0
        with self._lock:
            for ordinal in ordinals:
                chunk = self._chunk(ordinal)
                for group in chunk.goal.groups:
                    buffer = chunk.buffers[group]
                    try:
                        taken += buffer.begin(self.allocate)
                    except MemoryError:
                        row, _ = self._manifest.tree.locate(ordinal)
                        key = self._manifest.tree.leaves[row].key
                        raise LimitError(
                            f"{self._name} leaf {key!r}: expected to allocate "
                            f"{buffer.group.size_bytes} bytes of host memory, got "
                            "none; restore fewer leaves at a time (select=), use a "
                            "mesh of more processes, or a host with more memory"
                        ) from None
            self.held_bytes += taken
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return taken

    def count_fitting(self, ordinals: Sequence[int], limit: int) -> int:
        """Returns how many of the first chunks may be in flight together without
        exceeding a memory limit; at least 1, because a buffer may exceed the limit.
        Chunks of buffers that are allocated take no more.

        Args:
            ordinals: Incomplete chunks.
            limit: Maximum bytes of allocated buffers, including buffers of other
            chunks.
        """
        counted: set[int] = set()
        with self._lock:
            size = self.held_bytes
            for count, ordinal in enumerate(ordinals):
                chunk, before = self._chunk(ordinal), size
                for group in chunk.goal.groups:
                    buffer = chunk.buffers[group]
                    if not buffer.is_begun and id(buffer) not in counted:
                        counted.add(id(buffer))
                        size += buffer.group.size_bytes
                if count and before < size > limit:
                    return count
        return len(ordinals)

    def destination(self, ordinal: int) -> Bytes | None:
        """Returns the memory of a chunk whose buffers are allocated; None if it is not
        one contiguous range."""
        chunk = self._chunk(ordinal)
        if not isinstance(chunk.goal.goes, Span):
            return None
        start = chunk.goal.goes.start
        memory = chunk.buffers[chunk.goal.goes.group].memory
        return memory[start : start + chunk.layout.grid.chunk_bytes]

    def parts(self, ordinal: int) -> list[tuple[Region, NDArrayAny]]:
        """Returns the wanted regions of a chunk whose buffers are allocated, each with
        its memory, which need not be contiguous; none if axes of it are divided, so
        that ``copy_region`` has to copy it."""
        chunk, found = self._chunk(ordinal), list[tuple[Region, NDArrayAny]]()
        region = chunk.layout.grid.region(chunk.goal.within)
        for number, at in chunk.goal.holders:
            segment = chunk.layout.groups[number].segments[at]
            if segment.sizes:
                return []
            shared = intersection(region, segment.region)
            place = segment.place.part(within(shared, segment.region))
            found.append((shared, chunk.buffers[number].view(place)))
        return found

    def pieces(
        self, ordinal: int, at_most: int
    ) -> Iterator[tuple[int, int, Bytes | None]]:
        """Yields the pieces in which to read a chunk whose buffers are allocated: start
        and stop within it, and their memory; None if it is not one contiguous range, so
        that ``copy_elements`` has to copy the piece.

        Args:
            ordinal: The chunk.
            at_most: Maximum bytes of a piece, unless a row is larger.
        """
        chunk = self._chunk(ordinal)
        size, step = chunk.layout.grid.chunk_bytes, at_most
        own = self.destination(ordinal)
        ranges: Iterable[tuple[int, int, Bytes | None]] = [(0, size, own)]
        if own is None and size > at_most:
            row = chunk.layout.row_bytes
            # To ask the kernel for less takes longer than a copy of it.
            ranges = chunk.ranges(at_most // 16)
            step = max(1, at_most // row) * row
        for start, stop, memory in ranges:
            for at in range(start, stop, step):
                end = min(at + step, stop)
                piece = None if memory is None else memory[at - start : end - start]
                yield at, end, piece

    def copy_elements(self, ordinal: int, elements: Bytes, start: int = 0) -> None:
        """Copies elements of a chunk into its allocated buffers.

        Args:
            ordinal: The chunk.
            elements: All its elements, or whole rows (see ``pieces``).
            start: Offset of the first byte within the chunk.
        """
        chunk = self._chunk(ordinal)
        goes, layout = chunk.goal.goes, chunk.layout
        if isinstance(goes, Span):
            memory = chunk.buffers[goes.group].memory
            begin = goes.start + start
            np.copyto(memory[begin : begin + len(elements)], elements)
            return
        if len(elements) == layout.grid.chunk_bytes:
            chunk.copy(goes, elements)
            return
        first, count = (n // layout.row_bytes for n in (start, len(elements)))
        key = layout, chunk.goal.within, first, count
        if (copies := self._row_copies.get(key)) is None:
            copies = layout.copy_rows(chunk.goal, first, count)
            if len(copies) <= _FEW_COPIES and len(self._row_copies) < _KEPT_RANGES:
                self._row_copies[key] = copies
        chunk.copy(copies, elements)

    def copy_region(self, ordinal: int, region: Region, array: NDArrayAny) -> None:
        """Copies elements of a chunk into its allocated buffers, from an array in C
        order of a region of its leaf."""
        chunk = self._chunk(ordinal)
        copies = chunk.layout.copies(chunk.goal.holders, region, array.shape)
        chunk.copy(copies, array.reshape(-1).view(np.uint8))

    def check(self, ordinal: int, checksum: int, tail: bytes) -> None:
        """Verifies the checksum of a chunk against the manifest.

        Raises:
            DataLossError: A checksum differs from the manifest.
        """
        expected = int(self._manifest.sums.crc32c[ordinal])
        if checksum != expected or tail != expected.to_bytes(CHECKSUM_BYTES, "little"):
            got = f"{checksum:08x}" if checksum != expected else f"{tail.hex()} stored"
            raise DataLossError(
                f"{self._name} {self._manifest.tree.describe_chunk(ordinal)}: expected "
                f"the checksum {expected:08x}, got {got}; its stored "
                "bytes are corrupt, use another checkpoint",
                reason="CORRUPT_DATA",
            )

    def finish(self, ordinals: Sequence[int]) -> int:
        """Marks verified and copied chunks as complete and hands over the buffers that
        this completes; returns their size in bytes.

        Raises:
            UnavailableError: The deadline has passed.
        """
        chunks, whole = [*map(self._chunk, ordinals)], list[Buffer]()
        # 3. Complete; under the lock, as other threads complete chunks of the buffers.
        with self._lock:
            if not all(map(self.needs, ordinals)):  # another thread has completed one
                raise KeyError(ordinals)
            for ordinal, chunk in zip(ordinals, chunks, strict=True):
                self._is_missing[ordinal] = False
                del self._chunks[ordinal]
                for group in chunk.goal.groups:
                    buffer = chunk.buffers[group]
                    buffer.chunks_left -= 1
                    if not buffer.chunks_left:
                        whole.append(buffer)
                self._unreported_bytes += self._lengths[ordinal]
            self._missing -= len(chunks)
            done_bytes = 0
            if self._unreported_bytes >= PROGRESS_BYTES or not self._missing:
                done_bytes, self._unreported_bytes = self._unreported_bytes, 0
        # 4. Hand over; without the lock, because a copy to a device takes long.
        freed = 0
        if whole:
            since = self.meter.clock()
            self._place(whole)
            for buffer in whole:
                buffer.drop()
                freed += buffer.group.size_bytes
            self.meter.spend("place", since)
            with self._lock:
                self.held_bytes -= freed
        if done_bytes:
            self.meter.add(done_bytes)
            self.check_time()
        return freed

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        if self._within is not None:
            return self._within.seconds_left
        return self._deadline.left

    def check_time(self) -> None:
        """Checks the deadline.

        Raises:
            UnavailableError: It has passed and chunks are missing; lists them.
        """
        if self._within is not None:
            self._within.check_time()
            return
        if self.seconds_left >= 0:
            return
        outstanding = self.outstanding
        if not outstanding:
            return
        raise UnavailableError(
            f"restore of {self._name}: expected to end within "
            f"{self._deadline.seconds:g} s, but {outstanding}; check the "
            "storage, or pass a longer deadline="
        )

    @property
    def outstanding(self) -> str:
        """Number of missing chunks and their data files, for messages; "" if none."""
        left = self.missing
        if not left:
            return ""
        places = self._manifest.places
        files = Counter(places.file[left].tolist()).most_common()
        shown = ", ".join(
            f"{places.files[file]} ({count})" for file, count in files[:_SHOWN]
        )
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        return (
            f"{len(left)} chunks of {len(files)} data files are missing: {shown}{more}"
        )

    def progress(self) -> str:
        """Returns the progress as text, for the logs of waiting processes."""
        part = self.meter.part_under_way
        reads = f"it reads {part}; " if part else ""
        return reads + (self.outstanding or "it has read all")

    def _dtype(self, row: int) -> "np.dtype[Any]":
        dtype: np.dtype[Any] = DTYPES[self._manifest.tree.leaves[row].dtype]
        return dtype

    def _plan(
        self, row: int, layout: BufferLayout, buffers: Sequence[Buffer], first: int
    ) -> None:
        self._parts[row] = layout, buffers
        count = len(layout.chunks)
        self._missing += count
        if count == layout.grid.count:
            self._is_missing[first : first + count] = True
        else:
            self._is_missing[first + layout.chunks] = True
        if count <= _FEW_CHUNKS:
            dtype = self._dtype(row)
            for within in layout.chunks.tolist():
                chunk = _Chunk(layout.goal(within), layout, buffers, dtype)
                self._chunks[first + within] = chunk
