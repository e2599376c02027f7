"""The files of a contender: synced, measured, dropped from the page cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Makes a file or directory survive a power cut."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def bytes_below(directory: Path) -> int:
    """Returns the bytes of all files below a directory."""
    return sum(path.stat().st_size for path in _files(directory))


def drop_from_cache(directory: Path) -> None:
    """Drops the files below a directory from the page cache.

    Unlike ``drop_caches`` it needs no privileges, and does not affect other files. On
    tmpfs it does nothing: there the cache is the storage.
    """
    for path in _files(directory):
        with _opened(path) as descriptor:
            os.fsync(descriptor)  # dirty pages would stay in the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
