"""Directories that survive a power cut.

TensorStore syncs a file and the directory that it lies in. The entry of a directory
that it made lies one higher, and nothing syncs that: after a power cut a file system
may have the file, and no way to it. So on a root of files every directory is made
here, and its entry synced, before anything is put into it.
"""

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import tensorstore as ts
from cachetools import LRUCache

from storesvc import leftovers

KEPT: Final = 10_000
"""Directories that are known to be durable; others are synced again."""


class Directories:
    """Those below one root; on storages that have none, nothing is done."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._synced: LRUCache[Path, bool] = LRUCache(KEPT)
        self._lock = threading.Lock()  # a cache knows no threads

    @classmethod
    def of(cls, store: "ts.KvStore") -> Self:
        """Returns those below the root of a storage."""
        spec: dict[str, Any] = store.spec().to_json()
        return cls(Path(spec["path"]) if spec["driver"] == "file" else None)

    def path(self, place: str) -> Path | None:
        """Returns where a place lies; None: not in a directory."""
        return None if self._root is None else self._root / place

    async def make(self, *places: str) -> None:
        """Makes the directories of places durable: what is before their last "/"."""
        if self._root is None:
            return
        wanted = {self._root / place.rpartition("/")[0] for place in places}
        if not all(self._is_durable(path) for path in wanted):
            await asyncio.to_thread(self._make_all, wanted)

    def clear(self, place: str) -> None:
        """Clears what a killed write of a place left, before the next."""
        if self._root is not None:
            leftovers.clear(self._root / place)

    async def sync(self, place: str) -> None:
        """Makes durable that a place is there, or is not."""
        if self._root is not None:
            await asyncio.to_thread(_sync, (self._root / place).parent)

    async def remove_empty(self, prefix: str) -> None:
        """Removes the directories below a prefix that hold nothing."""
        if self._root is not None:
            await asyncio.to_thread(self._remove_empty, prefix)

    def _remove_empty(self, prefix: str) -> None:
        assert self._root is not None
        above, _, name = prefix.rpartition("/")
        tops = (self._root / above).glob(f"{name}*/") if name else [self._root / above]
        for top in tops:
            for path, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # it holds something, or another was faster
                    Path(path).rmdir()
                    self._forget(Path(path))

    def _make_all(self, wanted: set[Path]) -> None:
        for path in wanted:
            self._make(path)

    def _make(self, path: Path) -> None:
        if self._is_durable(path):
            return
        if path not in (path.parent, self._root):
            self._make(path.parent)
        path.mkdir(parents=True, exist_ok=True)
        # also where it was there: who made it may have died before this
        _sync(path.parent)
        with self._lock:
            self._synced[path] = True

    def _is_durable(self, path: Path) -> bool:
        with self._lock:
            is_synced = self._synced.get(path, False)
        return is_synced and path.is_dir()

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._synced.pop(path, None)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
