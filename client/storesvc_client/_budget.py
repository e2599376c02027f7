"""The budget of a restore: how many bytes it may have on their way at once.

Threads take their work here. Who takes work that begins new buffers waits until those
fit beside all that were begun and are not handed over; but never where nobody else is
at work, for then nobody would make room: a leaf that is larger than the budget is on
its way alone.
"""

import threading
from collections.abc import Iterator

from storesvc.format.reads import Read
from storesvc_client._receiving import Assembly


class Budget:
    """The bytes of buffers that are begun and not handed over, and who may begin
    more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._running = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self.is_stopped = False
        """Whether a thread failed, so that the others shall end."""
        self.peak_bytes = 0
        """The most that was held at once."""

    def take(self, work: Iterator[Read], assembly: Assembly) -> Read | None:
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
                        not self._running
                        or self._bytes + needed <= self._limit
                        or self.is_stopped
                    )
                )
                if self.is_stopped:
                    return None
                self._bytes += needed
                self.peak_bytes = max(self.peak_bytes, self._bytes)
                self._running += 1
        return read

    def give_back(self, freed: int) -> None:
        """Tells that a read is done, and handed over so many bytes."""
        with self._changed:
            self._bytes -= freed
            self._running -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Lets all threads end, and returns once none is at work: a thread that
        Ctrl-C met at its start is joined by nobody."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)
