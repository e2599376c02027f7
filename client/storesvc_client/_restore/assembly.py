"""Receiving chunks: from where they lie into the buffers of a restore.

``Assembly`` is the plan and its progress: which chunks are needed, where the
bytes of each go, and when a buffer is whole. A ``ChunkSource`` brings the bytes:
either in pieces, as they come (``add``), or read by itself, into the ``destination``
of a chunk or by ``spread``. Nothing is believed: a piece that was not asked for is
refused, and every chunk is checked against the manifest.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._chunks.buffer import Buffer
from storesvc_client._chunks.buffer_layout import (
    Bytes,
    Goal,
    Layout,
    Run,
    lay_out,
)
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client._values.progress import Meter
from storesvc_client.errors import DataLossError, LimitError, UnavailableError

TOLD_BYTES: Final = 64 << 10
"""Of chunks that the meter is told of at once: it takes as long as a small one."""

_SHOWN: Final = 4
"""Data files that a message lists."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk on its way."""

    goal: Goal
    layout: Layout
    buffers: Sequence[Buffer]
    """Of its leaf."""
    into: Bytes | None = None
    """Where its pieces go: into a buffer, or beside it to be spread."""
    received: int = 0
    """Bytes, checksum included."""
    checksum: int = 0
    tail: bytes = b""


class ChunkSource(Protocol):
    """Where stored chunks come from."""

    def read(self, ordinals: Sequence[int], assembly: "Assembly") -> None:
        """Brings each of the chunks to the assembly.

        Raises:
            StoreError: Some chunks could not be read.
        """


