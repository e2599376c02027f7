"""Stored chunks from data files that this process reads by itself.

From the manifest alone: which ranges of which files to read, in the order in which
they lie, straight into the buffers where that is one run. Bytes are checksummed a
piece at a time, while they are in the processor's cache; a page of memory is touched
once more only by whoever uses it.

Work is taken off one list by a few threads, which all do the same: read, check, copy
what is no run, hand over.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.manifests import Manifest
from storesvc.format.reads import Read
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc.storage import rooted_files
from storesvc_client._chunks.buffer_layout import Bytes, allocate
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.chunk_decoder import (
    PIECE_BYTES,
    SMALL_BYTES,
    check_or_read_again,
    unpack,
)
from storesvc_client._restore.memory_budget import BUDGET_BYTES, Budget
from storesvc_client._restore.read_plan import describe, planned
from storesvc_client.errors import DataLossError, StoreError, UnavailableError

READ_SECONDS: Final = 30.0
"""How long a call for a file may take ..."""

LEAST_BYTES_PER_SECOND: Final = 1 << 20
"""... beside the time that its bytes take."""

THREADS: Final = min(os.cpu_count() or 1, 8)

BLOCK_BYTES: Final = 2 << 20
"""Of neighbours that are read together."""

GAP_BYTES: Final = 4 << 10
"""What may lie between neighbours: storage reads no less than a page."""


class DirectSource:
    """Stored chunks from the data files of a run."""

    def __init__(self, root: Path, pool: str, manifest: Manifest, *, name: str) -> None:
        """Prepares to read.

        Args:
            root: Of the store.
            pool: What the data files lie below.
            manifest: Of the checkpoint.
            name: What messages call the checkpoint.
        """
        self._root = root
        self._pool = pool
        self._manifest = manifest
        self._name = name
        self.budget = Budget(BUDGET_BYTES)
        self._calls: dict[int, tuple[float, Path]] = {}
        """By thread: when the call for a file that it is at is due."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = self._planned(ordinals, assembly)
        take = partial(self._take, _Staging(), assembly)
        check = partial(self._check, assembly)
        self.budget.work_off(reads, take, assembly, threads=THREADS, check=check)

    def _check(self, assembly: Assembly) -> None:
        """Refuses to wait for a file that does not answer.

        Raises:
            UnavailableError: One does not, or the restore takes longer than it may.
        """
        now = time.monotonic()
        for due, path in list(self._calls.values()):
            if now > due:
                raise UnavailableError(
                    f"{self._name}: data file {path} has not answered in time; check "
                    "the disk or the network that it lies on, and try again",
                    reason="STORAGE_UNAVAILABLE",
                )
        assembly.check_time()

    @contextmanager
    def _due(self, read: Read, size_bytes: int) -> Iterator[None]:
        """Notes that a call for a file is to return in time."""
        due = time.monotonic() + READ_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND
        self._calls[threading.get_ident()] = due, self._path(read)
        try:
            yield
        finally:
            del self._calls[threading.get_ident()]

    def _path(self, read: Read) -> Path:
        return self._root / self._pool / read.file

    def _planned(self, ordinals: Sequence[int], assembly: Assembly) -> list[Read]:
        chunks = np.array(ordinals, np.int64)
        alone = np.array([assembly.is_run(ordinal) for ordinal in ordinals], np.bool_)
        alone &= self._manifest.places.length[chunks] >= SMALL_BYTES
        return planned(
            self._manifest,
            alone=chunks[alone],
            together=chunks[~alone],
            at_most=BLOCK_BYTES,
            gap_bytes=GAP_BYTES,
        )

    def _take(self, staging: "_Staging", assembly: Assembly, read: Read) -> int:
        """Does a read; returns the bytes that were handed over."""
        take = self._take_alone if len(read.chunks) == 1 else self._take_together
        with self._file(read) as file, assembly.meter.part(read.file):
            return take(file, read, staging, assembly)

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
        again = partial(self._again, file, read, read.start, read.stop)
        return check_or_read_again(chunk, checksum, bytes(tail), assembly, again)

    def _take_together(
        self, file: int, read: Read, staging: "_Staging", assembly: Assembly
    ) -> int:
        """Reads neighbours, and copies each from there; returns as above."""
        memory = staging.memory(read.stop - read.start)
        with assembly.meter.phase("read"):
            self._fill(file, [memory.data], read, read.start)
        return unpack(read, memory, assembly, partial(self._again, file, read))

    def _again(self, file: int, read: Read, start: int, stop: int) -> Bytes:
        """Reads bytes of a data file a second time."""
        memory = np.empty(stop - start, np.uint8)
        self._fill(file, [memory.data], read, start)
        return memory

    @contextmanager
    def _file(self, read: Read) -> Iterator[int]:
        """Opens the file of a read, and names what storage says about it."""
        place = f"{self._pool}{read.file}"
        try:
            with self._due(read, 0):
                file = rooted_files.open_file(self._root, place)
            try:
                yield file
            finally:
                os.close(file)
        except FileNotFoundError as e:
            raise self._lost(read, "is missing") from e
        except StoreError:  # some are OSErrors too
            raise
        except rooted_files.IrregularFileError as e:
            raise self._lost(read, f"is not read ({e})") from e
        except OSError as e:
            raise UnavailableError(
                f"{self._name}: cannot read data file {self._path(read)}: "
                f"{e.strerror}; without direct= it is read through the server"
            ) from e

    def _fill(
        self, file: int, buffers: list[memoryview], read: Read, offset: int
    ) -> None:
        """Reads until the buffers are full."""
        wanted = sum(map(len, buffers))
        with self._due(read, wanted):
            got = os.preadv(file, buffers, offset)
        while got < wanted:
            left, skipped = [], got
            for buffer in buffers:
                left.append(buffer[min(skipped, len(buffer)) :])
                skipped -= min(skipped, len(buffer))
            with self._due(read, wanted):
                more = os.preadv(file, left, offset + got)
            if not more:
                raise self._lost(read, f"ends at byte {offset + got}")
            got += more

    def _lost(self, read: Read, what: str) -> DataLossError:
        named = describe(self._manifest, read)
        path = self._path(read)
        return DataLossError(
            f"{self._name} {named}: data file {path} {what}, expected "
            f"bytes {read.start} to {read.stop}; use another checkpoint",
            reason="CORRUPT_DATA",
        )


class _Staging(threading.local):
    """The memory that each thread reads into what it copies from there."""

    def __init__(self) -> None:
        self._memory = allocate(0)

    def memory(self, size_bytes: int) -> Bytes:
        """Returns so much of it; what was returned before is given up."""
        if len(self._memory) < size_bytes:
            self._memory = allocate(size_bytes)
        return self._memory[:size_bytes]
