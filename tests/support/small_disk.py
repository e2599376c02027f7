"""A file system of a few MiB, for tests of a full disk."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class NoSmallDiskError(Exception):
    """This process lacks the permission to mount file systems."""


@contextmanager
def mounted(directory: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mounts an empty file system of a size while the context lasts.

    Raises:
        NoSmallDiskError: The permission is missing.
    """
    directory.mkdir(parents=True)
    options = f"size={size_bytes}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise NoSmallDiskError("mounting a tmpfs needs root") from e
    try:
        yield directory
    finally:
        # lazily, as a server that was just killed may still be ending
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def small_disk(directory: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mounts like ``mounted``; skips the test if the permission is missing."""
    try:
        with mounted(directory, size_bytes=size_bytes) as disk:
            yield disk
    except NoSmallDiskError as e:
        pytest.skip(str(e))
