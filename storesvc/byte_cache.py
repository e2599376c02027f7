"""An LRU cache of immutable values, bounded by their size in memory.

Concurrent loads of one key share one call. A value larger than the whole cache is
returned but not kept; an error is not cached.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from cachetools import LRUCache

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
        """Size of the cached values in bytes."""
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
