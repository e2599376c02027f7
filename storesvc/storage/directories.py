"""Keeps the directories of a root of files durable and clear of interrupted writes.

TensorStore syncs a file and its directory. The entry of a directory that TensorStore
creates is in the parent, which nothing syncs: after a power cut a file system may have
the file, and no directory entry that leads to it. So every directory is created here,
and its entry synced, before anything is put into it.

TensorStore writes a file next to its path, in ``<path>.__lock``, which is also the lock
of the path, and then renames it. A killed process leaves that file. The next write
overwrites it from its beginning and does not truncate it (seen in 0.1.86), so a shorter
write would end in bytes of the killed one: `clear_interrupted_write` truncates it.
"""

import fcntl
import os
import struct
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from cachetools import LRUCache

from storesvc.storage import rooted_files
from storesvc.storage.location import LOCK_SUFFIX

KEPT: Final = 10_000
"""Maximum directories that are remembered as durable; others are synced again."""

_WHOLE_FILE: Final = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that follow no link, and do not block on a FIFO."""


class Directories:
    """The directories below one root. Every method blocks: call it from a thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: LRUCache[str, bool] = LRUCache(KEPT)
        self._lock = threading.Lock()  # LRUCache is not thread-safe

    def first_names(self, limit: int) -> list[str]:
        """Returns up to `limit` names of entries of the root itself."""
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in islice(entries, limit)]
        except OSError:  # it does not exist, or the first write will report the error
            return []

    def make(self, path: str) -> None:
        """Creates the directory of a path, durably.

        Raises:
            IrregularFileError: A directory of the path is a link.
            OSError: The storage failed.
        """
        self._make(path.rpartition("/")[0])

    def sync(self, path: str) -> None:
        """Makes the presence or absence of a path durable.

        Raises:
            IrregularFileError: A directory of the path is a link.
            OSError: The storage failed.
        """
        with rooted_files.opened_directory(self._root, path) as directory:
            os.fsync(directory)

    def remove_below(self, prefix: str) -> None:
        """Removes everything whose path begins with a prefix, directories included.

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
        if is_synced and (self._root / directory).is_dir():
            return
        if directory:
            self._make(directory.rpartition("/")[0])
            rooted_files.make_directory(self._root, directory)
            # Also if it existed: the process that created it may have died before.
            self.sync(directory)
        else:
            self._root.mkdir(parents=True, exist_ok=True)
            sync_directory(self._root.parent)
        with self._lock:
            self._synced[directory] = True


def clear_interrupted_write(path: Path) -> None:
    """Truncates the file that a killed write of `path` left; a write in progress is not
    touched."""
    lock = path.with_name(path.name + LOCK_SUFFIX)
    try:
        descriptor = os.open(lock, _FLAGS)
    except OSError:  # usually there is none
        return
    try:
        # A write holds this lock until it has renamed the file: if we get the lock, and
        # the file still has its name, no write is in progress.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
