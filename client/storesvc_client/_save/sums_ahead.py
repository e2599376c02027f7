"""Computes checksums of slabs before any of them can be stored.

A save to a bucket waits for several requests of its server before it may store the
first chunk. Its processors are idle until then, and its data would wait for their
checksums afterwards, so they are computed in the meantime.
"""

import os
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self

from storesvc.storage.threads import Threads
from storesvc_client._chunks.slabs import SumsInProgress
from storesvc_client._save.slab_queue import SlabQueue
from storesvc_client._values.progress import Meter

SUM_THREADS: Final = min(os.cpu_count() or 1, 8)
"""Threads that compute checksums."""


class SumsAhead:
    """Computes the checksums of the slabs of a queue inside its context.

    A slab is out of the queue while a thread reads it, and no thread reads any after
    the context: its memory belongs to the writers then.
    """

    def __init__(self, slab_queue: SlabQueue, sums: SumsInProgress, meter: Meter):
        """Creates it; entering its context starts the threads.

        Args:
            slab_queue: Queue that no writer reads yet.
            sums: Checksums of all chunks, filled in here.
            meter: Measures phases.
        """
        self._slab_queue = slab_queue
        self._sums = sums
        self._meter = meter
        self._is_stopped = False
        self._threads = Threads(SUM_THREADS, "storesvc-sums")
        self._working: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._working = [self._threads.submit(self._work) for _ in range(SUM_THREADS)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._slab_queue.changed:
            self._is_stopped = True
            self._slab_queue.changed.notify_all()
        self._threads.shutdown()
        if error is None:
            for one in self._working:
                one.result()

    def _work(self) -> None:
        while filled := self._slab_queue.take_ahead(lambda: self._is_stopped):
            try:
                filled.sum_up(self._sums, self._meter)
            finally:
                self._slab_queue.put_back(filled)
