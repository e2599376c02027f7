"""Reads the chunks of a foreign step for a restore.

A chunk is what its format reads as a whole. If one region of a restore needs it, it is
read straight into the buffer of that region, whatever its strides; if several do, it is
read once and copied. Several threads wait for reads, and each read goes on in the
threads of its library.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.grids import Region, part
from storesvc.format.reads import Read
from storesvc_client._foreign.foreign_step import ForeignStep, Reading
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.buffer_budget import BUDGET_BYTES, BufferBudget
from storesvc_client.errors import UnavailableError

THREADS: Final = 32
"""Reads in flight."""

FLIGHT_BYTES: Final = 512 << 20
"""Maximum bytes of chunks in flight, each of which its library may hold once more."""

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
        self.budget = BufferBudget(BUDGET_BYTES, read_bytes=FLIGHT_BYTES)
        self.read_bytes = 0
        """Bytes of the chunks that were read, without their padding."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = [self._planned(ordinal) for ordinal in ordinals]
        self.read_bytes += sum(read.stop for read in reads)
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
            chunk = _empty(region, parts[0][1])
            with assembly.meter.phase("read"):
                self._wait(array.read(region, chunk))
        with assembly.meter.phase("copy"):
            for wanted, into in parts:
                np.copyto(into, part(chunk, region, wanted))
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


def _empty(region: Region, like: NDArray[Any]) -> NDArray[Any]:
    return np.empty([stop - start for start, stop in region], like.dtype)
