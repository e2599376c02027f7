"""Reads the chunks of a step of another project, for a restore or an import.

For a restore, a chunk is what its format reads as a whole, once. If one region of a
restore needs it, it is read straight into the buffer of that region, whatever its
strides; if several do, it is read into memory that is used again, and copied. Several
threads wait for reads, and each read goes on in the threads of its library.

A library reads a chunk into new memory and decodes it into new memory, whose first
touch takes as long as decoding it. The allocator returns the same memory for the next
chunk if it was freed by then, so no more chunks of this machine are in flight than keep
its processors busy. More are of a bucket, because each takes long to arrive.

For an import, the chunks of the step become chunks of ours. A format reads its own
chunk as a whole, for example because it is compressed. So our chunks are cut such that
each is within one of them or consists of several of them, and a ``Unit`` is what one
piece of memory receives: all our chunks of one source chunk, or neighbouring chunks
that are read one by one. Each source chunk is read once, into staging memory, many
regions at a time.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby, product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64, Read
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import (
    MAX_CHUNK_BYTES,
    Grid,
    Region,
    choose_chunk_shape,
)
from storesvc.format.trees import Tree
from storesvc_client._chunks.buffers import Buffer, Bytes, list_arrays
from storesvc_client._chunks.memory import allocate, cut_batches
from storesvc_client._chunks.slabs import FilledSlab, Slab, cut_slabs
from storesvc_client._foreign.foreign_step import (
    ForeignStep,
    Reading,
    Together,
)
from storesvc_client._foreign.raw_chunks import reading_threads
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.data_file_reads import BUDGET_BYTES, BufferBudget
from storesvc_client._restore.mapped import MappedReader
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client._save.snapshot import SlabQueue
from storesvc_client._save.transfer import SharedBuffer
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import Deadline
from storesvc_client.errors import StoreError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRead:
    """A region of a row, and its place in the memory of a unit."""

    row: int
    region: Region
    """Within the shape of the row."""
    start: int
    """Offset of its first byte in the memory."""
    shape: tuple[int, ...]
    """Shape of its array in memory: the chunks are whole, also past the shape of the
    row, where they are zero."""

    @property
    def is_padded(self) -> bool:
        """True if the array is larger than the region."""
        return self.shape != tuple(stop - start for start, stop in self.region)

    def view(self, memory: Bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns its array in the memory of a unit."""
        size = math.prod(self.shape) * dtype.itemsize
        whole = memory[self.start : self.start + size].view(dtype).reshape(self.shape)
        inside: Any = (*(slice(0, stop - start) for start, stop in self.region), ...)
        view: NDArray[Any] = whole[inside]
        return view


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Chunks that are read into one piece of memory."""

    slabs: tuple[tuple[int, Slab], ...]
    """Slabs, each with its offset in the memory."""
    reads: tuple[RegionRead, ...]
    size: int
    """Bytes of memory."""


def stored_tree(source: Tree) -> Tree:
    """Returns the rows of a step with the chunks that the store gets.

    Args:
        source: Rows whose chunks are those that the format reads as a whole.
    """
    leaves = (
        replace(x, chunk_shape=_chunk_shape(x.shape, x.grid.itemsize, x.chunk_shape))
        for x in source.leaves
    )
    return Tree(tuple(leaves), source.structure)


def plan_units(source: Tree, stored: Tree) -> list[Unit]:
    """Returns the units of all chunks, in the order of their first chunk.

    Args:
        source: Rows with the chunks of the format.
        stored: The same rows with our chunks.
    """
    found: list[Unit] = []
    simple = np.ones(stored.chunk_count, np.bool_)
    for row, (leaf, grid) in enumerate(zip(source.leaves, stored.grids, strict=True)):
        together = _together(grid, leaf.chunk_shape)
        if together is not None:
            first = int(stored.first_chunk[row])
            simple[first : first + grid.count] = False
            found += _cut_units(row, first, grid, together)
    for slab in cut_slabs(stored, np.flatnonzero(simple)):  # chunks read one by one
        reads = []
        for ordinal, start, _ in slab.rows():
            row, within = stored.locate(ordinal)
            grid = stored.grids[row]
            region, shape = grid.region(within), grid.chunk_shape
            reads.append(RegionRead(row=row, region=region, start=start, shape=shape))
        found.append(Unit(slabs=((0, slab),), reads=tuple(reads), size=slab.size))
    return sorted(found, key=lambda unit: unit.slabs[0][1].first)


@lru_cache(maxsize=1024)  # a tree has many leaves, and few shapes
def _chunk_shape(
    shape: tuple[int, ...], itemsize: int, source: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns our chunk shape: the one of a save in shards of the source's chunk shape,
    unless such a chunk crosses source chunks, or is no contiguous range of one."""
    shard = tuple(min(n, max(1, m)) for n, m in zip(source, shape, strict=True))
    chosen = choose_chunk_shape(shape, itemsize, shard)
    crosses = any(
        outer < size and inner < size and outer % inner and inner % outer
        for outer, inner, size in zip(shard, chosen, shape, strict=True)
    )
    # A chunk that is cut in its last dimensions only is a contiguous range.
    cut = [dim for dim, (m, n) in enumerate(zip(shard, chosen, strict=True)) if n < m]
    is_contiguous = not cut or all(n == 1 for n in chosen[: cut[-1]])
    if not crosses and is_contiguous:
        return chosen
    return _divide_shape(shape, itemsize, shard)


