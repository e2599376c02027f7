"""Directories that survive a power cut.

TensorStore syncs a file and the directory that it lies in. The entry of a directory
that it made lies one higher, and nothing syncs that: after a power cut a file system
may have the file, and no way to it. So on a root of files every directory is made
here, and its entry synced, before anything is put into it.
"""

import os
import threading
from itertools import islice
from pathlib import Path
from typing import Final

from cachetools import LRUCache

from storesvc.storage import rooted_files

KEPT: Final = 10_000
"""Directories that are known to be durable; others are synced again."""


class Directories:
    """Those below one root. Every method blocks: it is for a thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: LRUCache[str, bool] = LRUCache(KEPT)
        self._lock = threading.Lock()  # a cache knows no threads

    def first_names(self, limit: int) -> list[str]:
        """Returns the names of up to so many entries of the root itself."""
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in islice(entries, limit)]
        except OSError:  # there is none, or it is refused when it is written to
            return []

    def make(self, place: str) -> None:
        """Makes the directory of a place, and makes it durable.

        Raises:
            IrregularFileError: A directory of the place is a link.
            OSError: The storage failed.
        """
        self._make(place.rpartition("/")[0])

    def sync(self, place: str) -> None:
        """Makes durable that a place is there, or is not.

        Raises:
            IrregularFileError: A directory of the place is a link.
            OSError: The storage failed.
        """
        with rooted_files.opened_directory(self._root, place) as directory:
            os.fsync(directory)

    def remove_below(self, prefix: str) -> None:
        """Removes all whose place begins with a prefix, and its directories.

        Raises:
            IrregularFileError: A directory of the prefix is a link.
            OSError: The storage failed.
        """
        gone = rooted_files.remove_below(self._root, prefix)
        with self._lock:
            for directory in gone:
                self._synced.pop(directory, None)

    def _make(self, directory: str) -> None:
        with self._lock:
            is_synced = self._synced.get(directory, False)
        if is_synced and self._is_there(directory):
            return
        if directory:
            self._make(directory.rpartition("/")[0])
            rooted_files.make_directory(self._root, directory)
            # also where it was there: the process that made it may have died before
            self.sync(directory)
        else:
            self._root.mkdir(parents=True, exist_ok=True)
            _sync(self._root.parent)
        with self._lock:
            self._synced[directory] = True

    def _is_there(self, directory: str) -> bool:
        return (self._root / directory).is_dir()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
