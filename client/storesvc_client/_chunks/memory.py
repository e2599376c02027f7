"""Bounded host memory, used again: the first touch of new memory costs more than a copy
into it, because the kernel clears every page.

``StagingPool``: saves copy chunks into its buffers, which return to the pool as their
chunks are written and serve the chunks that follow. Those left after a save serve the
next one, whose chunks have the same sizes.

``ExtentPool``: the buffers of a transfer have any sizes, and there is no next save of
the same tree. All are ranges of one mapping, and each is the lowest that is free, so
memory that was written is used again at once, whatever the sizes.

``BlockPool``: a restore takes blocks that an earlier one has filled. A block is handed
out as a NumPy array; whatever refers to its memory (a view, an array that jax made
without a copy, an export by DLPack) keeps that array alive. So a block is free once its
array is collected, and never before. Free blocks are bounded and unmapped after some
time; in the meantime the kernel may take their pages when memory is short
(``MADV_FREE``).

``cut_batches`` bounds what is read at a time where nothing waits for memory.

``collector_paused`` pauses Python's garbage collector while many long-lived objects are
created. The collector traverses all objects whenever their number has grown by a
quarter: for a tree of 100,000 leaves that takes longer than creating them. The last
pause of all threads that ends restores the collector's state; reference counting
continues. Use it for work of seconds that waits for nothing.

>>> with collector_paused():
...     leaves = [[number] for number in range(100_000)]
"""

import gc
import mmap
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
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


T = TypeVar("T")


def cut_batches(
    things: Iterable[T], size_bytes: Callable[[T], int], limit_bytes: int
) -> Iterator[list[T]]:
    """Cuts things into batches of at most a number of bytes, or of one larger thing."""
    batch, held = list[T](), 0
    for thing in things:
        size = size_bytes(thing)
        if batch and held + size > limit_bytes:
            yield batch
            batch, held = [], 0
        batch.append(thing)
        held += size
    if batch:
        yield batch


class BufferPool:
    """Buffers within a budget, for which threads wait. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()

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
        raise NotImplementedError

    def give_back(self, buffer: Bytes) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """Makes waiting threads check again whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()