def _divide_shape(
    shape: Sequence[int], itemsize: int, shard: Sequence[int]
) -> tuple[int, ...]:
    """Returns the largest chunk shape that divides a source chunk into contiguous
    ranges of at most ``MAX_CHUNK_BYTES``."""
    chunk = list(shard)
    for dim, n in enumerate(shard):
        rows = MAX_CHUNK_BYTES // (math.prod(chunk[dim + 1 :]) * itemsize)
        chunk[dim] = max(1, min(n, rows))
        if n < shape[dim]:  # the last range of a chunk must not cross into the next one
            chunk[dim] = next(k for k in range(chunk[dim], 0, -1) if n % k == 0)
        if rows:
            break
    return tuple(chunk)


def _together(grid: Grid, source: Sequence[int]) -> tuple[int, ...] | None:
    """Returns how many of our chunks a source chunk has along each dimension; None if
    it has one, or is a part of one."""
    counts = tuple(
        1 if outer <= inner else n if outer >= size else outer // inner
        for outer, inner, n, size in zip(
            source, grid.chunk_shape, grid.counts, grid.shape, strict=True
        )
    )
    return None if grid.count == 0 or math.prod(counts) == 1 else counts


def _cut_units(
    row: int, first: int, grid: Grid, together: Sequence[int]
) -> Iterator[Unit]:
    """Yields a unit for each source chunk of a row."""
    blocks = [range(0, n, k) for n, k in zip(grid.counts, together, strict=True)]
    for corner in product(*blocks):
        counts = tuple(
            min(k, n - at)
            for at, n, k in zip(corner, grid.counts, together, strict=True)
        )
        slabs = []
        for number, within in enumerate(product(*map(range, counts))):
            ordinal = 0
            for at, more, n in zip(corner, within, grid.counts, strict=True):
                ordinal = ordinal * n + at + more
            slab = Slab(first + ordinal, (grid.chunk_bytes,))
            slabs.append((number * grid.chunk_bytes, slab))
        region = tuple(
            (at * c, min((at + k) * c, n))
            for at, k, c, n in zip(
                corner, counts, grid.chunk_shape, grid.shape, strict=True
            )
        )
        shape = tuple(k * c for k, c in zip(counts, grid.chunk_shape, strict=True))
        read = RegionRead(row=row, region=region, start=0, shape=shape)
        size = len(slabs) * grid.chunk_bytes
        yield Unit(slabs=tuple(slabs), reads=(read,), size=size)


UNIT_BYTES: Final = 64 << 20
"""Bytes of a unit of a mapped step, and of what it is made of."""


