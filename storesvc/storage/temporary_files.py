"""What a killed write leaves on a root of files, cleared before the next write.

TensorStore writes a file beside its place, in ``<place>.__lock``, which is also the
lock of the place, and then renames it. A process that is killed in between leaves that
file. The next write goes over it from its beginning and does not cut off what it is
shorter by (seen in 0.1.86): it would end in bytes of the killed one.
"""

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from storesvc.storage.location import LOCK_SUFFIX

_WHOLE_FILE: Final = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and a FIFO does not block."""


def clear(path: Path) -> None:
    """Empties what a killed write of a file left; leaves one under way alone."""
    lock = path.with_name(path.name + LOCK_SUFFIX)
    try:
        descriptor = os.open(lock, _FLAGS)
    except OSError:  # most often: there is none
        return
    try:
        # A write holds this lock until it has renamed the file: who gets it, and
        # still finds the file under its name, has no write under way before it.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
