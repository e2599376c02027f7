"""Stored chunks from data files that this process reads by itself.

From the manifest alone: which ranges of which files to read, in the order in which
they lie, straight into the buffers where that is one run. Bytes are checksummed a
piece at a time, while they are in the processor's cache; a page of memory is touched
once more only by whoever uses it.

Work is taken off one list by a few threads, which all do the same: read, check, copy
what is no run, hand over. Whoever takes work that begins new buffers waits until all
that were begun, and are not handed over, fit the budget.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, Places
from storesvc.format.manifests import Manifest
from storesvc.format.reads import Read, plan_reads
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._budget import Budget
from storesvc_client._layouts import Bytes, allocate
from storesvc_client._pausing import collector_paused
from storesvc_client._receiving import Assembly
from storesvc_client.errors import DataLossError, StoreError, UnavailableError

BUDGET_BYTES: Final = 1 << 30
"""Of buffers that are begun and not handed over."""

THREADS: Final = min(os.cpu_count() or 1, 8)

PIECE_BYTES: Final = 1 << 20
"""Read, then checksummed, before the next: half of a core's own cache."""

SMALL_BYTES: Final = 64 << 10
"""Chunks below it are read with their neighbours, then copied."""

BLOCK_BYTES: Final = 2 << 20
"""Of neighbours that are read together."""

GAP_BYTES: Final = 4 << 10
"""What may lie between neighbours: storage reads no less than a page."""

_SHOWN: Final = 3