def plan_mapped_units(view: TreeReader, stored: Tree) -> list[Unit]:
    """Returns the units of a step as a mapping shows it, in the order of what they are
    made of: a source chunk that several of our chunks need is read once.

    Args:
        view: Reads the step.
        stored: Its rows with our chunks.
    """
    assert isinstance(view, MappedReader)
    grids = view.inner.tree.grids
    chunks = list[tuple[tuple[int, ...], int, RegionRead, int]]()
    for ordinal in range(stored.chunk_count):
        row, within = stored.locate(ordinal)
        grid, expression = stored.grids[row], view.expressions[row]
        region = grid.region(within)
        needs = [*expression.requests(region)]
        firsts = [(x.row, next(grids[x.row].covering(part))) for x, part in needs[:1]]
        group = min((each.row for each in expression.sources()), default=-1)
        size = grid.itemsize * sum(
            math.prod(stop - start for start, stop in part) for _, part in needs
        )
        read = RegionRead(row=row, region=region, start=0, shape=grid.chunk_shape)
        place = (group, *(firsts[0] if firsts else ()))
        chunks.append((place, ordinal, read, max(size, grid.chunk_bytes)))
    chunks.sort(key=lambda chunk: chunk[:2])
    together = ([*same] for _, same in groupby(chunks, lambda chunk: chunk[0]))
    return [
        _join_chunks(stored, {each[1]: each[2] for same in batch for each in same})
        for batch in cut_batches(
            together, lambda same: sum(each[3] for each in same), UNIT_BYTES
        )
    ]


def _join_chunks(stored: Tree, reads: Mapping[int, RegionRead]) -> Unit:
    """Returns the unit of chunks, by their ordinals."""
    slabs, placed, start = list[tuple[int, Slab]](), list[RegionRead](), 0
    for slab in cut_slabs(stored, np.sort(np.fromiter(reads, np.int64))):
        slabs.append((start, slab))
        placed += (replace(reads[n], start=start + at) for n, at, _ in slab.rows())
        start += slab.size
    return Unit(slabs=tuple(slabs), reads=tuple(placed), size=start)


JOBS: Final = 16
"""Default number of units in flight: what hides the latency of a bucket."""

READ_SECONDS: Final = 600.0
"""Time after which a read that has not ended is given up."""

