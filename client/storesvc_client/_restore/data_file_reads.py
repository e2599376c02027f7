"""Reads of data files, planned and decoded: which ranges of which files to read, and
how the chunks of a range are verified and copied into buffers. The plan depends on the
manifest only, not on the storage.

``BufferBudget`` has the threads of a restore that share its memory. A thread that takes
a read which needs new buffers allocates them, and then waits until all buffers that are
allocated and not handed over fit into the budget; so the bound is exceeded by the
buffers of one read at most. If no other read is in progress it does not wait, because
nothing would free memory: a leaf larger than the budget is read alone.

Reads whose bytes are copied from a response have a limit of their own for the bytes in
flight.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, Read, plan_reads
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.manifests import Manifest
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffers import Bytes
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._restore.assembly import Assembly
from storesvc_client.errors import DataLossError

BUDGET_BYTES: Final = 1 << 30
"""Maximum bytes of buffers of a restore that are allocated and not handed over."""

POLL_SECONDS: Final = 0.2
"""Interval at which timeouts of reads are checked."""

STOP_SECONDS: Final = 5.0
"""Maximum wait for reads in progress to end after one has failed."""


class BufferBudget:
    """Limits the bytes of allocated buffers and of reads in flight."""

    def __init__(self, limit: int, *, read_bytes: int | None = None) -> None:
        """Creates an unused budget; without ``read_bytes``, reads go directly into
        buffers."""
        self._limit = limit
        self._read_limit = read_bytes
        self._bytes = 0
        self._read_bytes = 0
        self._running = 0
        self._next: Read | None = None
        """The read that did not fit last."""
        self._needed = 0
        """Bytes of the buffers that it needs."""
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self.is_stopped = False
        """True after a failure, when the other threads must end."""
        self.peak_bytes = 0
        """Maximum bytes of buffers so far."""

    def perform(
        self,
        reads: Sequence[Read],
        take: Callable[[Read], int],
        assembly: Assembly,
        *,
        threads: int,
        check: Callable[[], None],
    ) -> None:
        """Performs reads in order in several daemon threads, which cannot delay the
        exit of the process if a file never answers.

        Args:
            take: Performs one read; returns the bytes of the buffers handed over.
            check: Called at intervals; raises an error if a timeout has passed.
        """
        if not reads:
            return
        threads, work = min(threads, len(reads)), iter(reads)

        def run() -> None:
            # until none is left or another thread has failed
            while (read := self._take(work, assembly)) is not None:
                freed = 0
                try:
                    freed = take(read)
                finally:
                    self.give_back(read, freed)

        pool = Threads(threads, "storesvc-direct")
        try:
            running = {pool.submit(run) for _ in range(threads)}
            while running:
                ended, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
                for one in ended:
                    one.result()
                check()
        except BaseException:  # one failed, or Ctrl-C: stop the others
            with self._changed:
                self.is_stopped = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._running, STOP_SECONDS)
            raise
        finally:
            pool.shutdown(wait=not self.is_stopped)

    def may_begin(self, read: Read, assembly: Assembly) -> bool:
        """Returns whether a read fits and, if so, counts it; does not wait.

        After False, the caller must ask for the same read again.
        """
        with self._changed:
            if self._next is not read:
                self._next, self._needed = read, assembly.begin(read.chunks)
            if self._running and not self._fits(read, self._needed):
                return False
            self._count(read, self._needed)
            return True

    def _take(self, work: Iterator[Read], assembly: Assembly) -> Read | None:
        """Takes the next read, allocates its buffers and waits until they fit."""
        with self._taking:
            read = None if self.is_stopped else next(work, None)
            if read is None:
                return None
            needed = assembly.begin(read.chunks)
            with self._changed:
                # with no other read in progress, nothing would end the wait
                self._changed.wait_for(
                    lambda: (
                        not self._running or self._fits(read, needed) or self.is_stopped
                    )
                )
                if self.is_stopped:
                    return None
                self._count(read, needed)
        return read

    def _count(self, read: Read, needed: int) -> None:
        self._bytes += needed
        self._read_bytes += read.stop - read.start
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._running += 1

    def _fits(self, read: Read, needed: int) -> bool:
        # a read that needs no new buffers frees memory
        if needed and self._bytes + needed > self._limit:
            return False
        brought = self._read_bytes + read.stop - read.start
        return self._read_limit is None or brought <= self._read_limit

    def give_back(self, read: Read, freed: int) -> None:
        """Releases the bytes of a read that is done and `freed` bytes of buffers."""
        with self._changed:
            self._bytes -= freed
            self._read_bytes -= read.stop - read.start
            self._running -= 1
            self._changed.notify_all()


_SHOWN: Final = 3
"""Maximum chunks listed in a message."""


def plan_file_reads(
    manifest: Manifest, *, alone: I64, together: I64, at_most: int, gap_bytes: int
) -> list[Read]:
    """Returns the reads of chunks, leaf by leaf and within a leaf in file order, so
    that few leaves are partly in memory, however many files hold parts of each.

    Args:
        at_most: Maximum bytes of neighbours in one read.
        gap_bytes: Largest gap between two neighbours in one read.
    """
    tree, places = manifest.tree, manifest.places
    columns = (alone, places.file[alone], places.offset[alone], places.length[alone])
    reads = [
        Read(places.files[file], at, at + length, (chunk,), (length,), (at,))
        for chunk, file, at, length in zip(*(c.tolist() for c in columns), strict=True)
    ]
    reads += plan_reads(places, together, at_most=at_most, gap_bytes=gap_bytes)
    first = np.array([read.chunks[0] for read in reads], np.int64)
    file, offset = places.file[first], places.offset[first]
    rows, _ = tree.locate_all(first)
    # a leaf is ordered by the place of its first chunk
    by_place = np.lexsort((offset, file))
    ranks = np.full(len(tree.leaves), len(reads))
    np.minimum.at(ranks, rows[by_place], np.arange(len(reads)))
    return [reads[at] for at in np.lexsort((offset, file, ranks[rows])).tolist()]


def describe(manifest: Manifest, read: Read) -> str:
    """Returns the names of a read's chunks, for messages."""
    return ", ".join(map(manifest.tree.describe_chunk, read.chunks[:_SHOWN]))


