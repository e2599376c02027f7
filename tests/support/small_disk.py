"""A disk of a few MiB, to be filled."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class NoSmallDiskError(Exception):
    """This process may not mount one."""


@contextmanager
def mounted(directory: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mounts an empty file system of a size for as long as the context lasts.

    Raises:
        NoSmallDiskError: It may not.
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
        # lazily: a server that was just killed may still be going
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def small_disk(directory: Path, *, size_bytes: int) -> Iterator[Path]:
    """As ``mounted``; skips the test where it may not."""
    try:
        with mounted(directory, size_bytes=size_bytes) as disk:
            yield disk
    except NoSmallDiskError as e:
        pytest.skip(str(e))
