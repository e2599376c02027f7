"""Stored chunks from the data files of a bucket that this process reads by itself.

A request to a bucket takes some 30 ms before its first byte, and then moves some
50 MB/s, whatever the network. So neighbours are read together, gaps included that cost
less than another request, and many requests are under way at a time. What comes is
checked and copied to where it goes by as many threads as there are processors: the
others wait for answers.
"""

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from storesvc.format.manifests import Manifest
from storesvc.format.reads import Read
from storesvc_client._buckets import BucketRoot, StoppedError, Waiting
from storesvc_client._budget import Budget
from storesvc_client._layouts import Bytes
from storesvc_client._ranges import describe, planned
from storesvc_client._receiving import Assembly
from storesvc_client._unpacking import unpack
from storesvc_client.errors import DataLossError, UnavailableError

PROCESSORS: Final = min(os.cpu_count() or 1, 8)

BUFFER_BYTES: Final = 512 << 20
"""Of buffers that are begun and not handed over ..."""

READ_BYTES: Final = PROCESSORS * (64 << 20)
"""... and of reads that are under way beside them: half a GB/s for each processor that
has to check and copy it. More would only be memory that is touched for the first time,
which costs as much as a copy."""

BLOCK_BYTES: Final = 4 << 20
"""Of neighbours that are read together. Larger ones would waste less of the time of a
request, but there is room for fewer of them, and all in all less would move."""

GAP_BYTES: Final = 128 << 10
"""What may lie between neighbours: to skip more is worth a request."""

THREADS: Final = max(64, READ_BYTES // BLOCK_BYTES)
"""That wait for answers, at most."""


class BucketSource:
    """Stored chunks from the data files of a run in a bucket."""

    def __init__(
        self, root: BucketRoot, pool: str, manifest: Manifest, *, name: str
    ) -> None:
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
        self._turns = threading.BoundedSemaphore(PROCESSORS)
        self.budget = Budget(BUFFER_BYTES, read_bytes=READ_BYTES)

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = self._planned(ordinals, assembly)
        threads = min(THREADS, self._root.storage.concurrency)
        take = partial(self._take, assembly)
        self.budget.work_off(reads, take, assembly, threads=threads)

    def _planned(self, ordinals: Sequence[int], assembly: Assembly) -> list[Read]:
        del assembly  # all are copied, wherever they go
        return planned(
            self._manifest,
            alone=np.empty(0, np.int64),
            together=np.array(ordinals, np.int64),
            at_most=BLOCK_BYTES,
            gap_bytes=GAP_BYTES,
        )

    def _take(self, assembly: Assembly, read: Read) -> int:
        """Does a read; returns the bytes that were handed over."""
        with assembly.meter.part(read.file):
            with assembly.meter.phase("read"):
                data = self._bytes(read, assembly)
            with self._turns:
                memory: Bytes = np.frombuffer(data, np.uint8)
                return unpack(read, memory, assembly)

    def _bytes(self, read: Read, assembly: Assembly) -> bytes:
        def check() -> None:
            if self.budget.is_stopped:
                raise StoppedError
            assembly.check_time()

        what = f"restore of {self._name}: data file {read.file}"
        try:
            return self._root.read_range(
                f"{self._pool}{read.file}",
                read.start,
                read.stop,
                Waiting(what, check),
            )
        except DataLossError as e:
            named = describe(self._manifest, read)
            raise DataLossError(f"{self._name} {named}: {e}", reason=e.reason) from e
        except UnavailableError as e:
            if not e.reason:  # it took longer than the restore may
                raise
            raise UnavailableError(
                f"restore of {self._name}: {e}; {assembly.outstanding}", reason=e.reason
            ) from e