_POLL_SECONDS: Final = 0.2
"""Interval at which a wait for a read checks whether the transfer has failed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _InFlight:
    """A unit whose reads have started."""

    unit: Unit
    buffer: Bytes
    readings: Sequence[tuple[RegionRead, Reading]]

    def cancel(self) -> None:
        """Ends the reads, after a failure or Ctrl-C: threads that still read would
        delay the exit of the process."""
        for _, reading in self.readings:
            reading.cancel()


@dataclass(eq=False, repr=False)
class StepFiller:
    """Reads the units of a step in order; implements ``_save.transfer.Filler``."""

    step: ForeignStep
    units: list[Unit]
    jobs: int
    reading_bytes: int

    def fill(
        self,
        slab_queue: SlabQueue,
        held: I64,  # noqa: ARG002 - known only once it was read
        meter: Meter,
    ) -> None:
        """See ``Filler.fill``."""
        in_flight = deque[_InFlight]()
        try:
            self._fill(in_flight, slab_queue, meter)
        except StoreError:
            # what has been read is stored, and need not be read again
            for started in in_flight:
                if _has_ended(started):
                    self._end(started, slab_queue, meter)
            raise
        finally:
            for started in in_flight:
                started.cancel()

    def _fill(
        self, in_flight: deque[_InFlight], slab_queue: SlabQueue, meter: Meter
    ) -> None:
        # Of a chunk in flight, the reader has two copies: as stored and as decoded.
        # Half of the staging memory is left to units that are being written.
        limit = min(self.reading_bytes, slab_queue.budget_bytes) // 2
        size = 0
        for unit in self.units:
            # Before the wait for memory: it may end only when these are written.
            while in_flight and (
                len(in_flight) >= self.jobs or size + unit.size > limit
            ):
                size -= self._end(in_flight[0], slab_queue, meter)
                in_flight.popleft()
            buffer = slab_queue.memory_now(unit.size)
            while buffer is None and in_flight:
                size -= self._end(in_flight[0], slab_queue, meter)
                in_flight.popleft()
                buffer = slab_queue.memory_now(unit.size)
            if buffer is None:
                with meter.phase("wait"):
                    buffer = slab_queue.memory(unit.size)
            if buffer is None:
                return
            if any(read.is_padded for read in unit.reads):
                buffer[...] = 0
            readings = [*self._begin_all(unit, buffer)]
            in_flight.append(_InFlight(unit=unit, buffer=buffer, readings=readings))
            size += unit.size
        while in_flight:
            self._end(in_flight[0], slab_queue, meter)
            in_flight.popleft()

    def _begin_all(
        self, unit: Unit, buffer: Bytes
    ) -> Iterator[tuple[RegionRead, Reading]]:
        """Starts the reads of a unit; in one step those that can be read so."""
        groups: dict[Together | None, list[RegionRead]] = {}
        for read in unit.reads:
            groups.setdefault(self.step.arrays[read.row].together, []).append(read)
        for together, reads in groups.items():
            if together is None:
                yield from ((read, self._begin(read, buffer)) for read in reads)
            else:
                work = partial(self._read_together, together, reads, buffer)
                yield reads[0], reading_threads().submit(work)

    def _read_together(
        self, together: Together, reads: Sequence[RegionRead], buffer: Bytes
    ) -> None:
        arrays = self.step.arrays
        wanted = [(arrays[r.row], r.region, self._view(r, buffer)) for r in reads]
        if not together.read(wanted):
            for reading in [self._begin(read, buffer) for read in reads]:
                reading.result()

    def _begin(self, read: RegionRead, buffer: Bytes) -> Reading:
        """Starts a read into the memory of its unit, where small rows are back to back
        and may not be aligned."""
        return self.step.arrays[read.row].read(read.region, self._view(read, buffer))

    def _view(self, read: RegionRead, buffer: Bytes) -> NDArray[Any]:
        """Returns the array of a read in the memory of its unit."""
        return read.view(buffer, DTYPES[self.step.tree.leaves[read.row].dtype])

    def _end(self, started: _InFlight, slab_queue: SlabQueue, meter: Meter) -> int:
        """Waits for the reads of a unit and puts its slabs into the queue; returns its
        size in bytes. Memory of a failed read is left to it."""
        with meter.phase("read"):
            for read, reading in started.readings:
                if not self._await(reading, read, slab_queue):
                    started.cancel()
                    return started.unit.size
        slabs = started.unit.slabs
        if len(slabs) == 1:
            ((_, slab),) = slabs
            wanted = range(slab.first, slab.first + len(slab.sizes))
            slab_queue.put(FilledSlab(slab, wanted, started.buffer))
        else:
            SharedBuffer(slab_queue, started.buffer).put(slabs)
        return started.unit.size

    def _await(self, reading: Reading, read: RegionRead, slab_queue: SlabQueue) -> bool:
        """Waits for a read; returns False if the transfer has failed."""
        ends = time.monotonic() + READ_SECONDS
        while not slab_queue.is_cancelled:
            try:
                reading.result(_POLL_SECONDS)
            except TimeoutError:
                if time.monotonic() < ends:
                    continue
                key = self.step.tree.leaves[read.row].key
                raise UnavailableError(
                    f"{self.step.url} leaf {key!r}: expected its bytes within "
                    f"{READ_SECONDS:g} s, got no answer; check its storage, and import "
                    "again, which resumes"
                ) from None
            return True
        return False


@dataclass(eq=False, repr=False)
class MappedFiller:
    """Reads the units of a mapped step, one after another; implements ``Filler``."""

    view: TreeReader
    units: list[Unit]

    def fill(
        self,
        slab_queue: SlabQueue,
        held: I64,  # noqa: ARG002 - known only once it was read
        meter: Meter,
    ) -> None:
        """See ``Filler.fill``."""
        for unit in self.units:
            with meter.phase("wait"):
                buffer = slab_queue.memory(unit.size)
            if buffer is None:
                return
            if any(read.is_padded for read in unit.reads):
                buffer[...] = 0
            with meter.phase("read"):
                self._read(unit, buffer, meter)
            SharedBuffer(slab_queue, buffer).put(unit.slabs)

    def _read(self, unit: Unit, memory: Bytes, meter: Meter) -> None:
        wanted: dict[int, dict[Region, NDArray[Any]]] = {}
        for read in unit.reads:
            dtype = DTYPES[self.view.tree.leaves[read.row].dtype]
            into = read.view(memory, dtype)
            wanted.setdefault(read.row, {})[read.region] = into

        def place(buffers: Sequence[Buffer]) -> None:
            for row, region, array in list_arrays(buffers):
                wanted[row][region][...] = array

        assembly = self.view.plan_reads(
            [(row, [*regions]) for row, regions in wanted.items()],
            place,
            Meter("restore", self.view.name, within=meter),
            Deadline.after(READ_SECONDS),
        )
        self.view.open_source().read(assembly.missing, assembly)
        assembly.check_complete()


def _has_ended(started: _InFlight) -> bool:
    """Returns whether all reads of a unit have succeeded."""
    try:
        for _, reading in started.readings:
            reading.result(0)
    except (StoreError, TimeoutError):
        return False
    return True


THREADS: Final = 32
"""Reads in flight."""

FLIGHT_BYTES: Final = 512 << 20
"""Maximum bytes of chunks in flight, each of which its library may hold once more."""

LOCAL_FLIGHT_BYTES: Final = 32 << 20
"""Bytes of chunks of this machine in flight, unless its processors decode more."""

PROCESSORS: Final = os.cpu_count() or 1

TOGETHER_BYTES: Final = 4 << 20
"""Maximum bytes of small chunks that are read in one step."""

POLL_SECONDS: Final = 1.0
"""Interval at which a read in flight checks whether the restore has failed."""


def _cost(read: Read) -> int:
    """Returns the bytes of a small chunk and of the objects for it."""
    return read.stop + 1024


def _is_direct(into: NDArray[Any], dtype: str) -> bool:
    """Returns whether elements are read into memory of their dtype and axes, else they
    are read elsewhere and copied."""
    strides = [s for n, s in zip(into.shape, into.strides, strict=True) if n > 1]
    return into.dtype == DTYPES[dtype] and strides == sorted(strides, reverse=True)


class StepSource:
    """Reads the chunks of one step."""

    def __init__(self, step: ForeignStep, *, name: str) -> None:
        """Creates the source; nothing is read yet."""
        self._step = step
        self._name = name
        self._scratch = _Scratch()
        self.budget = BufferBudget(BUDGET_BYTES)
        self.read_bytes = 0
        """Bytes of the chunks that were read, without their padding."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = self._plan_reads(ordinals)
        self.read_bytes += sum(read.stop for read in reads)
        largest = max((read.stop for read in reads), default=0)
        flight_bytes = FLIGHT_BYTES
        if self._step.is_local:  # one of a processor is decoded, and the next one read
            busy = max(LOCAL_FLIGHT_BYTES, 2 * PROCESSORS * largest)
            flight_bytes = min(FLIGHT_BYTES, busy)
        self.budget = BufferBudget(BUDGET_BYTES, read_bytes=flight_bytes)
        perform = partial(self._perform, assembly)
        self.budget.perform(
            reads, perform, assembly, threads=THREADS, check=assembly.check_time
        )

    def _plan_reads(self, ordinals: Sequence[int]) -> list[Read]:
        """Returns the reads of chunks; one of several reads what can be read so."""
        groups: dict[Together | None, list[Read]] = {}
        for ordinal in ordinals:
            row, _ = self._step.tree.locate(ordinal)
            group = groups.setdefault(self._step.arrays[row].together, [])
            group.append(self._plan_read(ordinal))
        reads = groups.pop(None, [])
        for group in groups.values():
            for batch in cut_batches(group, _cost, TOGETHER_BYTES):
                chunks = tuple(read.chunks[0] for read in batch)
                size = sum(read.stop for read in batch)
                reads.append(replace(batch[0], chunks=chunks, stop=size))
        return reads

    def _plan_read(self, ordinal: int) -> Read:
        """Returns the read of a chunk; its "file" is the leaf, for messages."""
        tree = self._step.tree
        row, within = tree.locate(ordinal)
        region, itemsize = tree.grids[row].region(within), tree.grids[row].itemsize
        size = math.prod(stop - start for start, stop in region) * itemsize
        return Read(
            file=tree.leaves[row].key,
            start=0,
            stop=size,
            chunks=(ordinal,),
            lengths=(size,),
            offsets=(0,),
        )

    def _perform(self, assembly: Assembly, read: Read) -> int:
        """Reads chunks; returns the bytes of the buffers handed over."""
        if len(read.chunks) == 1:
            return self._read_single(assembly, read)
        tree, arrays = self._step.tree, self._step.arrays
        rows = [tree.locate(ordinal)[0] for ordinal in read.chunks]
        parts = [assembly.parts(ordinal) for ordinal in read.chunks]
        is_direct = all(
            own and all(_is_direct(into, tree.leaves[row].dtype) for _, into in own)
            for row, own in zip(rows, parts, strict=True)
        )
        together = arrays[rows[0]].together
        assert together is not None
        with assembly.meter.part(read.file), assembly.meter.phase("read"):
            is_read = is_direct and together.read(
                [
                    (arrays[row], *one)
                    for row, own in zip(rows, parts, strict=True)
                    for one in own
                ]
            )
        if is_read:
            return assembly.finish(read.chunks)
        each = (self._plan_read(ordinal) for ordinal in read.chunks)
        return sum(self._read_single(assembly, one) for one in each)

    def _read_single(self, assembly: Assembly, read: Read) -> int:
        """Reads one chunk; returns the bytes of the buffers handed over."""
        (ordinal,) = read.chunks
        row, within = self._step.tree.locate(ordinal)
        array, parts = self._step.arrays[row], assembly.parts(ordinal)
        dtype = self._step.tree.leaves[row].dtype
        with assembly.meter.part(read.file):
            if len(parts) == 1 and _is_direct(parts[0][1], dtype):
                ((region, into),) = parts
                with assembly.meter.phase("read"):
                    self._wait(array.read(region, into))
                return assembly.finish(read.chunks)
            region = self._step.tree.grids[row].region(within)
            memory = self._scratch.take(read.stop)
            shape = [stop - start for start, stop in region]
            chunk = memory[: read.stop].view(DTYPES[dtype]).reshape(shape)
            with assembly.meter.phase("read"):
                self._wait(array.read(region, chunk))
        with assembly.meter.phase("copy"):
            assembly.copy_region(ordinal, region, chunk)
        self._scratch.give_back(memory)  # not after an error: it may still be written
        return assembly.finish(read.chunks)

    def _wait(self, reading: Reading) -> None:
        """Waits for a read, unless another one has failed."""
        while True:
            since = time.monotonic()
            try:
                reading.result(POLL_SECONDS)
            except TimeoutError:
                if self.budget.is_stopped:
                    raise UnavailableError(
                        f"{self._name}: another read of it failed"
                    ) from None
                if time.monotonic() - since < POLL_SECONDS / 2:  # its own error
                    raise
            else:
                return


class _Scratch:
    """Memory for chunks that are copied, used again; bounded by the reads in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []

    def take(self, size_bytes: int) -> Bytes:
        """Returns at least so many bytes."""
        with self._lock:
            fitting = [each for each in self._free if each.nbytes >= size_bytes]
            if fitting:
                found = min(fitting, key=len)
                self._free = [each for each in self._free if each is not found]
                return found
            if self._free:
                self._free.pop()  # the larger one takes its place
        return allocate(size_bytes)

    def give_back(self, memory: Bytes) -> None:
        """Makes memory free."""
        with self._lock:
            self._free.append(memory)