PIECE_BYTES: Final = 4 << 20
"""Bytes verified and then copied together: few enough for the caches of a processor,
and so many that threads seldom wait for each other to run Python."""

SMALL_BYTES: Final = 64 << 10
"""Size below which all chunks of a read are verified before the first is copied:
reading the clock takes as long as one such chunk."""


Again: TypeAlias = Callable[[int, int], Bytes]
"""Reads the bytes from the first up to the second offset of the data file again."""


def unpack(read: Read, memory: Bytes, assembly: Assembly, again: Again) -> int:
    """Verifies the chunks of a read and copies them into buffers; returns the bytes of
    the buffers handed over.

    A corrupt chunk is read a second time, because the first read may have been
    corrupted in transit.

    Raises:
        DataLossError: A chunk is corrupt in the second read, too.
    """
    begins = [offset - read.start for offset in read.offsets]
    lengths = [length - CHECKSUM_BYTES for length in read.lengths]
    rows = list(zip(read.chunks, begins, lengths, strict=True))
    small = [row for row in rows if row[2] < SMALL_BYTES]
    with collector_paused():
        freed = _unpack_small(read, small, memory, assembly, again)
    for chunk, begin, length in rows:
        if length >= SMALL_BYTES:
            start, stored_bytes = read.start + begin, length + CHECKSUM_BYTES
            stored = memory[begin : begin + stored_bytes]
            second = partial(again, start, start + stored_bytes)
            freed += _unpack_large(chunk, stored, assembly, second)
    return freed


def _unpack_small(
    read: Read,
    rows: list[tuple[int, int, int]],
    memory: Bytes,
    assembly: Assembly,
    again: Again,
) -> int:
    """Verifies all chunks, then copies all."""
    data, second = memory.data, dict[int, Bytes]()
    # 1. Verify: in `memory`, or in a second read of a chunk that is corrupt there.
    with assembly.meter.phase("verify"):
        for chunk, begin, length in rows:
            end = begin + length
            tail = bytes(data[end : end + CHECKSUM_BYTES])
            try:
                assembly.check(chunk, crc32c(data[begin:end]), tail)
            except DataLossError:
                stop = read.start + end + CHECKSUM_BYTES
                second[chunk] = _sound(chunk, again(read.start + begin, stop), assembly)
    # 2. Copy what was verified.
    with assembly.meter.phase("copy"):
        for chunk, begin, length in rows:
            found = second.get(chunk)
            assembly.copy_elements(
                chunk, memory[begin : begin + length] if found is None else found
            )
    # 3. Complete the chunks, which hands over buffers.
    return assembly.finish([chunk for chunk, _, _ in rows])


def _unpack_large(
    chunk: int, stored: Bytes, assembly: Assembly, again: Callable[[], Bytes]
) -> int:
    elements, tail = stored[:-CHECKSUM_BYTES], bytes(stored[-CHECKSUM_BYTES:])
    checksum = 0
    # Each piece is copied before the chunk is verified, while it is in the cache: no
    # buffer is handed over before `finish`.
    for at, end, _ in assembly.pieces(chunk, PIECE_BYTES):
        piece = elements[at:end]
        with assembly.meter.phase("verify"):
            checksum = crc32c(piece.data, checksum)
        with assembly.meter.phase("copy"):
            assembly.copy_elements(chunk, piece, at)
    return check_or_read_again(chunk, checksum, tail, assembly, again)


def check_or_read_again(
    chunk: int,
    checksum: int,
    tail: bytes,
    assembly: Assembly,
    again: Callable[[], Bytes],
) -> int:
    """Verifies a copied chunk and marks it as complete; reads it again if it is
    corrupt. Returns the bytes of the buffers handed over.

    Raises:
        DataLossError: The chunk is corrupt in the second read, too.
    """
    try:
        assembly.check(chunk, checksum, tail)
    except DataLossError:  # the second read overwrites the corrupt elements
        assembly.copy_elements(chunk, _sound(chunk, again(), assembly))
    return assembly.finish([chunk])


def _sound(chunk: int, stored: Bytes, assembly: Assembly) -> Bytes:
    """Returns the verified elements of the second read of a chunk."""
    elements = stored[:-CHECKSUM_BYTES]
    assembly.check(chunk, crc32c(elements.data), bytes(stored[-CHECKSUM_BYTES:]))
    assembly.log_corrupted(chunk)
    return elements