class Assembly:
    """The buffers of a restore, and how far they are."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        *,
        name: str,
        place: Callable[[Buffer], None],
        meter: Meter | None = None,
        deadline: Deadline = NEVER,
        within: "Assembly | None" = None,
    ) -> None:
        """Plans a restore.

        Args:
            manifest: Of the checkpoint.
            wanted: Rows of leaves, and the distinct regions of each to read.
            name: What messages call the checkpoint.
            place: Called with each buffer once it is filled and checked, from
                the thread that brought its last piece.
            meter: Takes note of what is done; None: nobody asks.
            deadline: By when all of it must be here.
            within: Of a restore that this is a part of, and whose deadline counts; its
                meter takes note of all but the bytes.
        """
        outer = None if within is None else within.meter
        self.meter: Meter = meter or Meter("restore", name, within=outer)
        self._within = within
        self.buffer_bytes = 0
        """Of all buffers: what is returned, before it is cast."""
        self._manifest = manifest
        self._name = name
        self._place = place
        self._deadline = deadline
        self._lock = threading.Lock()
        self._chunks: dict[int, _Chunk] = {}
        layouts: dict[tuple[int, tuple[Region, ...]], Layout] = {}
        tree = manifest.tree
        first_chunk = tree.first_chunk.tolist()
        for row, regions in wanted:
            grid, key = tree.grids[row], (id(tree.grids[row]), tuple(regions))
            if key not in layouts:
                layouts[key] = lay_out(grid, regions)
            self._plan(row, layouts[key], first_chunk[row])
        self._lengths: list[int] = tree.stored_lengths.tolist()
        self._untold_bytes = 0
        self._suspects: set[int] = set()
        """Chunks that have come damaged once."""
        self.held_bytes = 0
        """Of the buffers that are begun and not handed over."""
        self.peak_bytes = 0
        """The most of them at once."""
        self.meter.total_bytes += sum(self._lengths[at] for at in self._chunks)

    @property
    def missing(self) -> list[int]:
        """Chunks that are not whole yet, ascending."""
        with self._lock:
            return sorted(self._chunks)

    def restart(self, ordinals: Iterable[int]) -> list[int]:
        """Forgets the pieces of chunks that are not whole, and returns those."""
        with self._lock:
            left = [ordinal for ordinal in ordinals if ordinal in self._chunks]
        for ordinal in left:
            chunk = self._chunks[ordinal]
            self._chunks[ordinal] = _Chunk(chunk.goal, chunk.layout, chunk.buffers)
        return left

    def add(self, ordinal: int, offset: int, piece: memoryview) -> None:
        """Takes the next piece of a chunk.

        Raises:
            DataLossError: It is not what was asked for, or the chunk is not what
                was saved.
        """
        chunk = self._chunks.get(ordinal)
        length = self._lengths[ordinal] if chunk else 0
        if chunk is None or offset != chunk.received or offset + len(piece) > length:
            raise DataLossError(
                f"{self._name}: the server sent bytes {offset} to "
                f"{offset + len(piece)} of chunk {ordinal}, which were not asked for"
            )
        if chunk.into is None:
            self.begin([ordinal])
            own = self.destination(ordinal)
            beside = length - CHECKSUM_BYTES
            chunk.into = own if own is not None else np.empty(beside, np.uint8)
        elements = piece[: max(0, length - CHECKSUM_BYTES - offset)]
        copied_from = self.meter.clock()
        # NumPy copies without the interpreter's lock; slices of memoryview do not.
        np.copyto(
            chunk.into[offset : offset + len(elements)],
            np.frombuffer(elements, np.uint8),
        )
        verified_from = self.meter.clock()
        chunk.checksum = crc32c(elements, chunk.checksum)
        times = self.meter.times
        times["copy"] += verified_from - copied_from
        times["verify"] += self.meter.clock() - verified_from
        chunk.tail += bytes(piece[len(elements) :])
        chunk.received += len(piece)
        if chunk.received == length and self._is_sound(ordinal, chunk):
            if not self.is_run(ordinal):
                self.spread(ordinal, chunk.into)
            self.finish(ordinal)

    def _is_sound(self, ordinal: int, chunk: "_Chunk") -> bool:
        """Checks a chunk that came in pieces. One that is damaged for the first time is
        to be asked for again: the answer may have been corrupted on its way.

        Raises:
            DataLossError: It is damaged for the second time.
        """
        try:
            self.check(ordinal, chunk.checksum, chunk.tail)
        except DataLossError:
            if ordinal in self._suspects:
                raise
            self._suspects.add(ordinal)
            fresh = _Chunk(chunk.goal, chunk.layout, chunk.buffers)
            self._chunks[ordinal] = fresh
            return False
        if ordinal in self._suspects:
            self.log_corrupted(ordinal)
        return True

    def log_corrupted(self, ordinal: int) -> None:
        """Logs that the second read of a chunk is sound, and the first was not."""
        _log.warning(
            "%s %s was corrupted on its way; read again, it is sound",
            *(self._name, self._manifest.tree.describe_chunk(ordinal)),
        )

    def length(self, ordinal: int) -> int:
        """Returns the bytes of a chunk as it is stored."""
        return self._lengths[ordinal]

    def needs(self, ordinal: int) -> bool:
        """Returns whether a chunk is not whole yet."""
        return ordinal in self._chunks

    def is_run(self, ordinal: int) -> bool:
        """Returns whether the elements of a chunk go into a buffer as they lie."""
        return isinstance(self._chunks[ordinal].goal.goes, Run)

    def begin(self, ordinals: Iterable[int]) -> int:
        """Allocates the buffers of chunks where they are not, and returns the bytes
        that were taken."""
        taken = 0
        with self._lock:
            for ordinal in ordinals:
                chunk = self._chunks[ordinal]
                for group in chunk.goal.groups:
                    taken += self._begun(chunk.buffers[group])
            self.held_bytes += taken
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return taken

    def _begun(self, buffer: Buffer) -> int:
        try:
            return buffer.begin()
        except MemoryError:
            key = self._manifest.tree.leaves[buffer.row].key
            raise LimitError(
                f"{self._name} leaf {key!r}: expected to allocate "
                f"{buffer.group.size_bytes} bytes of host memory, got none; restore it "
                "in parts (select=, or a mesh of more processes), or where there is "
                "more memory"
            ) from None

    def count_fitting(self, ordinals: Sequence[int], limit: int) -> int:
        """Returns how many of the first chunks may be on their way at once, so that
        their buffers take no more memory than a limit beside those that are begun; one
        at least, as a buffer may be larger than the limit.

        Args:
            ordinals: Chunks that are not whole.
            limit: Bytes.
        """
        counted: set[int] = set()
        with self._lock:
            size = self.held_bytes
            for count, ordinal in enumerate(ordinals):
                chunk = self._chunks[ordinal]
                for group in chunk.goal.groups:
                    buffer = chunk.buffers[group]
                    if not buffer.is_begun and id(buffer) not in counted:
                        counted.add(id(buffer))
                        size += buffer.group.size_bytes
                if count and size > limit:
                    return count
        return len(ordinals)

    def destination(self, ordinal: int) -> Bytes | None:
        """Returns where the elements of a chunk go, once it is begun; None where they
        are no run there."""
        chunk = self._chunks[ordinal]
        if not isinstance(chunk.goal.goes, Run):
            return None
        start = chunk.goal.goes.start
        memory = chunk.buffers[chunk.goal.goes.group].memory
        return memory[start : start + chunk.layout.grid.chunk_bytes]

    def piece_bytes(self, ordinal: int, at_most: int) -> int:
        """Returns how many bytes of a chunk can be spread at a time: one row at
        least."""
        layout = self._chunks[ordinal].layout
        return max(1, at_most // layout.row_bytes) * layout.row_bytes

    def spread(self, ordinal: int, elements: Bytes, start: int = 0) -> None:
        """Copies elements of a chunk that was begun to where they go.

        Args:
            ordinal: Which one.
            elements: All of them, or whole rows (``piece_bytes``).
            start: Of the first byte in the chunk.
        """
        chunk = self._chunks[ordinal]
        goes, layout = chunk.goal.goes, chunk.layout
        if isinstance(goes, Run):
            memory = chunk.buffers[goes.group].memory
            begin = goes.start + start
            np.copyto(memory[begin : begin + len(elements)], elements)
            return
        stored = elements.view(chunk.buffers[goes[0].group].dtype)
        if len(elements) == layout.grid.chunk_bytes:
            stored = stored.reshape(layout.grid.chunk_shape)
            for copy in goes:
                slab = chunk.buffers[copy.group].slabs[copy.slab]
                np.copyto(slab[copy.target], stored[copy.source])
            return
        axis, shape = layout.row_axis, list(layout.grid.chunk_shape)
        first, shape[axis] = (n // layout.row_bytes for n in (start, len(elements)))
        stored = stored.reshape(shape)
        for copy in goes:
            found = copy.of_rows(axis, first, first + shape[axis])
            if found is not None:
                slab = chunk.buffers[copy.group].slabs[copy.slab]
                np.copyto(slab[found[1]], stored[found[0]])

    def check(self, ordinal: int, checksum: int, tail: bytes) -> None:
        """Refuses a chunk that is not what was saved.

        Args:
            ordinal: Which one.
            checksum: Of the elements that were read.
            tail: The stored checksum behind them.

        Raises:
            DataLossError: They differ from the manifest.
        """
        expected = int(self._manifest.sums.crc32c[ordinal])
        if checksum != expected or tail != expected.to_bytes(CHECKSUM_BYTES, "little"):
            raise DataLossError(
                f"{self._name} {self._manifest.tree.describe_chunk(ordinal)}: expected "
                f"the checksum {expected:08x}, got {checksum:08x}; its stored "
                "bytes are damaged, use another checkpoint",
                reason="CORRUPT_DATA",
            )

    def finish(self, ordinal: int) -> int:
        """Ends with a chunk that is checked and where it goes, and returns the bytes of
        buffers that this made whole: they are handed over.

        Raises:
            UnavailableError: The restore takes longer than it may.
        """
        chunk = self._chunks[ordinal]
        with self._lock:
            del self._chunks[ordinal]
            touched = [chunk.buffers[group] for group in chunk.goal.groups]
            for buffer in touched:
                buffer.chunks_left -= 1
            whole = [buffer for buffer in touched if not buffer.chunks_left]
            self._untold_bytes += self._lengths[ordinal]
            done_bytes = 0
            if self._untold_bytes >= TOLD_BYTES or not self._chunks:
                done_bytes, self._untold_bytes = self._untold_bytes, 0
        if whole:
            since = self.meter.clock()
            for buffer in whole:
                self._place(buffer)
                buffer.drop()
            self.meter.times["place"] += self.meter.clock() - since
            with self._lock:
                self.held_bytes -= sum(buffer.group.size_bytes for buffer in whole)
        if done_bytes:
            self.meter.add(done_bytes)
            self.check_time()
        return sum(buffer.group.size_bytes for buffer in whole)

    @property
    def seconds_left(self) -> float:
        """How long the rest may take."""
        if self._within is not None:
            return self._within.seconds_left
        return self._deadline.left

    def check_time(self) -> None:
        """Refuses to go on where the restore takes longer than it may.

        Raises:
            UnavailableError: It does; lists what is outstanding.
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
            f"restore of {self._name}: expected to be done after "
            f"{self._deadline.seconds:g} s, but {outstanding}; look for what makes its "
            "storage slow, or allow more time"
        )

    @property
    def outstanding(self) -> str:
        """What is missing, for people: how many chunks of which data files; "": nothing
        is."""
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
            f"{len(left)} chunks of {len(files)} data files are outstanding: "
            f"{shown}{more}"
        )

    def news(self) -> str:
        """Returns how far it is, for people who wait for it."""
        part = self.meter.part_under_way
        reads = f"it reads {part}; " if part else ""
        return reads + (self.outstanding or "it has read all")

    def _plan(self, row: int, layout: Layout, first: int) -> None:
        dtype = DTYPES[self._manifest.tree.leaves[row].dtype]
        buffers = [Buffer(row, group, dtype) for group in layout.groups]
        self.buffer_bytes += sum(group.size_bytes for group in layout.groups)
        for goal in layout.goals:
            self._chunks[first + goal.within] = _Chunk(goal, layout, buffers)
        for buffer in buffers:
            if not buffer.chunks_left:  # it has no elements
                buffer.begin()
                self._place(buffer)
