"""Reads stored chunks from data files in a bucket.

A request to a bucket takes about 30 ms until its first byte and then moves about
50 MB/s, whatever the network. So neighbouring chunks are read together, including gaps
that cost less than another request, and many requests are in flight at a time.

One thread sends the requests and hedges or repeats late ones. One thread per processor
verifies the responses and copies them into buffers; more would only wait for each
other.
"""

import os
import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from storesvc.format.chunks import Read
from storesvc.format.manifests import Manifest
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffers import Bytes
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.data_file_reads import (
    BufferBudget,
    describe,
    plan_file_reads,
    unpack,
)
from storesvc_client._storage.bucket import BucketRoot, RangeRead
from storesvc_client.errors import DataLossError, UnavailableError

PROCESSORS: Final = min(os.cpu_count() or 1, 8)
"""Threads that verify and copy responses."""

BUFFER_BYTES: Final = 512 << 20
"""Maximum bytes of buffers that are allocated and not handed over."""

READ_BYTES: Final = min(PROCESSORS, 4) * (128 << 20)
"""Maximum bytes of reads in flight, in addition to the buffers: what a processor
verifies and copies during one request. More would only touch more new memory, which
costs as much as a copy."""

BUCKET_BLOCK_BYTES: Final = 4 << 20
"""Maximum bytes of neighbouring chunks that one request reads. A larger block amortises
the latency of a request better, but fewer fit into the budget, and throughput falls."""

GAP_BYTES: Final = 128 << 10
"""Largest gap between neighbours that is read too; skipping more is worth a request."""

POLL_SECONDS: Final = 0.05
"""Interval at which late reads are hedged or repeated."""


class BucketSource:
    """Reads stored chunks from the data files of a run in a bucket."""

    def __init__(
        self, root: BucketRoot, pool: str, manifest: Manifest, *, name: str
    ) -> None:
        """Creates the source; nothing is read yet.

        Args:
            root: Root of the store.
            pool: Prefix of the run's data files.
            manifest: Manifest of the checkpoint.
            name: Name of the checkpoint in messages.
        """
        self._root = root
        self._pool = pool
        self._manifest = manifest
        self._name = name
        self.budget = BufferBudget(BUFFER_BYTES, read_bytes=READ_BYTES)

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = plan_file_reads(
                self._manifest,
                alone=np.empty(0, np.int64),  # a response must be copied in any case
                together=np.array(ordinals, np.int64),
                at_most=BUCKET_BLOCK_BYTES,
                gap_bytes=GAP_BYTES,
            )
        with Threads(PROCESSORS, "storesvc-direct") as pool:
            _Restore(self, assembly).run(deque(reads), pool)

    def start(self, read: Read, answers: "queue.SimpleQueue[Any]") -> RangeRead:
        """Starts a read; its responses arrive in `answers`."""
        return self._root.start_read(
            f"{self._pool}{read.file}",
            read.start,
            read.stop,
            what=f"restore of {self._name}: data file {read.file}",
            answers=answers,
        )

    @property
    def at_once(self) -> int:
        """Maximum reads in flight."""
        return self._root.storage.concurrency

    def take(self, read: Read, call: RangeRead, assembly: Assembly) -> int:
        """Verifies and copies the response to a read; returns the bytes of the buffers
        handed over.

        Raises:
            DataLossError: The data file is missing or corrupt.
            UnavailableError: There was no response; lists the missing chunks.
        """
        named = describe(self._manifest, read)
        try:
            answer = call.result()
        except DataLossError as e:
            raise DataLossError(f"{self._name} {named}: {e}", reason=e.reason) from e
        except UnavailableError as e:
            raise UnavailableError(
                f"restore of {self._name}: {e}; {assembly.outstanding}", reason=e.reason
            ) from e
        if answer.state != "value":
            raise DataLossError(
                f"{self._name} {named}: data file {self._root}/{self._pool}{read.file} "
                "is missing; use another checkpoint",
                reason="CORRUPT_DATA",
            )
        memory: Bytes = np.frombuffer(answer.value, np.uint8)
        return unpack(read, memory, assembly, partial(self._again, read))

    def _again(self, read: Read, start: int, stop: int) -> Bytes:
        """Reads bytes of a data file a second time."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = self.start(replace(read, start=start, stop=stop), answers)
        try:
            while not call.is_settled:
                call.await_answer(at_most=POLL_SECONDS)
            answer = call.result()
        finally:
            call.end()
        return np.frombuffer(answer.value, np.uint8)


class _Restore:
    """The reads in flight of one restore."""

    def __init__(self, source: BucketSource, assembly: Assembly) -> None:
        self._source = source
        self._assembly = assembly
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Responses to reads; None after a response was processed."""
        self._in_flight: dict[RangeRead, Read] = {}
        self._taken: list[tuple[Read, Future[int]]] = []
        """Reads whose response is being processed."""
        self._parts: dict[Read, ExitStack] = {}
        """Time measurement of each read."""
        self._next_check = 0.0

    def run(self, reads: deque[Read], pool: Threads) -> None:
        """Performs the reads in the given order."""
        try:
            while reads or self._in_flight or self._taken:
                while (
                    reads
                    and len(self._in_flight) < self._source.at_once
                    and self._source.budget.may_begin(reads[0], self._assembly)
                ):
                    self._start(reads.popleft())
                self._await(pool)
                self._end_taken()
                self._assembly.check_time()
        except BaseException:  # one failed, or Ctrl-C: stop the others
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for call in self._in_flight:
                call.end()
            self._taken.clear()  # their callbacks refer to this object
            for part in self._parts.values():
                part.close()

    def _start(self, read: Read) -> None:
        part = self._parts[read] = ExitStack()
        part.enter_context(self._assembly.meter.part(read.file))
        self._in_flight[self._source.start(read, self._events)] = read

    def _await(self, pool: Threads) -> None:
        """Waits for the next event or the next check of late reads, and handles it."""
        try:
            with self._assembly.meter.phase("read"):
                event = self._events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            event = None
        if event is not None:
            call, answer = event
            call.take(answer)
            self._settle(call, pool)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + POLL_SECONDS
            for call in list(self._in_flight):
                call.step()
                self._settle(call, pool)

    def _settle(self, call: RangeRead, pool: Threads) -> None:
        """Submits the response of a settled read to the thread pool."""
        if not call.is_settled or call not in self._in_flight:
            return
        read = self._in_flight.pop(call)
        call.end()
        taking = pool.submit(self._source.take, read, call, self._assembly)
        taking.add_done_callback(lambda _: self._events.put(None))
        self._taken.append((read, taking))

    def _end_taken(self) -> None:
        """Releases the memory of processed reads.

        Raises:
            StoreError: One of them failed.
        """
        ended = [(read, taking) for read, taking in self._taken if taking.done()]
        self._taken = [one for one in self._taken if one not in ended]
        for read, taking in ended:
            self._parts.pop(read).close()
            self._source.budget.give_back(read, taking.result())
