"""Writes data files on a root of files.

A data file has a unique name, is written once from its beginning to its end, and is
never changed. No record names the remains of a killed write; they are collected with
the rest of its upload.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from storesvc.format.checksums import Buffer
from storesvc.storage import rooted_files

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
            root: A directory.
            path: Relative to the root; none of its directories may be a link.

        Raises:
            OSError: The file exists, or cannot be created.
        """
        self._root = root
        self._path = path
        self._descriptor = rooted_files.create_file(root, path)
        self.size_bytes = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        """Appends buffers to the file; releases the interpreter lock while it writes.

        Args:
            parts: Contiguous buffers of bytes.

        Raises:
            OSError: The storage is full, or failed.
        """
        for at in range(0, len(parts), _PARTS_AT_ONCE):
            self._write([memoryview(p) for p in parts[at : at + _PARTS_AT_ONCE]])

    def _write(self, parts: list[memoryview]) -> None:
        while parts:
            written = os.writev(self._descriptor, parts)
            self.size_bytes += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            # A short write: one call writes at most 2 GiB, or what fits on the disk.
            if parts:
                parts[0] = parts[0][written:]

    def keep(self) -> None:
        """Makes the contents durable and closes the file.

        Raises:
            OSError: The storage failed; the file is removed.
        """
        # Sync before close: after it, the kernel reports no error of a delayed write.
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.discard()  # after a failed sync the contents on disk are unknown
            raise
        os.close(self._descriptor)

    def discard(self) -> None:
        """Closes and removes the file."""
        os.close(self._descriptor)
        with suppress(OSError):
            rooted_files.remove_file(self._root, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.keep()
        else:
            self.discard()
