"""Values that never change, kept by the memory that they take.

Those whose last use is the longest ago go first. What several ask for at once is
loaded once. A value that is larger than all the room is used and not kept, and an
error is not kept either.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from cachetools import LRUCache

TREES_BYTES: Final = 512 << 20
"""Of parsed leaf tables, and again of parsed manifests, that a process keeps: one of
the largest trees fits."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """A cache of one event loop."""

    def __init__(self, max_bytes: int, *, size_of: Callable[[V], int]) -> None:
        """Makes an empty cache.

        Args:
            max_bytes: What all values together may take.
            size_of: Returns what a value takes; asked once, when it is kept.
        """
        self._kept: LRUCache[K, V] = LRUCache(max_bytes, getsizeof=size_of)
        self._loading: dict[K, asyncio.Task[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    @property
    def size_bytes(self) -> int:
        """What the values take that are kept."""
        return int(self._kept.currsize)

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the value of a key, which ``load`` brings where none is kept; raises
        what that raises."""
        if key in self._kept:
            return self._kept[key]
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._load(key, load))
            loading.add_done_callback(lambda task: self._loaded(key, task))
        # Others may wait for it when the one who began it has gone.
        return await asyncio.shield(loading)

    async def _load(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        value = await load()
        with suppress(ValueError):  # larger than all the room
            self._kept[key] = value
        return value

    def _loaded(self, key: K, task: "asyncio.Task[V]") -> None:
        del self._loading[key]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it any more
