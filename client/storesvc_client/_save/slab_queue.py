"""The slabs of a save on their way from the snapshot to the store.

The snapshot puts filled slabs into a queue and ends it; writers take them. When the
snapshot waits for memory and the queue is empty, waiting writers get a
``StarvedError``, because the memory they hold blocks the snapshot. If writing fails,
the queue is cancelled: the snapshot stops, and the queued slabs return to the staging
pool. If the snapshot fails, the writers raise its error.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Final

from storesvc_client._chunks.slabs import FilledSlab, Slab
from storesvc_client._chunks.staging_pool import Bytes, StagingPool

POLL_SECONDS: Final = 0.05
"""Interval at which a thread waiting for a slab checks whether the snapshot waits for
memory."""

_AT_ONCE: Final = 16
"""Maximum slabs in one request for the chunks that the store lacks."""

Choose = Callable[[Sequence[FilledSlab]], None]
"""Removes the chunks that need not be stored from each slab's ``wanted``."""


class StarvedError(Exception):
    """The queue is empty and the snapshot waits for memory."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        """Number of times the snapshot has waited so far."""


class SlabQueue:
    """FilledSlab slabs in first-in, first-out order."""

    def __init__(self, staging: StagingPool, *, is_open: bool = False) -> None:
        """Creates an empty queue.

        Args:
            staging: Memory of the slabs.
            is_open: Whether writers may start at once.
        """
        self._staging = staging
        self._queue: queue.SimpleQueue[FilledSlab | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        """Error of the snapshot."""
        self._starved = 0
        """Number of times the snapshot has waited for memory."""
        self._cancelled = threading.Event()
        self._opened = threading.Event()
        """Set when writers may start: earlier they would compete for processors and
        memory with the snapshot, which the caller waits for."""
        if is_open:
            self._opened.set()

    @property
    def budget_bytes(self) -> int:
        """Memory limit of the staging pool."""
        return self._staging.budget_bytes

    @property
    def is_cancelled(self) -> bool:
        """True once no slab will be taken any more."""
        return self._cancelled.is_set()

    def buffer(self, slab: Slab) -> "Bytes | None":
        """Waits for memory for a slab and returns it; None if cancelled."""
        return self._staging.take(
            slab.size, cancelled=self._cancelled.is_set, waiting=self._starve
        )

    def _starve(self) -> None:
        self._starved += 1
        self._opened.set()

    def give_back(self, filled: FilledSlab) -> None:
        """Returns the memory of a stored slab to the staging pool."""
        if filled.buffer is not None:
            self._staging.give_back(filled.buffer)

    def drop(self, buffer: Bytes) -> None:
        """Returns memory that was not filled to the staging pool."""
        self._staging.give_back(buffer)

    def put(self, filled: FilledSlab) -> None:
        """Appends a slab."""
        self._queue.put(filled)
        if self.is_cancelled:
            self._empty()

    def end(self) -> None:
        """Marks the end of the queue."""
        self._queue.put(None)
        self._opened.set()

    def fail(self, error: BaseException) -> None:
        """Cancels the queue because the snapshot failed; its slabs are discarded.

        Writers do not re-raise an interruption of the snapshot's thread, such as
        Ctrl-C; they raise ``CancelledError``.
        """
        if not isinstance(error, Exception):
            error = CancelledError("the save was interrupted")
        self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Cancels the queue: no slab is taken any more."""
        self._cancelled.set()
        self._opened.set()
        self._staging.wake()
        self._empty()

    def check(self) -> None:
        """Raises the error of the snapshot, if it failed.

        Raises:
            Exception: The snapshot's error.
        """
        if self._error is not None:
            raise self._error

    def take(self, *, starved: float = math.inf) -> FilledSlab | None:
        """Waits for the next slab and returns it; None after the last.

        Args:
            starved: Waits of the snapshot that the caller has already reacted to.

        Raises:
            StarvedError: The queue is empty and the snapshot has waited more often.
            Exception: The snapshot's error.
        """
        self._opened.wait()
        found = self._next(starved)
        if self._error is not None:
            if found is not None:
                self.give_back(found)
            self._empty()
            raise self._error
        if found is None:
            self._queue.put(None)  # the other writers must see the end, too
        return found

    def check_starved(self, starved: float) -> None:
        """Checks whether the snapshot has waited for memory.

        Raises:
            StarvedError: It has waited more than `starved` times.
        """
        if self._starved > starved:
            raise StarvedError(self._starved)

    def _next(self, starved: float) -> FilledSlab | None:
        while True:
            with suppress(queue.Empty):
                return self._queue.get(timeout=POLL_SECONDS)
            self.check_starved(starved)

    def take_more(self) -> FilledSlab | None:
        """Returns the next slab without waiting; None if there is none."""
        try:
            found = self._queue.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            self._queue.put(None)
        return found

    def _empty(self) -> None:
        with suppress(queue.Empty):
            while True:
                found = self._queue.get_nowait()
                if found is not None:
                    self.give_back(found)
        self._queue.put(None)  # for threads that wait in take()


class WantedSlabs:
    """The slabs of a queue that hold chunks the store lacks. Thread-safe."""

    def __init__(self, slab_queue: SlabQueue, choose: Choose) -> None:
        self._slab_queue = slab_queue
        self._choose = choose
        self._lock = threading.Lock()
        self._chosen: deque[FilledSlab] = deque()

    def take(self, *, starved: float = math.inf) -> FilledSlab | None:
        """Waits for the next slab and returns it; None after the last.

        Args:
            starved: See ``SlabQueue.take``.

        Raises:
            StarvedError: There is no slab, and the snapshot waits for memory.
            Exception: The snapshot's error.
        """
        # threads that wait for the lock must notice a starved snapshot, too
        while not self._lock.acquire(timeout=POLL_SECONDS):
            self._slab_queue.check_starved(starved)
        try:
            while not self._chosen:
                first = self._slab_queue.take(starved=starved)
                if first is None:
                    return None
                self._chosen += self._choose_of(first)
            return self._chosen.popleft()
        finally:
            self._lock.release()

    def taker(self) -> Callable[[], FilledSlab | None]:
        """Returns a ``take`` that reports each wait of the snapshot once."""
        starved = 0

        def take() -> FilledSlab | None:
            nonlocal starved
            try:
                return self.take(starved=starved)
            except StarvedError as e:
                starved = e.times
                raise

        return take

    def drop(self) -> None:
        """Returns the memory of slabs that no writer took."""
        with self._lock:
            while self._chosen:
                self._slab_queue.give_back(self._chosen.popleft())

    def _choose_of(self, first: FilledSlab) -> list[FilledSlab]:
        """Returns the queued slabs that hold chunks to be stored."""
        some = [first]
        while (
            len(some) < _AT_ONCE and (more := self._slab_queue.take_more()) is not None
        ):
            some.append(more)
        try:
            self._choose(some)
        except BaseException:
            for filled in some:
                self._slab_queue.give_back(filled)
            raise
        for filled in some:
            if not filled.wanted:
                self._slab_queue.give_back(filled)
        return [filled for filled in some if filled.wanted]
