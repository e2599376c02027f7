"""The budget of a restore: how many bytes it may have on their way at once.

Threads take their work here. Who takes work that begins new buffers waits until those
fit beside all that were begun and are not handed over; but never where nobody else is
at work, for then nobody would make room: a leaf that is larger than the budget is on
its way alone.

Where reads bring bytes that are copied from there, these have a room of their own, for
as long as the read is under way.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from storesvc.format.reads import Read
from storesvc_client._restore.assembly import Assembly

BUDGET_BYTES: Final = 1 << 30
"""Of the buffers of a restore that are begun and not handed over, on each path."""

LOOK_SECONDS: Final = 0.2
"""How often it is looked whether reads take too long."""

STOP_SECONDS: Final = 5.0
"""How long reads under way may take to end where one has failed."""

_NAME: Final = "storesvc-direct"


class Budget:
    """The bytes of buffers that are begun and not handed over, and who may begin
    more."""

    def __init__(self, limit: int, *, read_bytes: int | None = None) -> None:
        """Is all there to be taken.

        Args:
            limit: Bytes of buffers.
            read_bytes: What reads that are under way may bring together; None: they
                read to where it goes.
        """
        self._limit = limit
        self._read_limit = read_bytes
        self._bytes = 0
        self._read_bytes = 0
        self._running = 0
        self._next: Read | None = None
        """What did not fit, and the bytes of the buffers that it begins."""
        self._needed = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self.is_stopped = False
        """Whether a thread failed, so that the others shall end."""
        self.peak_bytes = 0
        """The most that was held at once."""

    def work_off(
        self,
        reads: Sequence[Read],
        take: Callable[[Read], int],
        assembly: Assembly,
        *,
        threads: int,
        check: Callable[[], None],
    ) -> None:
        """Does reads in their order, several at a time. The threads are daemons: a
        process ends without those that a file keeps for ever.

        Args:
            reads: What to read.
            take: Does one, and returns the bytes that it handed over.
            assembly: What the buffers are of.
            threads: How many at a time.
            check: Called now and then; raises an error where it takes too long.
        """
        if not reads:
            return
        threads, work = min(threads, len(reads)), iter(reads)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._work(work, take, assembly)
            except BaseException as e:  # noqa: BLE001 - for the thread that waits
                ended.put(e)
            else:
                ended.put(None)

        try:
            for _ in range(threads):
                threading.Thread(target=run, name=_NAME, daemon=True).start()
            while threads:
                try:
                    error = ended.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    check()
                    continue
                if error is not None:
                    raise error
                threads -= 1
        except BaseException:  # one failed, or Ctrl-C: the others must not go on
            self._stop()
            raise

    def _work(
        self, work: Iterator[Read], take: Callable[[Read], int], assembly: Assembly
    ) -> None:
        """Takes reads until none is left, or another thread failed."""
        while (read := self._take(work, assembly)) is not None:
            freed = 0
            try:
                freed = take(read)
            finally:
                self.give_back(read, freed)

    def may_begin(self, read: Read, assembly: Assembly) -> bool:
        """Returns whether a read fits, and then counts it; for one who does not wait.

        Until it does, it is to be asked for this read again.
        """
        with self._changed:
            if self._next is not read:
                self._next, self._needed = read, assembly.begin(read.chunks)
            if self._running and not self._fits(read, self._needed):
                return False
            self._count(read, self._needed)
            return True

    def _take(self, work: Iterator[Read], assembly: Assembly) -> Read | None:
        """Returns the next read, its buffers begun, once they fit."""
        with self._taking:
            read = None if self.is_stopped else next(work, None)
            if read is None:
                return None
            needed = assembly.begin(read.chunks)
            with self._changed:
                # alone, it would wait for nobody
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
        # what begins nothing makes room
        if needed and self._bytes + needed > self._limit:
            return False
        brought = self._read_bytes + read.stop - read.start
        return self._read_limit is None or brought <= self._read_limit

    def give_back(self, read: Read, freed: int) -> None:
        """Tells that a read is done, and handed over so many bytes."""
        with self._changed:
            self._bytes -= freed
            self._read_bytes -= read.stop - read.start
            self._running -= 1
            self._changed.notify_all()

    def _stop(self) -> None:
        """Lets all threads end, and returns once none is at work, or a file keeps one
        of them."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, STOP_SECONDS)
