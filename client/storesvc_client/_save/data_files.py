"""Pools: where the data files of a run are put, and how they become durable."""

import errno
import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, Protocol

from storesvc.storage import data_file, rooted_files
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    LimitError,
    StoreError,
    UnavailableError,
)

THREADS: Final = min(os.cpu_count() or 1, 8)

FILE_BYTES: Final = 128 << 20
"""Where a thread begins its next data file; what a save that is cut off loses."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class StoppedError(Exception):
    """Nobody wants the file any more."""


class NewFile(Protocol):
    """A data file that is being written."""

    @property
    def size_bytes(self) -> int:
        """Of what was appended."""

    def append(self, parts: Sequence[memoryview]) -> None:
        """Writes parts behind those before."""


class Pool(Protocol):
    """The data files of a run."""

    @property
    def threads(self) -> int:
        """How many files are worth being written at a time."""

    @property
    def file_bytes(self) -> int:
        """Where the next one begins."""

    def create(self, name: str) -> AbstractContextManager[NewFile]:
        """Returns a context of a new file: durable once it has ended, or gone where it
        ended with an error.

        Raises:
            LimitError: The storage is full.
            InvalidRequestError: It may not be written.
            UnavailableError: The storage failed.
            StoppedError: Nobody wants it any more.
        """


class FilePool:
    """Those in a directory."""

    threads = THREADS

    def __init__(self, root: Path, pool: str) -> None:
        """Prepares to write.

        Args:
            root: Of the store.
            pool: What the data files lie below.
        """
        self._root = root
        self._pool = pool
        self.file_bytes = FILE_BYTES

    @contextmanager
    def create(self, name: str) -> Generator[NewFile]:
        """See ``Pool.create``."""
        place = f"{self._pool}{name}"
        try:
            rooted_files.make_directories(self._root, place)
            with data_file.NewFile(self._root, place) as file:
                yield file
        except StoreError:  # some are OSErrors too
            raise
        except OSError as e:
            raise _translated(e, self._root / self._pool) from e


def _translated(e: OSError, pool: Path) -> StoreError:
    if e.errno == errno.ENOSPC:
        return LimitError(
            f"{pool}: the storage is full; {data_file.HOW_TO_FREE_SPACE}, then save "
            "again",
            reason="STORAGE_FULL",
        )
    if isinstance(e, rooted_files.IrregularFileError):
        return DataLossError(
            f"{pool}: {e}; nothing is written through a link: remove it, or connect "
            "without direct=",
            reason="CORRUPT_DATA",
        )
    if e.errno in _DENIED:
        return InvalidRequestError(
            f"direct: expected to write below {pool}, got {e.strerror}; let this "
            "process write there, or connect without direct="
        )
    return UnavailableError(
        f"{pool}: the storage failed: {e.strerror}; save again",
        reason="STORAGE_UNAVAILABLE",
    )