class DirectSource:
    """Stored chunks from the data files of a run."""

    def __init__(self, pool: Path, manifest: Manifest, *, name: str) -> None:
        """Prepares to read.

        Args:
            pool: The directory of the data files.
            manifest: Of the checkpoint.
            name: What messages call the checkpoint.
        """
        self._pool = pool
        self._manifest = manifest
        self._name = name
        self.budget = Budget(BUDGET_BYTES)

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = self._planned(ordinals, assembly)
        threads = min(THREADS, len(reads))
        if not threads:
            return
        work = iter(reads)
        with ThreadPoolExecutor(threads, "storesvc-direct") as pool:
            try:
                futures = [
                    pool.submit(self._work, work, assembly) for _ in range(threads)
                ]
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: the others must not go on
                self.budget.stop()
                raise

    def _planned(self, ordinals: Sequence[int], assembly: Assembly) -> list[Read]:
        """The reads, leaf after leaf, each in the order in which it lies: so few
        leaves are in memory in part, however many files hold a piece of each."""
        tree, places = self._manifest.tree, self._manifest.places
        chunks = np.array(ordinals, np.int64)
        alone = np.array([assembly.is_run(ordinal) for ordinal in ordinals], np.bool_)
        alone &= places.length[chunks] >= SMALL_BYTES
        reads = list(_apart(places, chunks[alone]))
        reads += plan_reads(
            places, chunks[~alone], at_most=BLOCK_BYTES, gap_bytes=GAP_BYTES
        )
        first = np.array([read.chunks[0] for read in reads], np.int64)
        file, offset = places.file[first], places.offset[first]
        rows, _ = tree.locate_all(first)
        # a leaf counts where its first chunk lies
        by_place = np.lexsort((offset, file))
        ranks = np.full(len(tree.leaves), len(reads))
        np.minimum.at(ranks, rows[by_place], np.arange(len(reads)))
        return [reads[at] for at in np.lexsort((offset, file, ranks[rows])).tolist()]

    def _work(self, work: Iterator[Read], assembly: Assembly) -> None:
        """Takes reads until none is left, or another thread failed."""
        staging = _Staging()
        while (read := self.budget.take(work, assembly)) is not None:
            take = self._take_alone if len(read.chunks) == 1 else self._take_together
            freed = 0
            try:
                with self._file(read) as file, assembly.meter.part(read.file):
                    freed = take(file, read, staging, assembly)
            finally:
                self.budget.give_back(freed)

    def _take_alone(
        self, file: int, read: Read, staging: "_Staging", assembly: Assembly
    ) -> int:
        """Reads a chunk to where it goes, or beside it and copies it while it is in
        the cache; returns the bytes that were handed over."""
        (chunk,), (length,) = read.chunks, read.lengths
        size = length - CHECKSUM_BYTES
        into, step = assembly.destination(chunk), PIECE_BYTES
        if into is None:
            step = assembly.piece_bytes(chunk, PIECE_BYTES)
        tail, checksum, meter = bytearray(CHECKSUM_BYTES), 0, assembly.meter
        for at in range(0, size, step):
            end = min(at + step, size)
            piece = staging.memory(end - at) if into is None else into[at:end]
            buffers = [piece.data, memoryview(tail)] if end == size else [piece.data]
            with meter.phase("read"):
                self._fill(file, buffers, read, read.start + at)
            with meter.phase("verify"):
                checksum = crc32c(piece.data, checksum)
            if into is None:
                with meter.phase("copy"):
                    assembly.spread(chunk, piece, at)
            if self.budget.is_stopped:
                raise UnavailableError(f"{self._name}: another read of it failed")
        assembly.check(chunk, checksum, bytes(tail))
        return assembly.finish(chunk)

    def _take_together(
        self, file: int, read: Read, staging: "_Staging", assembly: Assembly
    ) -> int:
        """Reads neighbours, and copies each from there; returns as above."""
        memory, meter = staging.memory(read.stop - read.start), assembly.meter
        data = memory.data
        with meter.phase("read"):
            self._fill(file, [data], read, read.start)
        begins = [offset - read.start for offset in read.offsets]
        lengths = [length - CHECKSUM_BYTES for length in read.lengths]
        rows = list(zip(read.chunks, begins, lengths, strict=True))
        # one step after the other, as the clock takes as long as a small chunk
        with collector_paused():
            with meter.phase("verify"):
                for chunk, begin, length in rows:
                    end = begin + length
                    tail = bytes(data[end : end + CHECKSUM_BYTES])
                    assembly.check(chunk, crc32c(data[begin:end]), tail)
            with meter.phase("copy"):
                for chunk, begin, length in rows:
                    assembly.spread(chunk, memory[begin : begin + length])
            return sum(map(assembly.finish, read.chunks))

    @contextmanager
    def _file(self, read: Read) -> Iterator[int]:
        """Opens the file of a read, and names what storage says about it."""
        if not _is_plain(read.file):
            raise DataLossError(
                f"{self._name}: expected data files below the pool of its run, got "
                f"{read.file!r}; use another checkpoint",
                reason="CORRUPT_DATA",
            )
        path = self._pool / read.file
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                yield file
            finally:
                os.close(file)
        except FileNotFoundError as e:
            raise self._lost(read, "is missing") from e
        except StoreError:  # some are OSErrors too
            raise
        except OSError as e:
            raise UnavailableError(
                f"{self._name}: cannot read data file {path}: {e.strerror}; without "
                "direct= it is read through the server"
            ) from e

    def _fill(
        self, file: int, buffers: list[memoryview], read: Read, offset: int
    ) -> None:
        """Reads until the buffers are full."""
        wanted = sum(map(len, buffers))
        got = os.preadv(file, buffers, offset)
        while got < wanted:
            left, skipped = [], got
            for buffer in buffers:
                left.append(buffer[min(skipped, len(buffer)) :])
                skipped -= min(skipped, len(buffer))
            more = os.preadv(file, left, offset + got)
            if not more:
                raise self._lost(read, f"ends at byte {offset + got}")
            got += more

    def _lost(self, read: Read, what: str) -> DataLossError:
        tree = self._manifest.tree
        named = ", ".join(map(tree.describe_chunk, read.chunks[:_SHOWN]))
        return DataLossError(
            f"{self._name} {named}: data file {self._pool / read.file} {what}, "
            f"expected bytes {read.start} to {read.stop}; use another checkpoint",
            reason="CORRUPT_DATA",
        )


class _Staging:
    """The memory that one thread reads into what it copies from there."""

    def __init__(self) -> None:
        self._memory = allocate(0)

    def memory(self, size_bytes: int) -> Bytes:
        """Returns so much of it; what was returned before is given up."""
        if len(self._memory) < size_bytes:
            self._memory = allocate(size_bytes)
        return self._memory[:size_bytes]


def _apart(places: Places, chunks: I64) -> Iterator[Read]:
    """The reads that fetch chunks each for itself."""
    columns = (
        chunks,
        places.file[chunks],
        places.offset[chunks],
        places.length[chunks],
    )
    for chunk, file, offset, length in zip(*(c.tolist() for c in columns), strict=True):
        stop = offset + length
        yield Read(places.files[file], offset, stop, (chunk,), (length,), (offset,))


def _is_plain(file: str) -> bool:
    """Whether a file's name stays below where it is."""
    path = PurePosixPath(file)
    return (
        bool(path.parts)
        and path.as_posix() == file
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in file
    )
