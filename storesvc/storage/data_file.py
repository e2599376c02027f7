"""Data files on a root of files: how bytes get into them.

A data file has a name that nobody else uses, is written once from its beginning to
its end, and never changed. What a killed write leaves is named by no record, and is
collected with all else of its upload.
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
"""What to do about a full disk, on either side. Without a grace period, the collection
removes what was purged just now, too."""

_PARTS_AT_ONCE: Final = 1024
"""What Linux takes in one call (IOV_MAX)."""


class NewFile:
    """A data file that is being written.

    As a context: durable once that has ended, or gone where it ended with an error. Its
    directory's entry is not durable: who names the file to others syncs that first.
    """

    def __init__(self, root: Path, place: str) -> None:
        """Creates it.

        Args:
            root: A directory.
            place: Where below it; no directory of it may be a link.

        Raises:
            OSError: It cannot be, or is there already.
        """
        self._root = root
        self._place = place
        self._descriptor = rooted_files.create_file(root, place)
        self.size_bytes = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        """Writes parts behind what was written, without holding the interpreter.

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
            if parts:  # the kernel takes 2 GiB at once, or what a full disk has left
                parts[0] = parts[0][written:]

    def keep(self) -> None:
        """Makes what was written durable, and ends it.

        Raises:
            OSError: The storage failed; the file is gone.
        """
        try:
            os.fsync(self._descriptor)
        except OSError:
            self.discard()  # nobody knows what of it is on the disk
            raise
        os.close(self._descriptor)

    def discard(self) -> None:
        """Ends it, and removes it."""
        os.close(self._descriptor)
        with suppress(OSError):
            rooted_files.remove_file(self._root, self._place)

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
