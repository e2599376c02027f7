"""Files below a root, opened without following a link.

A writer that reaches the storage itself may put anything into the pool of a run: a
symbolic link to a file that only the server may read, or a FIFO, which blocks the
process that opens it. So each place is walked from the root, one component at a time
and relative to the directory before; a link is refused (O_NOFOLLOW), opening never
blocks (O_NONBLOCK), and only a regular file is read or written. Nothing that is
renamed meanwhile changes this, because every step holds the directory before it.

The root itself may be a link: the operator chose it.
"""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STEP: Final = _ROOT | os.O_NOFOLLOW
# It needs no permission to list the directory; only Linux has it.
_PASS: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FILE: Final = frozenset({errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV})
"""What opening reports for a link, a socket, and a device without a driver."""

_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


class IrregularFileError(OSError):
    """A place does not lead to a regular file through directories of the root."""

    def __init__(self, place: str, expected: str, got: str) -> None:
        super().__init__(f"{place}: expected {expected}, got {got}")


def open_file(root: Path, place: str) -> int:
    """Returns a descriptor for reading a file.

    Raises:
        FileNotFoundError: There is none.
        IrregularFileError: The place leads through a link, or to no regular file.
        OSError: It cannot be opened.
    """
    directory, name = _directory(root, place, _PASS)
    try:
        try:
            descriptor = os.open(name, _READ, dir_fd=directory)
        except OSError as e:
            if e.errno in _NO_FILE:
                raise _irregular(place, directory, name) from e
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _irregular(place, directory, name)
    finally:
        os.close(directory)
    return descriptor


def create_file(root: Path, place: str) -> int:
    """Returns a descriptor for writing a new file.

    Raises:
        FileExistsError: Something is there.
        IrregularFileError: The place leads through a link.
        OSError: It cannot be created.
    """
    directory, name = _directory(root, place, _PASS)
    try:
        return os.open(name, _CREATE, 0o644, dir_fd=directory)
    finally:
        os.close(directory)


def make_directory(root: Path, place: str) -> None:
    """Makes a directory in one that is there; one that is there already is no error.

    Raises:
        IrregularFileError: The place is a link, or leads through one.
        NotADirectoryError: It is a file.
        OSError: It cannot be made.
    """
    directory, name = _directory(root, place, _PASS)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=directory)
            return
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise IrregularFileError(place, "a directory", _kind(mode))
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
    finally:
        os.close(directory)


def make_directories(root: Path, place: str) -> None:
    """Makes the directories of a place below a root: what is before its last "/".

    Raises:
        IrregularFileError: One of them is a link.
        OSError: One cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    for at, character in enumerate(place):
        if character == "/":
            make_directory(root, place[:at])


def check_file(root: Path, place: str) -> None:
    """Refuses a place that holds something other than a regular file; for a storage
    driver that opens it by its path afterwards, and would block or follow a link.

    Raises:
        IrregularFileError: It does, or leads through a link.
        OSError: It cannot be looked at.
    """
    with suppress(FileNotFoundError):
        directory, name = _directory(root, place, _PASS)
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)
        if not stat.S_ISREG(found.st_mode):
            raise IrregularFileError(place, "a regular file", _kind(found.st_mode))


def remove_file(root: Path, place: str) -> None:
    """Removes a file, or the link that lies in its place; none there is no error.

    Raises:
        IrregularFileError: The place leads through a link.
        OSError: It cannot be removed.
    """
    with suppress(FileNotFoundError):
        directory, name = _directory(root, place, _PASS)
        try:
            os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)


def remove_below(root: Path, prefix: str) -> list[str]:
    """Removes everything whose place begins with a prefix; returns the directories
    that are gone. A link goes, and what it leads to stays.

    Raises:
        IrregularFileError: The prefix leads through a link.
        OSError: Something cannot be removed.
    """
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


@contextmanager
def opened_directory(root: Path, place: str) -> Generator[int]:
    """Yields a descriptor of the directory of a place: what is before its last "/".

    Raises:
        FileNotFoundError: There is none.
        IrregularFileError: The place leads through a link.
        OSError: It cannot be opened.
    """
    directory, _ = _directory(root, place, _STEP)
    try:
        yield directory
    finally:
        os.close(directory)


def _directory(root: Path, place: str, flags: int) -> tuple[int, str]:
    """A descriptor of the directory that a place lies in, and its name there."""
    *above, name = place.split("/")
    if "\0" in place or not {".", ".."}.isdisjoint((*above, name)) or "" in above:
        raise IrregularFileError(place[:80], "a place below the root", "another")
    at = os.open(root, (flags if not above else _PASS) & ~os.O_NOFOLLOW)
    for step, component in enumerate(above, start=1):
        # what is passed needs no more than to be passed
        last = flags if step == len(above) else _PASS
        try:
            below = os.open(component, last | os.O_NOFOLLOW, dir_fd=at)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _irregular(place, at, component, "a directory") from e
            raise
        finally:
            os.close(at)
        at = below
    return at, name


def _remove_tree(directory: int, name: str, place: str, gone: list[str]) -> None:
    """Removes a file, a link, or a directory and what is below it."""
    with suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=directory)
            return
        below = os.open(name, _STEP, dir_fd=directory)
        try:
            for one in _names(below):
                _remove_tree(below, one, f"{place}/{one}", gone)
        finally:
            os.close(below)
        with suppress(OSError):  # it holds something again, or another was faster
            os.rmdir(name, dir_fd=directory)
            gone.append(place)


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


def _irregular(
    place: str, directory: int, name: str, expected: str = "a regular file"
) -> IrregularFileError:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:  # it is gone again
        return IrregularFileError(place, expected, "something else")
    return IrregularFileError(place, expected, _kind(mode))


def _kind(mode: int) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")
