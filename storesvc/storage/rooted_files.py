"""Opens, writes and syncs files below a root without following links.

A direct writer may put anything into the pool of a run: a symbolic link to a file that
only the server may read, or a FIFO, which blocks the process that opens it. So:

1. A path is opened one component at a time, relative to the previous directory. Renames
   cannot redirect it, because each step holds a descriptor of the previous directory.
2. A link is rejected (O_NOFOLLOW), and opening does not block (O_NONBLOCK).
3. Only a regular file is read or written.

What they reject is an `IrregularFileError`; any other error is the OSError of the call.

The root itself may be a link: the operator chose it.

A data file has a unique name, is written once from its beginning to its end, and is
never changed. No record names the remains of a killed write; they are collected with
the rest of its upload.

TensorStore syncs a file and its directory. The entry of a directory that TensorStore
creates is in the parent, which nothing syncs: after a power cut a file system may have
the file, and no directory entry that leads to it. So every directory is created here,
and its entry synced, before anything is put into it.

TensorStore writes a file next to its path, in ``<path>.__lock``, which is also the lock
of the path, and then renames it. A killed process leaves that file. The next write
overwrites it from its beginning and does not truncate it (seen in 0.1.86), so a shorter
write would end in bytes of the killed one: `clear_interrupted_write` truncates it.
"""

import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, Self

from cachetools import LRUCache

from storesvc.format.checksums import Buffer
from storesvc.storage.location import LOCK_SUFFIX

_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# O_PATH needs no permission to list the directory; only Linux has it.
_PASS: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FILE: Final = frozenset({errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV})
"""Errors of opening a link, a socket, and a device without a driver."""

_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