class StagingPool(BufferPool):
    """Buffers of at most ``budget_bytes`` in total."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = 0
        self._used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        with self._changed:
            return self._free_bytes + self._used_bytes

    def take_now(self, size: int) -> "Bytes | None":
        with self._changed:
            if not (self._free.get(size) or self._grow(size)):
                return None
            self._free_bytes -= size
            self._used_bytes += size
            return self._free[size].pop()

    def give_back(self, buffer: Bytes) -> None:
        with self._changed:
            self._used_bytes -= len(buffer)
            self._free_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Frees the buffers that are not in use."""
        with self._changed:
            self._free.clear()
            self._free_bytes = 0

    def _grow(self, size: int) -> bool:
        """Allocates buffers of a size, several in one mapping; returns False if there
        is no room for one."""
        while self._free and (
            self._free_bytes + self._used_bytes + size > self.budget_bytes
        ):  # buffers of other sizes make room
            other, buffers = next(iter(self._free.items()))
            if buffers:
                _release(buffers.pop())
                self._free_bytes -= other
            if not buffers:
                del self._free[other]
        room = self.budget_bytes - self._free_bytes - self._used_bytes
        if room < size and self._used_bytes:
            return False
        count = max(1, min(room, MAPPED_BYTES) // size)
        self._free[size] = map_buffers(size, min(count, MAX_MAPPED))
        self._free_bytes += size * len(self._free[size])
        return True


def map_buffers(size: int, count: int) -> "list[Bytes]":
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


class ExtentPool(BufferPool):
    """Buffers of at most ``budget_bytes`` in total, or one larger one."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
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

    def take_now(self, size: int) -> "Bytes | None":
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
                (buffer,) = map_buffers(size, 1)
                start = self.budget_bytes
                self._used[buffer.ctypes.data] = (start, start + needed)
                return buffer
        return None

    def give_back(self, buffer: Bytes) -> None:
        with self._changed:
            start, stop = self._used.pop(buffer.ctypes.data)
            if start < self.budget_bytes:
                self._release(start, stop)
            self._changed.notify_all()

    def clear(self) -> None:
        """Frees the memory as soon as no buffer is in use."""
        with self._changed:
            self._memory = None

    def _buffer(self, start: int, size: int) -> "Bytes":
        if self._memory is None:
            (self._memory,) = map_buffers(self.budget_bytes, 1)
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


class _Pauses:
    """Number of active pauses, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables the collector within the context, or the decorated function."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


COPIED_BYTES: Final = 64 << 10
"""Size below which a copy that XLA makes for lack of alignment costs nothing
measurable."""

HUGE_PAGE_BYTES: Final = 2 << 20

KEPT_SECONDS: Final = 60.0
"""Time after which a free block is unmapped; it may be up to twice as long."""

MAX_WASTE: Final = 8
"""A block serves a request if it is larger by at most one part in this many."""


def allocate(size_bytes: int) -> "Bytes":
    """Returns uninitialised memory, aligned for XLA unless it is small.

    Large memory is a private mapping of huge pages, which takes a fifth of the time to
    allocate and returns to the system when it is dropped.

    Raises:
        MemoryError: There is not enough memory.
    """
    import numpy as np

    if size_bytes < COPIED_BYTES:
        return np.empty(size_bytes, np.uint8)
    if size_bytes >= HUGE_PAGE_BYTES and (mapping := _map_memory(size_bytes)):
        return _align_buffer(
            np.frombuffer(mapping, np.uint8), HUGE_PAGE_BYTES, size_bytes
        )
    return _align_buffer(
        np.empty(size_bytes + ALIGNMENT, np.uint8), ALIGNMENT, size_bytes
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    mapping: mmap.mmap
    since: float
    """Time at which it became free."""


class BlockPool:
    """Large blocks of host memory that are used again. Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        kept_seconds: float = KEPT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates an empty pool; a limit of 0 keeps no free blocks."""
        self._limit_bytes = limit_bytes
        self._kept_seconds = kept_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._free: dict[int, list[_Block]] = defaultdict(list)
        """By size, each list ascending by ``since``."""
        self._free_bytes = 0
        # The collector may end an array in any thread, even in one that has the lock.
        # SimpleQueue.put may be called there, and is all that is. The keeper has a
        # queue of its own: a block that it took, but had not admitted yet, would be
        # missing for the next caller.
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_keeper = False
        end = weakref.finalize(self, self._wakes.put, None)
        end.atexit = False  # the keeper is a daemon

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks."""
        with self._lock:
            self._admit_returned()
            return self._free_bytes

    def take(self, size_bytes: int) -> "Bytes":
        """Returns memory with arbitrary contents, aligned as by ``allocate``."""
        if size_bytes < HUGE_PAGE_BYTES or not self._limit_bytes:
            return allocate(size_bytes)
        mapping = self._take_free(size_bytes) or _map_memory(size_bytes)
        if mapping is None:
            return allocate(size_bytes)
        import numpy as np

        array = np.frombuffer(mapping, np.uint8)
        queues = (self._returned, self._wakes)  # not self, which may end before
        give_back = weakref.finalize(array, _return_block, *queues, mapping)
        give_back.atexit = False
        return _align_buffer(array, HUGE_PAGE_BYTES, size_bytes)

    def clear(self) -> None:
        """Unmaps the free blocks; keeps none from now on."""
        with self._lock:
            self._limit_bytes = 0
            self._admit_returned()
            self._free.clear()
            self._free_bytes = 0

    def _take_free(self, size_bytes: int) -> mmap.mmap | None:
        """Takes the smallest free block that fits."""
        most = _whole(size_bytes) + size_bytes // MAX_WASTE
        with self._lock:
            if not self._has_keeper:
                self._has_keeper = True
                _start_keeper(weakref.ref(self), self._wakes, self._kept_seconds)
            self._admit_returned()
            sizes = (n for n, b in self._free.items() if b and size_bytes <= n <= most)
            if not (size := min(sizes, default=0)):
                return None
            self._free_bytes -= size
            # The one that became free last: the kernel has taken it least probably.
            return self._free[size].pop().mapping

    def tidy(self) -> None:
        """Admits returned blocks, and unmaps what was free for too long."""
        with self._lock:
            self._admit_returned()
            oldest = self._clock() - self._kept_seconds
            for size, blocks in [*self._free.items()]:
                while blocks and blocks[0].since <= oldest:
                    blocks.pop(0)
                    self._free_bytes -= size
                if not blocks:
                    del self._free[size]

    def _admit_returned(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._admit(self._returned.get_nowait())

    def _admit(self, mapping: mmap.mmap) -> None:
        """Makes a block free, or drops it if the limit is reached."""
        size_bytes = len(mapping) - HUGE_PAGE_BYTES
        if self._free_bytes + size_bytes > self._limit_bytes:
            return
        if hasattr(mmap, "MADV_FREE"):  # Linux and macOS
            with suppress(OSError):  # locked memory, for example by mlockall
                mapping.madvise(mmap.MADV_FREE)
        self._free[size_bytes].append(_Block(mapping, self._clock()))
        self._free_bytes += size_bytes


def _return_block(
    returned: "queue.SimpleQueue[mmap.mmap]",
    wakes: "queue.SimpleQueue[None]",
    mapping: mmap.mmap,
) -> None:
    returned.put(mapping)
    wakes.put(None)


def _start_keeper(
    pool: "weakref.ref[BlockPool]", wakes: "queue.SimpleQueue[None]", seconds: float
) -> None:
    """Starts the thread that admits returned blocks at once, and looks for those to
    unmap at an interval; it ends with the pool."""

    def keep() -> None:
        while True:
            with suppress(queue.Empty):
                wakes.get(timeout=seconds)
            found = pool()
            if found is None:
                return
            found.tidy()
            del found  # the wait must not keep it

    threading.Thread(target=keep, name="storesvc-memory", daemon=True).start()


def _map_memory(size_bytes: int) -> mmap.mmap | None:
    """Returns a private mapping with that many bytes from its first boundary of a huge
    page; None if the process may not have more mappings."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping is far slower
    try:
        mapping = mmap.mmap(-1, _whole(size_bytes) + HUGE_PAGE_BYTES, flags=private)
    except OSError:
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        import numpy as np

        start = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        # Whole pages only: the rest must not take memory that was not requested.
        mapping.madvise(
            mmap.MADV_HUGEPAGE, start, size_bytes - size_bytes % HUGE_PAGE_BYTES
        )
    return mapping


def _whole(size_bytes: int) -> int:
    """Returns a size rounded up to huge pages, so that a block also serves a somewhat
    larger request."""
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _align_buffer(raw: "Bytes", alignment: int, size_bytes: int) -> "Bytes":
    start = -raw.ctypes.data % alignment
    return raw[start : start + size_bytes]
