"""Extent pool: the bounded host memory of a transfer, whose buffers have any sizes.

All buffers are ranges of one mapping, and each is the lowest that is free. So memory
that was written is used again at once, whatever the sizes; the first use of a page
takes the kernel as long as a copy into it. A ``StagingPool`` keeps buffers by their
size, which serves the next save of the same tree, and a transfer has none.
"""

import threading
from collections.abc import Callable

from storesvc_client._chunks.staging_pool import ALIGNMENT, Bytes, buffers_of


class ExtentPool:
    """Buffers of at most ``budget_bytes`` in total, or one larger one. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._memory: Bytes | None = None
        self._free = [(0, budget_bytes)]
        """Start and stop of the free ranges, ascending, none next to another."""
        self._used: dict[int, tuple[int, int]] = {}
        """Range of each buffer by its address. That of the larger one begins at the end
        of the mapping."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers in use."""
        with self._changed:
            return sum(stop - start for start, stop in self._used.values())

    def take(
        self, size: int, *, cancelled: Callable[[], bool], waiting: Callable[[], None]
    ) -> "Bytes | None":
        """See ``StagingPool.take``."""
        with self._changed:
            while not cancelled():
                buffer = self.take_now(size)
                if buffer is not None:
                    return buffer
                waiting()
                self._changed.wait()
        return None

    def take_now(self, size: int) -> "Bytes | None":
        """Returns a buffer; None if there is no room for it at present."""
        needed = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        with self._changed:
            if any(start >= self.budget_bytes for start, _ in self._used.values()):
                return None
            for at, (start, stop) in enumerate(self._free):
                if stop - start >= needed:
                    left = (start + needed, stop)
                    self._free[at : at + 1] = [left] if left[0] < stop else []
                    return self._buffer(start, needed)[:size]
            if needed > self.budget_bytes and not self._used:
                (buffer,) = buffers_of(size, 1)
                start = self.budget_bytes
                self._used[buffer.ctypes.data] = (start, start + needed)
                return buffer
        return None

    def give_back(self, buffer: Bytes) -> None:
        """Returns a buffer to the pool."""
        with self._changed:
            start, stop = self._used.pop(buffer.ctypes.data)
            if start < self.budget_bytes:
                self._release(start, stop)
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes waiting threads check again whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """Frees the memory as soon as no buffer is in use."""
        with self._changed:
            self._memory = None

    def _buffer(self, start: int, size: int) -> "Bytes":
        if self._memory is None:
            (self._memory,) = buffers_of(self.budget_bytes, 1)
        buffer = self._memory[start : start + size]
        self._used[buffer.ctypes.data] = (start, start + size)
        return buffer

    def _release(self, start: int, stop: int) -> None:
        """Adds a range to the free ones; joins it with its neighbours."""
        at = next(
            (i for i, (other, _) in enumerate(self._free) if other > start),
            len(self._free),
        )
        first = last = at
        if at and self._free[at - 1][1] == start:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == stop:
            last, stop = at + 1, self._free[at][1]
        self._free[first:last] = [(start, stop)]