class IrregularFileError(OSError):
    """A path does not lead to a regular file through directories below the root."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}")


def open_file(root: Path, path: str) -> int:
    """Opens a file for reading; returns its descriptor.

    Raises:
        FileNotFoundError: There is no file.
        IrregularFileError: The path leads through a link, or to no regular file.
        OSError: The file cannot be opened.
    """
    with _opened(root, path) as (directory, name):
        try:
            descriptor = os.open(name, _READ, dir_fd=directory)
        except OSError as e:
            if e.errno in _NO_FILE:
                raise _irregular(path, directory, name) from e
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _irregular(path, directory, name)
        return descriptor


def make_directory(root: Path, path: str) -> None:
    """Creates a directory in an existing one; an existing directory is no error."""
    with _opened(root, path) as (directory, name):
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=directory)
            return
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise IrregularFileError(path, "a directory", _kind(mode))
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def make_directories(root: Path, path: str) -> None:
    """Creates the directories of a path below a root: all before its last "/"."""
    root.mkdir(parents=True, exist_ok=True)
    for at, character in enumerate(path):
        if character == "/":
            make_directory(root, path[:at])


def check_file(root: Path, path: str) -> None:
    """Rejects a path that exists and is no regular file.

    For paths that a storage driver opens afterwards: it would block or follow a link.
    """
    with suppress(FileNotFoundError), _opened(root, path) as (directory, name):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise IrregularFileError(path, "a regular file", _kind(mode))


def remove_file(root: Path, path: str) -> None:
    """Removes a file, or a link at its path; an absent one is no error."""
    with suppress(FileNotFoundError), _opened(root, path) as (directory, name):
        os.unlink(name, dir_fd=directory)


def remove_below(root: Path, prefix: str) -> list[str]:
    """Removes everything whose path begins with a prefix; returns the removed
    directories. A link is removed, and its target is not."""
    is_directory = prefix.endswith("/")
    above, slash, first = prefix.removesuffix("/").rpartition("/")
    gone: list[str] = []
    with (
        suppress(FileNotFoundError),
        opened_directory(root, above + slash) as directory,
    ):
        if is_directory:
            mode = os.stat(first, dir_fd=directory, follow_symlinks=False).st_mode
            names = [] if stat.S_ISREG(mode) else [first]
        else:
            names = [n for n in _names(directory) if n.startswith(first)]
        for name in names:
            _remove_tree(directory, name, f"{above}{slash}{name}", gone)
    return gone


def sizes_below(root: Path, folder: str) -> dict[str, int]:
    """Returns the size of each file below a folder, by path; follows no link."""
    found: dict[str, int] = {}
    with suppress(FileNotFoundError), opened_directory(root, folder) as directory:
        for path, _, names, at in os.fwalk(".", dir_fd=directory):
            for name in names:
                with suppress(FileNotFoundError):  # it was removed in the meantime
                    size = os.stat(name, dir_fd=at, follow_symlinks=False).st_size
                    found[os.path.normpath(f"{folder}{path}/{name}")] = size
    return found


@contextmanager
def opened_directory(root: Path, path: str) -> Generator[int]:
    """Yields a descriptor of the directory of a path: all before its last "/".

    Raises:
        FileNotFoundError: There is no such directory.
        IrregularFileError: The path leads through a link.
        OSError: The directory cannot be opened.
    """
    with _opened(root, path, _LIST) as (directory, _):
        yield directory


@contextmanager
def _opened(root: Path, path: str, flags: int = _PASS) -> Generator[tuple[int, str]]:
    """Yields a descriptor of the directory that holds a path, and the path's name in
    it."""
    *above, name = path.split("/")
    if "\0" in path or not {".", ".."}.isdisjoint((*above, name)) or "" in above:
        raise IrregularFileError(path[:80], "a path below the root", "another")
    at = os.open(root, (flags if not above else _PASS) & ~os.O_NOFOLLOW)
    for step, component in enumerate(above, start=1):
        # The directories above need only be passed through, not listed.
        last = flags if step == len(above) else _PASS
        try:
            below = os.open(component, last | os.O_NOFOLLOW, dir_fd=at)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _irregular(path, at, component, "a directory") from e
            raise
        finally:
            os.close(at)
        at = below
    try:
        yield at, name
    finally:
        os.close(at)


def _remove_tree(directory: int, name: str, path: str, gone: list[str]) -> None:
    """Removes a file, a link, or a directory and what is below it."""
    with suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=directory)
            return
        below = os.open(name, _LIST, dir_fd=directory)
        try:
            for one in _names(below):
                _remove_tree(below, one, f"{path}/{one}", gone)
        finally:
            os.close(below)
        with suppress(OSError):  # another process refilled or removed it
            os.rmdir(name, dir_fd=directory)
            gone.append(path)


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


def _irregular(
    path: str, directory: int, name: str, expected: str = "a regular file"
) -> IrregularFileError:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:  # it was removed in the meantime
        return IrregularFileError(path, expected, "something else")
    return IrregularFileError(path, expected, _kind(mode))


def _kind(mode: int) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")


HOW_TO_FREE_SPACE: Final = (
    "free space: 'storectl rm RUN@STEP --purge' ends a checkpoint, 'storectl uploads "
    "RUN --abort UPLOAD' a save that has failed, and 'storectl gc --grace 0s' removes "
    "what they leave"
)
"""Remedy for a full disk, in the messages of both sides. Without a grace period, the
collection also removes what was purged just now."""

_PARTS_AT_ONCE: Final = 1024
"""Maximum buffers of one ``writev`` call on Linux (IOV_MAX)."""


class NewFile:
    """A data file that is being written.

    As a context manager: the file is durable at the end of the block, or removed if the
    block raised. The directory entry is not durable: sync the directory before any
    record names the file.
    """

    def __init__(self, root: Path, path: str) -> None:
        """Creates the file.

        Args:
            path: Relative to the root; none of its directories may be a link.

        Raises:
            IrregularFileError: The path leads through a link.
            OSError: The file exists, or cannot be created.
        """
        self._root = root
        self._path = path
        with _opened(root, path) as (directory, name):
            self._descriptor = os.open(name, _CREATE, 0o644, dir_fd=directory)
        self.size_bytes = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        """Appends buffers of bytes; releases the interpreter lock while it writes."""
        for at in range(0, len(parts), _PARTS_AT_ONCE):
            left = [memoryview(part) for part in parts[at : at + _PARTS_AT_ONCE]]
            while left:
                written = os.writev(self._descriptor, left)
                self.size_bytes += written
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                # A short write: one call writes at most 2 GiB, or what fits.
                if left:
                    left[0] = left[0][written:]

    def keep(self) -> None:
        """Makes the contents durable and closes the file; removes it on an error."""
        # Sync before close: after it, the kernel reports no error of a delayed write.
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.discard()  # after a failed sync the contents on disk are unknown
            raise
        os.close(self._descriptor)

    def discard(self) -> None:
        os.close(self._descriptor)
        with suppress(OSError):
            remove_file(self._root, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.keep()
        else:
            self.discard()


KEPT: Final = 10_000
"""Maximum directories that are remembered as durable; others are synced again."""

WHOLE_FILE: Final = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that follow no link, and do not block on a FIFO."""


class Directories:
    """The directories below one root. Every method blocks: call it from a thread."""

    def __init__(self, root: Path, *, kept: int = KEPT) -> None:
        self._root = root
        self._synced: LRUCache[str, bool] = LRUCache(kept)
        self._lock = threading.Lock()  # LRUCache is not thread-safe

    def first_names(self, limit: int) -> list[str]:
        """Returns up to `limit` names of entries of the root itself."""
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in islice(entries, limit)]
        except OSError:  # it does not exist, or the first write will report the error
            return []

    def make(self, path: str) -> None:
        """Creates the directory of a path, durably."""
        self._make(path.rpartition("/")[0])

    def sync(self, path: str) -> None:
        """Makes the presence or absence of a path durable."""
        with opened_directory(self._root, path) as directory:
            os.fsync(directory)

    def remove_below(self, prefix: str) -> None:
        """Removes everything whose path begins with a prefix, directories included."""
        gone = remove_below(self._root, prefix)
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
            make_directory(self._root, directory)
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
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE)
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
