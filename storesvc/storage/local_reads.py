"""Ranges of files of this machine, each read behind bytes of its own.

The kernel copies a range right to where its message wants it, and while it does so
other threads run: nothing else in Python touches the bytes.
"""

import os
import struct
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from storesvc.errors import CorruptDataError
from storesvc.format.frames import Part
from storesvc.storage import rooted_files


class LocalReads:
    """Reads the files below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, place: str, parts: Iterable[Part]) -> list[bytes]:
        """Returns messages whose bytes lie in a file.

        The file is not kept open: to open it costs a thousandth of what the reads do,
        and the space of a file that is deleted is free at once.

        Raises:
            CorruptDataError: The file is missing or shorter, or is no regular file of
                this root.
            OSError: It cannot be read.
        """
        try:
            descriptor = rooted_files.open_file(self._root, place)
        except FileNotFoundError as e:
            raise CorruptDataError(
                f"data file {place} is missing; use another checkpoint"
            ) from e
        try:
            return [_read(descriptor, place, part) for part in parts]
        finally:
            os.close(descriptor)

    def read_all(self, place: str) -> tuple[bytes, bytes] | None:
        """Returns all bytes of a file, and its generation as TensorStore 0.1.86 makes
        it: device, inode and time of the last change. None: there is no file.

        Raises:
            IrregularFileError: It is no regular file of this root.
            OSError: It cannot be read.
        """
        try:
            descriptor = rooted_files.open_file(self._root, place)
        except FileNotFoundError:
            return None
        try:
            # one file: another takes its place by a rename
            found = os.fstat(descriptor)
            data = _read(descriptor, place, Part(b"", 0, found.st_size))
        finally:
            os.close(descriptor)
        generation = (found.st_dev, found.st_ino, found.st_mtime_ns)
        return data, b"\0" + struct.pack("<QQq", *generation)

    def read_range(self, place: str, start: int, stop: int) -> bytes:
        """Returns the bytes of a file from ``start`` up to ``stop``.

        Raises:
            CorruptDataError: As for ``read``.
            OSError: It cannot be read.
        """
        (data,) = self.read(place, [Part(b"", start, stop)])
        return data


def _read(descriptor: int, place: str, part: Part) -> bytes:
    head, at, stop = part
    # Memory that is written to, and then is bytes without a copy.
    message = BytesIO(bytes(len(head) + stop - at))
    message.write(head)
    with message.getbuffer() as whole:
        while at < stop:
            count = os.preadv(descriptor, [whole[at - stop :]], at)
            if count == 0:
                raise CorruptDataError(
                    f"{place} is damaged or cut off: expected {stop} bytes, got {at}; "
                    "use another checkpoint"
                )
            at += count
    return message.getvalue()
