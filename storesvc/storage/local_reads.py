"""Reads ranges of local files into messages, each behind a header of its own.

The kernel copies a range to its final position in the message, without the interpreter
lock; Python copies no data.
"""

import os
import struct
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from storesvc.errors import CorruptDataError
from storesvc.format.wire import Part
from storesvc.storage import rooted_files


class LocalReads:
    """Reads the files below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, parts: Iterable[Part]) -> list[bytes]:
        """Returns one message for each part of a file.

        The file is not kept open: opening it costs a thousandth of the reads, and the
        space of a deleted file is free at once.

        Raises:
            CorruptDataError: The file is missing or shorter, or is no regular file of
                this root.
            OSError: The file cannot be read.
        """
        try:
            descriptor = rooted_files.open_file(self._root, path)
        except FileNotFoundError as e:
            raise CorruptDataError(
                f"data file {path} is missing; use another checkpoint"
            ) from e
        try:
            return [_read(descriptor, path, part) for part in parts]
        finally:
            os.close(descriptor)

    def read_all(self, path: str) -> tuple[bytes, bytes] | None:
        """Returns the contents of a file and its generation; None if there is no file.

        The generation has TensorStore's encoding (0.1.86): device, inode and mtime.

        Raises:
            IrregularFileError: The path is no regular file of this root.
            OSError: The file cannot be read.
        """
        try:
            descriptor = rooted_files.open_file(self._root, path)
        except FileNotFoundError:
            return None
        try:
            # Both are of one version: a write replaces the file by a rename.
            found = os.fstat(descriptor)
            data = _read(descriptor, path, Part(b"", 0, found.st_size))
        finally:
            os.close(descriptor)
        generation = (found.st_dev, found.st_ino, found.st_mtime_ns)
        return data, b"\0" + struct.pack("<QQq", *generation)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Returns the bytes of a file from ``start`` up to ``stop``.

        Raises:
            CorruptDataError: As for ``read``.
            OSError: The file cannot be read.
        """
        (data,) = self.read(path, [Part(b"", start, stop)])
        return data


def _read(descriptor: int, path: str, part: Part) -> bytes:
    head, at, stop = part
    # BytesIO can be written to, and becomes bytes without a copy.
    message = BytesIO(bytes(len(head) + stop - at))
    message.write(head)
    with message.getbuffer() as whole:
        while at < stop:
            count = os.preadv(descriptor, [whole[at - stop :]], at)
            if count == 0:
                raise CorruptDataError(
                    f"{path} is damaged or truncated: expected {stop} bytes, got {at}; "
                    "use another checkpoint"
                )
            at += count
    return message.getvalue()
