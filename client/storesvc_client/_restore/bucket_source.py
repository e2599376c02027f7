"""Stored chunks from the data files of a bucket that this process reads by itself.

A request to a bucket takes some 30 ms before its first byte, and then moves some
50 MB/s, whatever the network. So neighbours are read together, gaps included that cost
less than another request, and many requests are under way at a time.

One thread asks, and asks again where no answer comes. As many as there are processors
take what was answered, check it, and copy it to where it goes: more would only wait for
one another.
"""

import os
import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from storesvc.format.manifests import Manifest
from storesvc.format.reads import Read
from storesvc_client._chunks.buffer_layout import Bytes
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.chunk_decoder import unpack
from storesvc_client._restore.memory_budget import Budget
from storesvc_client._restore.read_plan import describe, planned
from storesvc_client._storage.bucket import AskedRange, BucketRoot
from storesvc_client.errors import DataLossError, UnavailableError

PROCESSORS: Final = min(os.cpu_count() or 1, 8)

BUFFER_BYTES: Final = 512 << 20
"""Of buffers that are begun and not handed over ..."""

READ_BYTES: Final = min(PROCESSORS, 4) * (128 << 20)
"""... and of reads that are under way beside them: as much as a processor checks and
copies while a request takes its time. More would only be memory that is touched for
the first time, which costs as much as a copy."""

BLOCK_BYTES: Final = 4 << 20
"""Of neighbours that are read together. Larger ones would waste less of the time of a
request, but there is room for fewer of them, and all in all less would move."""

GAP_BYTES: Final = 128 << 10
"""What may lie between neighbours: to skip more is worth a request."""

LOOK_SECONDS: Final = 0.05
"""How often it is looked which reads are due to be asked again."""


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
        self.budget = Budget(BUFFER_BYTES, read_bytes=READ_BYTES)

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        with assembly.meter.phase("plan"):
            reads = self._planned(ordinals, assembly)
        with ThreadPoolExecutor(PROCESSORS, "storesvc-direct") as pool:
            _Restore(self, assembly).run(deque(reads), pool)

    def ask(self, read: Read, answers: "queue.SimpleQueue[Any]") -> AskedRange:
        """Asks for a read."""
        return self._root.ask_range(
            f"{self._pool}{read.file}",
            read.start,
            read.stop,
            what=f"restore of {self._name}: data file {read.file}",
            answers=answers,
        )

    @property
    def at_once(self) -> int:
        """How many reads may be under way."""
        return self._root.storage.concurrency

    def take(self, read: Read, asked: AskedRange, assembly: Assembly) -> int:
        """Takes what was answered to a read; returns the bytes that were handed over.

        Raises:
            DataLossError: It is missing, or not what was saved.
            UnavailableError: There was no answer; lists what is outstanding.
        """
        named = describe(self._manifest, read)
        try:
            answer = asked.result()
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
        asked = self.ask(replace(read, start=start, stop=stop), answers)
        try:
            while not asked.is_settled:
                asked.await_answer(at_most=LOOK_SECONDS)
            answer = asked.result()
        finally:
            asked.end()
        return np.frombuffer(answer.value, np.uint8)

    def _planned(self, ordinals: Sequence[int], assembly: Assembly) -> list[Read]:
        del assembly  # all are copied, wherever they go
        return planned(
            self._manifest,
            alone=np.empty(0, np.int64),
            together=np.array(ordinals, np.int64),
            at_most=BLOCK_BYTES,
            gap_bytes=GAP_BYTES,
        )


class _Restore:
    """The reads of one restore that are under way."""

    def __init__(self, source: BucketSource, assembly: Assembly) -> None:
        self._source = source
        self._assembly = assembly
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Answers to reads; None: one was taken."""
        self._asked: dict[AskedRange, Read] = {}
        self._taken: list[tuple[Read, Future[int]]] = []
        """What was answered, and is being taken."""
        self._parts: dict[Read, ExitStack] = {}
        """The time that each takes."""
        self._look_at = 0.0

    def run(self, reads: deque[Read], pool: ThreadPoolExecutor) -> None:
        """Does all reads, in their order."""
        try:
            while reads or self._asked or self._taken:
                while reads and self._may_ask(reads[0]):
                    self._ask(reads.popleft())
                self._await(pool)
                self._end_taken()
                self._assembly.check_time()
        except BaseException:  # one failed, or Ctrl-C: the others must not go on
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for asked in self._asked:
                asked.end()
            for part in self._parts.values():
                part.close()

    def _may_ask(self, read: Read) -> bool:
        return len(self._asked) < self._source.at_once and (
            self._source.budget.may_begin(read, self._assembly)
        )

    def _ask(self, read: Read) -> None:
        part = self._parts[read] = ExitStack()
        part.enter_context(self._assembly.meter.part(read.file))
        self._asked[self._source.ask(read, self._events)] = read

    def _await(self, pool: ThreadPoolExecutor) -> None:
        """Waits until something is to be done, and does it."""
        try:
            with self._assembly.meter.phase("read"):
                event = self._events.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            event = None
        if event is not None:
            asked, answer = event
            asked.take(answer)
            self._settle(asked, pool)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            for asked in list(self._asked):
                asked.step()
                self._settle(asked, pool)

    def _settle(self, asked: AskedRange, pool: ThreadPoolExecutor) -> None:
        """Has a read be taken, if its result is known."""
        if not asked.is_settled or asked not in self._asked:
            return
        read = self._asked.pop(asked)
        asked.end()
        taking = pool.submit(self._source.take, read, asked, self._assembly)
        taking.add_done_callback(lambda _: self._events.put(None))
        self._taken.append((read, taking))

    def _end_taken(self) -> None:
        """Ends those that are taken.

        Raises:
            StoreError: One could not be.
        """
        ended = [(read, taking) for read, taking in self._taken if taking.done()]
        self._taken = [one for one in self._taken if one not in ended]
        for read, taking in ended:
            self._parts.pop(read).close()
            self._source.budget.give_back(read, taking.result())
