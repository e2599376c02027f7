"""Reads the elements of a foreign step into staging memory, many regions at a time."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import I64
from storesvc.format.dtypes import DTYPES
from storesvc_client._chunks.buffer_layout import Bytes
from storesvc_client._chunks.slabs import FilledSlab
from storesvc_client._foreign.chunk_units import RegionRead, Unit
from storesvc_client._foreign.foreign_step import ForeignStep, Reading
from storesvc_client._save.snapshot import SlabQueue
from storesvc_client._save.transfer import SharedBuffer
from storesvc_client._values.progress import Meter
from storesvc_client.errors import StoreError, UnavailableError

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
    readings: tuple[Reading, ...]

    def cancel(self) -> None:
        """Ends the reads, after a failure or Ctrl-C: threads that still read would
        delay the exit of the process."""
        for reading in self.readings:
            reading.cancel()


class _CopiedReading:
    """A read whose elements are copied once it has ended."""

    def __init__(
        self, reading: Reading, aside: NDArray[Any], into: NDArray[Any]
    ) -> None:
        self._reading = reading
        self._aside = aside
        self._into = into

    def result(self, timeout: float | None = None) -> None:
        """See ``Reading.result``."""
        self._reading.result(timeout)
        self._into[...] = self._aside

    def cancel(self) -> None:
        """See ``Reading.cancel``."""
        self._reading.cancel()


class StepFiller:
    """Reads the units of a step in order; implements ``_save.transfer.Filler``."""

    def __init__(
        self, step: ForeignStep, units: list[Unit], *, jobs: int, reading_bytes: int
    ) -> None:
        """Creates the filler; nothing is read yet.

        Args:
            step: The step.
            units: Units of all its chunks.
            jobs: Maximum units in flight.
            reading_bytes: Memory that reading may take, in addition to that of units.
        """
        self._step = step
        self._units = units
        self._jobs = jobs
        self._reading_bytes = reading_bytes

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
        limit = min(self._reading_bytes, slab_queue.budget_bytes) // 2
        size = 0
        for unit in self._units:
            # Before the wait for memory: it may end only when these are written.
            while in_flight and (
                len(in_flight) >= self._jobs or size + unit.size > limit
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
            in_flight.append(self._start(unit, buffer))
            size += unit.size
        while in_flight:
            self._end(in_flight[0], slab_queue, meter)
            in_flight.popleft()

    def _start(self, unit: Unit, buffer: Bytes) -> _InFlight:
        if any(read.is_padded for read in unit.reads):
            buffer[...] = 0
        readings = tuple(self._begin(read, buffer) for read in unit.reads)
        return _InFlight(unit=unit, buffer=buffer, readings=readings)

    def _begin(self, read: RegionRead, buffer: Bytes) -> Reading:
        array, view = self._step.arrays[read.row], self._view(read, buffer)
        if view.flags.aligned:
            return array.read(read.region, view)
        # Small rows are back to back in a slab; formats read into aligned memory only.
        aside = np.empty(view.shape, view.dtype)
        return _CopiedReading(array.read(read.region, aside), aside, view)

    def _view(self, read: RegionRead, buffer: Bytes) -> NDArray[Any]:
        """Returns the array of a read in the memory of its unit."""
        dtype = DTYPES[self._step.tree.leaves[read.row].dtype]
        size = int(np.prod(read.shape, dtype=np.int64)) * dtype.itemsize
        array = buffer[read.start : read.start + size].view(dtype).reshape(read.shape)
        inside = tuple(slice(0, stop - start) for start, stop in read.region)
        view: NDArray[Any] = array[(*inside, ...)]
        return view

    def _end(self, started: _InFlight, slab_queue: SlabQueue, meter: Meter) -> int:
        """Waits for the reads of a unit and puts its slabs into the queue; returns its
        size in bytes. Memory of a failed read is left to it."""
        with meter.phase("read"):
            for reading, read in zip(started.readings, started.unit.reads, strict=True):
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
        """Waits for a read; returns False if the transfer has failed.

        Raises:
            UnavailableError: The read does not end.
        """
        ends = time.monotonic() + READ_SECONDS
        while not slab_queue.is_cancelled:
            try:
                reading.result(_POLL_SECONDS)
            except TimeoutError:
                if time.monotonic() < ends:
                    continue
                key = self._step.tree.leaves[read.row].key
                raise UnavailableError(
                    f"{self._step.url} leaf {key!r}: expected its bytes within "
                    f"{READ_SECONDS:g} s, got no answer; check its storage, and import "
                    "again, which resumes"
                ) from None
            return True
        return False


def _has_ended(started: _InFlight) -> bool:
    """Returns whether all reads of a unit have succeeded."""
    try:
        for reading in started.readings:
            reading.result(0)
    except (StoreError, TimeoutError):
        return False
    return True
