"""Staging pool: the bounded host memory that saves copy chunks into, reused.

Buffers return to the pool as their chunks are written and serve the chunks that follow.
Those left after a save serve the next one, whose chunks have the same sizes, because
touching new memory costs more than the copy into it.
"""

import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    # NumPy is imported late: commands that only list checkpoints do not need it
    import numpy as np
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

ALIGNMENT: Final = 64
"""Alignment of buffers in bytes, so that no element crosses a cache line."""

MAPPED_BYTES: Final = 64 << 20
"""Maximum bytes of buffers allocated in one mapping."""

MAX_MAPPED: Final = 16
"""Maximum buffers allocated in one mapping."""

BATCH_BYTES: Final = 64 << 20
"""Bytes of a stream after which a server stores and acknowledges them; with less, it
does so after some seconds."""

STREAM_BYTES: Final = 2 * BATCH_BYTES
"""Memory that one stream needs to send a batch while the previous one is stored."""

MIN_BUDGET_BYTES: Final = STREAM_BYTES
"""Smallest staging memory of a client."""


class StagingPool:
    """Buffers of at most ``budget_bytes`` in total. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = 0
        self._used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        with self._changed:
            return self._free_bytes + self._used_bytes

    def take(
        self, size: int, *, cancelled: Callable[[], bool], waiting: Callable[[], None]
    ) -> "Bytes | None":
        """Waits for a free buffer and returns it.

        Args:
            size: Size in bytes.
            cancelled: Returns whether the caller no longer needs it; checked after
                each ``wake``.
            waiting: Called before each wait.

        Returns:
            The buffer, with arbitrary contents; None if cancelled.
        """
        with self._changed:
            while not cancelled():
                buffer = self.take_now(size)
                if buffer is not None:
                    return buffer
                waiting()
                self._changed.wait()
        return None

    def take_now(self, size: int) -> "Bytes | None":
        """Returns a buffer of a size in bytes; None if there is no room for it at
        present."""
        with self._changed:
            if not (self._free.get(size) or self._grow(size)):
                return None
            self._free_bytes -= size
            self._used_bytes += size
            return self._free[size].pop()

    def give_back(self, buffer: Bytes) -> None:
        """Returns a buffer to the pool."""
        with self._changed:
            self._used_bytes -= len(buffer)
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes waiting threads check again whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """Frees the buffers that are not in use."""
        with self._changed:
            self._free.clear()
            self._free_bytes = 0

    def _grow(self, size: int) -> bool:
        """Allocates buffers of a size, several in one mapping; returns False if there
        is no room for one."""
        self._make_room(size)
        room = self.budget_bytes - self._free_bytes - self._used_bytes
        if room < size and self._used_bytes:
            return False
        count = max(1, min(room, MAPPED_BYTES) // size)
        self._free[size] = buffers_of(size, min(count, MAX_MAPPED))
        self._free_bytes += size * len(self._free[size])
        return True

    def _make_room(self, size: int) -> None:
        """Frees buffers of other sizes as far as one buffer of this size needs."""
        while self._free and (
            self._free_bytes + self._used_bytes + size > self.budget_bytes
        ):
            other, buffers = next(iter(self._free.items()))
            if buffers:
                _release(buffers.pop())
                self._free_bytes -= other
            if not buffers:
                del self._free[other]


def buffers_of(size: int, count: int) -> "list[Bytes]":
    """Returns buffers in new memory, in huge pages if the kernel provides them.

    They share one mapping, because the kernel aligns only large ones to huge pages; it
    is private, because the first touch of a shared one costs four times as much.
    """
    import numpy as np

    apart = -(-size // ALIGNMENT) * ALIGNMENT
    private: Any = mmap.mmap(
        -1, apart * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        private.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(private, np.uint8)
    return [memory[at : at + size] for at in range(0, apart * count, apart)]


def _release(buffer: "Bytes") -> None:
    """Returns the pages of a buffer to the system; other buffers keep its mapping."""
    memory: Any = buffer.base
    mapping: mmap.mmap = memory.base.obj  # through the memoryview that NumPy made
    first = buffer.ctypes.data - memory.ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        mapping.madvise(mmap.MADV_DONTNEED, start, length)
