"""Bounds and shares the work of one event loop: a semaphore, a cache, threads.

`FairSemaphore` bounds the memory that the server uses for the work of its clients. Free
capacity goes to the peer that was served least recently, and among that peer's calls to
the oldest; no call overtakes one that waits for more capacity. A call that waits too
long fails with an error that permits a retry. The semaphore is held only for work of
the server, never while a call waits for its client.

`ByteCache` keeps immutable values, bounded by their size in memory. Concurrent loads of
one key share one call. A value larger than the whole cache is returned but not kept; an
error is not cached.

`offload` runs computations over tables without blocking the event loop for long.

Example::

    async with semaphore.held(peer, weight=len(table)):
        await asyncio.to_thread(unpack, table)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Generic, ParamSpec, TypeVar

from cachetools import LRUCache

from storesvc.errors import LimitExceededError
from storesvc.telemetry.events import Span, Waited, publish

WAIT_SECONDS: Final = 20.0
"""Maximum wait of a call for its turn: below the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""Retry delay: calls that waited longer are served first."""


@dataclass(eq=False)
class _Waiter:
    """A waiting call."""

    peer: str
    weight: int
    number: int
    granted: "asyncio.Future[None]" = field(default_factory=asyncio.Future)


class FairSemaphore:
    """A weighted semaphore for one event loop; it serves its peers in turn."""

    def __init__(self, capacity: int, *, purpose: str) -> None:
        """Creates a semaphore with all of its capacity free.

        Args:
            capacity: Maximum total weight of the calls that hold it. A call with a
                higher weight holds it alone.
            purpose: The work of the calls, for error messages: "reads manifests".
        """
        self._capacity = capacity
        self._free = capacity
        self._purpose = purpose
        self._waiting: list[_Waiter] = []
        self._numbers = count(1)
        self._served: dict[str, int] = {}
        """Sequence number of the last turn of each peer."""

    @asynccontextmanager
    async def held(self, peer: str, *, weight: int = 1) -> AsyncIterator[None]:
        """Holds the semaphore while the context lasts.

        Args:
            peer: Host of the client, or the namespace of the request.
        """
        weight = min(weight, self._capacity)
        waiter = _Waiter(peer, weight, next(self._numbers))
        self._waiting.append(waiter)
        self._grant()
        try:
            if not waiter.granted.done():
                span = Span()
                await asyncio.wait({waiter.granted}, timeout=WAIT_SECONDS)
                publish(Waited(purpose=self._purpose, seconds=span.seconds))
            if not waiter.granted.done():
                raise LimitExceededError(
                    f"the server {self._purpose} for its maximum of concurrent calls, "
                    f"and none ended within {WAIT_SECONDS:.0f} s; retry in a moment",
                    retry_seconds=RETRY_SECONDS,
                )
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._free += weight
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            # The peer that was served least recently, and the oldest of its calls.
            first = min(
                self._waiting, key=lambda w: (self._served.get(w.peer, 0), w.number)
            )
            if first.weight > self._free:
                return
            self._waiting.remove(first)
            self._free -= first.weight
            self._served[first.peer] = next(self._numbers)
            first.granted.set_result(None)
        if self._free == self._capacity:
            self._served.clear()  # idle: all peers are equal again


TREES_BYTES: Final = 512 << 20
"""Size of the cache of parsed leaf tables, and of the one of parsed manifests: the
largest tree fits."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """An LRU cache for one event loop."""

    def __init__(self, max_bytes: int, *, size_of: Callable[[V], int]) -> None:
        """Creates an empty cache.

        Args:
            max_bytes: Maximum size of all values together.
            size_of: Returns the size of a value in bytes; called once, when it is
                stored.
        """
        self._kept: LRUCache[K, V] = LRUCache(max_bytes, getsizeof=size_of)
        self._loading: dict[K, asyncio.Task[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    @property
    def size_bytes(self) -> int:
        return int(self._kept.currsize)

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the cached value of a key; on a miss, loads and caches it.

        Raises whatever ``load`` raises.
        """
        if key in self._kept:
            return self._kept[key]
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._load(key, load))
            loading.add_done_callback(lambda task: self._on_loaded(key, task))
        # Shielded: other callers may wait for the same load when this one is cancelled.
        return await asyncio.shield(loading)

    async def _load(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        value = await load()
        with suppress(ValueError):  # larger than the cache
            self._kept[key] = value
        return value

    def _on_loaded(self, key: K, task: "asyncio.Task[V]") -> None:
        del self._loading[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved, even if no caller waits


P = ParamSpec("P")
T = TypeVar("T")

SMALL_ROWS: Final = 1_000
"""Rows up to which a computation runs in the event loop: it takes at most some
milliseconds there. A thread would cost 0.1 ms of CPU time, mostly to wake it and the
event loop, and a small save makes twenty such calls."""

ROW_BYTES: Final = 32
"""Estimated least bytes of a row of a serialised table."""


async def offload(
    rows: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns the result of a computation, which runs in a thread if there are many
    rows.

    Args:
        rows: Chunks or leaves that it works on.
        function: The computation; it must not wait for anything.
    """
    if rows <= SMALL_ROWS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def rows_in(data: bytes) -> int:
    """Returns an upper estimate of the rows of a serialised table."""
    return len(data) // ROW_BYTES
