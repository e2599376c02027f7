"""A folder of this machine as a location, read without fsspec.

Symbolic links are followed as long as they stay below the folder. In a cache of
Hugging Face, ``models--ORG--NAME/snapshots/REV/FILE`` is a link to
``models--ORG--NAME/blobs/HASH``: below such a revision, links may lead anywhere in the
folder of the repository.
"""

import errno
import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from storesvc_client._foreign.location import checked_path
from storesvc_client.errors import (
    DataLossError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)

_CACHED_KINDS: Final = ("models--", "datasets--", "spaces--")
"""Beginnings of the folders of repositories in a cache of Hugging Face."""

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})

MAX_READ_BYTES: Final = 1 << 30
"""Maximum bytes of one system call; Linux reads at most 2 GiB."""


class LocalLocation:
    """A folder of this machine; it need not exist. Thread-safe."""

    is_local: Final = True
    has_renames: Final = True

    def __init__(self, path: Path) -> None:
        self._root = Path(os.path.realpath(path))
        self.url: str = self._root.as_uri()
        self._bounds = _bounds(self._root)

    def __repr__(self) -> str:
        return f"<LocalLocation {self.url}>"

    def names(self, folder: str = "") -> Sequence[str]:
        """See ``Location``."""
        with self._translated(folder):
            place = self._inside(checked_path(self.url, folder, is_folder=True))
            with os.scandir(place) as entries:
                return sorted(
                    f"{each.name}/" if each.is_dir() else each.name for each in entries
                )
        return []

    def stamps(self, folder: str = "") -> Mapping[str, str]:
        """See ``Location``; the file that a symbolic link leads to counts."""
        with self._translated(folder):
            place = self._inside(checked_path(self.url, folder, is_folder=True))
            with os.scandir(place) as entries:
                found = sorted((each.name, each) for each in entries)
                is_cache = self._bounds != self._root
                return dict(_stamped(e, is_cache=is_cache) for _, e in found)
        return {}

    def size(self, path: str) -> int | None:
        """See ``Location``."""
        with self._translated(path):
            found = self._inside(checked_path(self.url, path)).lstat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def read(self, path: str, *, limit: int) -> bytes:
        """See ``Location``."""
        with self._opened(path) as (file, size):
            if size > limit:
                raise DataLossError(
                    f"{self.url}/{path}: expected at most {limit} bytes, got {size}; "
                    "use another checkpoint"
                )
            into = bytearray(size)
            self._fill(path, file, 0, memoryview(into))
        return bytes(into)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See ``Location``."""
        with self._opened(path) as (file, size):
            self._check_end(path, start, stop, size)  # before memory is allocated
            into = bytearray(stop - start)
            self._fill(path, file, start, memoryview(into))
        return bytes(into)

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """See ``Location``."""
        with self._opened(path) as (file, size):
            flat = into.cast("B")
            self._check_end(path, start, start + len(flat), size)
            self._fill(path, file, start, flat)

    def kvstore(self, folder: str = "") -> dict[str, Any]:
        """See ``Location``."""
        inside = checked_path(self.url, folder, is_folder=True)
        place = self._root / inside
        with self._translated(folder):
            self._check_links(self._inside(inside))
        return {"driver": "file", "path": f"{place.as_posix().rstrip('/')}/"}

    def below(self, folder: str) -> "LocalLocation":
        """See ``Location``."""
        return LocalLocation(self._inside(checked_path(self.url, folder)))

    def labels(self) -> Mapping[str, str]:
        """See ``Location``."""
        return {}

    def opening(self) -> AbstractContextManager[None]:
        """See ``Location``."""
        return nullcontext()

    def _inside(self, path: str) -> Path:
        """Returns the place of a path once all links are followed.

        Raises:
            DataLossError: It is outside the location.
        """
        place = Path(os.path.realpath(self._root / path))
        if not place.is_relative_to(self._bounds):
            raise DataLossError(
                f"{self.url}/{path}: expected files of this folder, got a symbolic "
                f"link to {place}; copy the checkpoint with its links replaced"
            )
        return place

    def _check_links(self, folder: Path) -> None:
        """Rejects a symbolic link that leads out of the location, and pipes and
        devices, which TensorStore would wait for: in a folder, below it, and where
        links in it lead."""
        left, seen = [str(folder)], {str(folder)}
        while left:
            with os.scandir(left.pop()) as entries:
                for each in entries:
                    # an entry knows its type without a call, unless it is a link
                    found = self._target(each) if each.is_symlink() else each
                    place = os.fspath(found)
                    if found.is_dir():
                        if place not in seen:
                            left.append(place)
                        seen.add(place)
                    elif not found.is_file() and Path(place).exists():
                        raise DataLossError(
                            f"{Path(place).as_uri()}: expected files and folders, got "
                            "a pipe, a socket or a device; use another checkpoint"
                        )

    def _target(self, link: "os.DirEntry[str]") -> Path:
        """Returns where a symbolic link leads; rejects one that leads out."""
        path = Path(link.path)
        is_below = path.is_relative_to(self._root)
        inside = path.relative_to(self._root).as_posix() if is_below else link.path
        return self._inside(inside)

    @contextmanager
    def _opened(self, path: str) -> Generator[tuple[int, int]]:
        """Opens a regular file: its descriptor and its size."""
        with self._translated(path):
            place = self._inside(checked_path(self.url, path))
            # NOFOLLOW: the links were followed; NONBLOCK: a pipe must not block us
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(place, flags)
            try:
                found = os.fstat(file)
                if stat.S_ISREG(found.st_mode):
                    yield file, found.st_size
                    return
            finally:
                os.close(file)
        raise NotFoundError(f"{self.url}/{path}: expected a file, found none")

    def _fill(self, path: str, file: int, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            some = into[done : done + MAX_READ_BYTES]
            count = os.preadv(file, [some], start + done)
            if not count:  # the file became shorter
                self._check_end(path, start, start + len(into), start + done)
            done += count

    def _check_end(self, path: str, start: int, stop: int, size: int) -> None:
        if not 0 <= start <= stop <= size:
            raise DataLossError(
                f"{self.url}/{path}: expected the bytes {start} to {stop}, got a file "
                f"of {size} bytes; use another checkpoint"
            )

    @contextmanager
    def _translated(self, path: str) -> Generator[None]:
        """Translates errors of the system; absent files end the block."""
        try:
            yield
        except (DataLossError, UnavailableError):
            raise
        except OSError as e:
            if e.errno in _ABSENT:
                return
            if e.errno in _DENIED:
                raise PreconditionError(
                    f"{self.url}/{path}: access denied ({e.strerror}); use an account "
                    "that may read it"
                ) from e
            raise UnavailableError(
                f"{self.url}/{path}: cannot be read ({e.strerror}); check the storage"
            ) from e


def _stamped(entry: "os.DirEntry[str]", *, is_cache: bool) -> tuple[str, str]:
    """Returns the name of a file or folder, and its stamp.

    In a cache of Hugging Face, a file is a link to one of which the name is a digest of
    the contents: it is the same on each machine, and so is the stamp.
    """
    if entry.is_dir():
        return f"{entry.name}/", ""
    try:
        found = entry.stat()
    except FileNotFoundError:  # a link to nothing, which no format reads
        return entry.name, "absent"
    if is_cache and entry.is_symlink():
        return entry.name, f"{found.st_size} {Path(entry.path).readlink().name}"
    return entry.name, f"{found.st_size} {found.st_mtime_ns}"


def _bounds(root: Path) -> Path:
    """Returns the folder that links of a location must not leave."""
    for above in root.parents:
        if above.name == "snapshots" and above.parent.name.startswith(_CACHED_KINDS):
            return above.parent
    return root
