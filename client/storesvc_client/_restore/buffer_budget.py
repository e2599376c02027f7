"""The budget of a restore for buffers, and the threads that share it.

A thread that takes a read which needs new buffers allocates them, and then waits until
all buffers that are allocated and not handed over fit into the budget; so the bound is
exceeded by the buffers of one read at most. If no other read is in progress it does not
wait, because nothing would free memory: a leaf larger than the budget is read alone.

Reads whose bytes are copied from a response have a limit of their own for the bytes in
flight.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from storesvc.format.chunks import Read
from storesvc_client._restore.assembly import Assembly

BUDGET_BYTES: Final = 1 << 30
"""Maximum bytes of buffers of a restore that are allocated and not handed over."""

POLL_SECONDS: Final = 0.2
"""Interval at which timeouts of reads are checked."""

STOP_SECONDS: Final = 5.0
"""Maximum wait for reads in progress to end after one has failed."""

_NAME: Final = "storesvc-direct"


class BufferBudget:
    """Limits the bytes of allocated buffers and of reads in flight."""

    def __init__(self, limit: int, *, read_bytes: int | None = None) -> None:
        """Creates an unused budget.

        Args:
            limit: Maximum bytes of buffers.
            read_bytes: Maximum bytes of reads in flight; None if reads go directly
                into buffers.
        """
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
            reads: The reads.
            take: Performs one read; returns the bytes of the buffers handed over.
            assembly: Assembly of the buffers.
            threads: Maximum reads in progress.
            check: Called at intervals; raises an error if a timeout has passed.
        """
        if not reads:
            return
        threads, work = min(threads, len(reads)), iter(reads)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._work(work, take, assembly)
            except BaseException as e:  # noqa: BLE001 - raised by the waiting thread
                ended.put(e)
            else:
                ended.put(None)

        try:
            for _ in range(threads):
                threading.Thread(target=run, name=_NAME, daemon=True).start()
            while threads:
                try:
                    error = ended.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    check()
                    continue
                if error is not None:
                    raise error
                threads -= 1
        except BaseException:  # one failed, or Ctrl-C: stop the others
            self._stop()
            raise

    def _work(
        self, work: Iterator[Read], take: Callable[[Read], int], assembly: Assembly
    ) -> None:
        """Performs reads until none is left or another thread has failed."""
        while (read := self._take(work, assembly)) is not None:
            freed = 0
            try:
                freed = take(read)
            finally:
                self.give_back(read, freed)

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

    def _stop(self) -> None:
        """Stops all threads; waits until no read is in progress, at most some
        seconds."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, STOP_SECONDS)
