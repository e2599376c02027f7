"""Reads the files that configure a server: its policy, keys and certificates.

While the server serves others, such a file may be replaced by something that is no
file, or its mount may hang. Neither may stop the server: what was read before stays in
force.
"""

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

MAX_BYTES: Final = 4 << 20
"""Maximum bytes of a file."""

WAIT_SECONDS: Final = 0.5
"""Maximum time that a call waits for files."""

_log = logging.getLogger(__name__)


FileState: TypeAlias = tuple[int, int, int]
"""(mtime, inode, size) of a file."""


def file_state(path: Path) -> FileState | None:
    """Returns a value that changes whenever a file changes; None: it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_file(path: Path) -> bytes:
    """Reads a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, got another kind")
        data = bytearray()
        while part := os.read(file, MAX_BYTES + 1 - len(data)):
            data += part
    finally:
        os.close(file)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {MAX_BYTES} bytes, got more")
    return bytes(data)


class FileCheck:
    """Looks at files in a thread, and waits for it shortly."""

    def __init__(self, look: Callable[[], None], *, what: str) -> None:
        """Creates it; looks at nothing yet."""
        self._look = look
        self._what = what
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Looks at the files, unless an earlier look has not returned yet."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(
                target=self._look, name="storesvc-file-check", daemon=True
            )
            self._thread.start()
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "%s: the file system does not answer; what was read before stays "
                    "in force",
                    self._what,
                )
