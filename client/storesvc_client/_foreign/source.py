"""Reads the chunks of a foreign step for a restore.

A chunk is what its format reads as a whole, once. If one region of a restore needs it,
it is read straight into the buffer of that region, whatever its strides; if several do,
it is read into memory that is used again, and copied. Several threads wait for reads,
and each read goes on in the threads of its library.

A library reads a chunk into new memory and decodes it into new memory, whose first
touch takes as long as decoding it. The allocator returns the same memory for the next
chunk if it was freed by then, so no more chunks of this machine are in flight than keep
its processors busy. More are of a bucket, because each takes long to arrive.
"""

import math
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import Read
from storesvc.format.grids import Region, part
from storesvc_client._chunks.buffer_layout import Bytes
from storesvc_client._chunks.host_memory import allocate
from storesvc_client._foreign.foreign_step import ForeignStep, Reading
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.data_file_reads import BUDGET_BYTES, BufferBudget
from storesvc_client.errors import UnavailableError

THREADS: Final = 32
"""Reads in flight."""

FLIGHT_BYTES: Final = 512 << 20
"""Maximum bytes of chunks in flight, each of which its library may hold once more."""

LOCAL_FLIGHT_BYTES: Final = 32 << 20
"""Bytes of chunks of this machine in flight, unless its processors decode more."""

PROCESSORS: Final = os.cpu_count() or 1

POLL_SECONDS: Final = 1.0
"""Interval at which a read in flight checks whether the restore has failed."""


class ForeignSource:
    """Reads the chunks of one step."""

    def __init__(self, step: ForeignStep, *, name: str) -> None:
        """Creates the source; nothing is read yet.

        Args:
            step: The step.
            name: Name of the checkpoint in messages.
        """
        self._step = step
        self._name = name
        self._scratch = _Scratch()
        self.budget = BufferBudget(BUDGET_BYTES)
        self.read_bytes = 0
        """Bytes of the chunks that were read, without their padding."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = [self._planned(ordinal) for ordinal in ordinals]
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

    def _planned(self, ordinal: int) -> Read:
        """Returns the read of a chunk; its "file" is the leaf, for messages."""
        tree = self._step.tree
        row, within = tree.locate(ordinal)
        size = _size_bytes(tree.grids[row].region(within), tree.grids[row].itemsize)
        return Read(
            file=tree.leaves[row].key,
            start=0,
            stop=size,
            chunks=(ordinal,),
            lengths=(size,),
            offsets=(0,),
        )

    def _perform(self, assembly: Assembly, read: Read) -> int:
        """Reads one chunk; returns the bytes of the buffers handed over."""
        (ordinal,) = read.chunks
        row, within = self._step.tree.locate(ordinal)
        array, parts = self._step.arrays[row], assembly.parts(ordinal)
        with assembly.meter.part(read.file):
            if len(parts) == 1:
                ((region, into),) = parts
                with assembly.meter.phase("read"):
                    self._wait(array.read(region, into))
                return assembly.finish(ordinal)
            region = self._step.tree.grids[row].region(within)
            memory = self._scratch.take(read.stop)
            chunk = _shaped(memory, region, parts[0][1].dtype)
            with assembly.meter.phase("read"):
                self._wait(array.read(region, chunk))
        with assembly.meter.phase("copy"):
            for wanted, into in parts:
                np.copyto(into, part(chunk, region, wanted))
        self._scratch.give_back(memory)  # not after an error: it may still be written
        return assembly.finish(ordinal)

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


def _size_bytes(region: Region, itemsize: int) -> int:
    size = itemsize
    for start, stop in region:
        size *= stop - start
    return size


def _shaped(memory: Bytes, region: Region, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns memory as the array of a region."""
    shape = [stop - start for start, stop in region]
    size = math.prod(shape) * dtype.itemsize
    return memory[:size].view(dtype).reshape(shape)


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
