"""Staging: the host memory that saves copy chunks into, bounded and used again.

What a save took comes back as its chunks are written, and serves the chunks that
follow; what is left of a save serves the next one, whose chunks have the same sizes:
memory that was never touched before costs more than the copy into it.
"""

import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    # what only lists checkpoints need not wait for NumPy
    import numpy as np
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

ALIGNMENT: Final = 64
"""Bytes; of buffers, so that no element lies across two lines of a cache."""

MAPPED_BYTES: Final = 64 << 20
"""Buffers are made so many at a time."""

MAX_MAPPED: Final = 16

BATCH_BYTES: Final = 64 << 20
"""That a server takes of a stream before it stores and acknowledges it; of a stream
that brings less it does so after seconds."""

STREAM_BYTES: Final = 2 * BATCH_BYTES
"""What a stream needs, so that it can bring a batch while the one before is stored."""

MIN_BUDGET_BYTES: Final = STREAM_BYTES


class Staging:
    """Buffers of at most so many bytes together. Threads may share it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = 0
        self._used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        with self._changed:
            return self._free_bytes + self._used_bytes

    def take(
        self, size: int, *, given_up: Callable[[], bool], waiting: Callable[[], None]
    ) -> "Bytes | None":
        """Returns a buffer, once there is one.

        Args:
            size: Its bytes.
            given_up: Whether nobody wants it any more; asked after each ``wake``.
            waiting: Called before it waits for others to give some back.

        Returns:
            The buffer, with what an earlier one left in it; None: given up.
        """
        with self._changed:
            while not given_up():
                if self._free.get(size) or self._grow(size):
                    self._free_bytes -= size
                    self._used_bytes += size
                    return self._free[size].pop()
                waiting()
                self._changed.wait()
        return None

    def give_back(self, buffer: Bytes) -> None:
        """Takes a buffer back."""
        with self._changed:
            self._used_bytes -= len(buffer)
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets those who wait ask again whether they still want to."""
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """Frees what is not in use."""
        with self._changed:
            self._free.clear()
            self._free_bytes = 0

    def _grow(self, size: int) -> bool:
        """Makes buffers of a size, several in one mapping; returns whether there was
        room for one."""
        self._make_room(size)
        room = self.budget_bytes - self._free_bytes - self._used_bytes
        if room < size and self._used_bytes:
            return False
        count = max(1, min(room, MAPPED_BYTES) // size)
        self._free[size] = buffers_of(size, min(count, MAX_MAPPED))
        self._free_bytes += size * len(self._free[size])
        return True

    def _make_room(self, size: int) -> None:
        """Frees buffers of other sizes, as far as one of this size needs it."""
        while self._free and (
            self._free_bytes + self._used_bytes + size > self.budget_bytes
        ):
            other, buffers = next(iter(self._free.items()))
            if buffers:
                _forget(buffers.pop())
                self._free_bytes -= other
            if not buffers:
                del self._free[other]


def buffers_of(size: int, count: int) -> "list[Bytes]":
    """Returns buffers in fresh memory, in huge pages where the kernel gives them.

    In one mapping, because it aligns only large ones to huge pages; in a private one,
    because the first touch of a shared one costs four times as much.
    """
    import numpy as np

    apart = -(-size // ALIGNMENT) * ALIGNMENT
    private: Any = mmap.mmap(
        -1, apart * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):  # of Linux
        private.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(private, np.uint8)
    return [memory[at : at + size] for at in range(0, apart * count, apart)]


def _forget(buffer: "Bytes") -> None:
    """Gives the pages of a buffer back, whose mapping stays while others use it."""
    memory: Any = buffer.base
    mapping: mmap.mmap = memory.base.obj  # of the memoryview that NumPy made
    first = buffer.ctypes.data - memory.ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        mapping.madvise(mmap.MADV_DONTNEED, start, length)
