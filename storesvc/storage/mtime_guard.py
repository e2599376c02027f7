"""Time stamps of files, which tell one write of a place from another.

The generation of a file is its inode and the time of its last change (TensorStore's
file driver). A file that is replaced gives its inode back, and kernels may stamp files
by the tick of a clock: two writes within one tick could look the same, and a write
that was conditional on the first could come after the second. So a conditional write
waits until the one before is a tick old; then no generation of a place comes twice.
"""

import time
from pathlib import Path
from typing import Final

TICK_SECONDS: Final = 0.011
"""Longer than the tick of any kernel: that of Linux is 10 ms at most."""


def seconds_until_next(path: Path) -> float:
    """Returns how long to wait until a write of a file gets another time stamp than it
    has now; 0: no time. It blocks: it is for a thread."""
    try:
        written = path.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # nothing is there, so nothing can be taken for it
        return 0.0
    age = (time.time_ns() - written) / 1e9
    return TICK_SECONDS - max(0.0, age) if age < TICK_SECONDS else 0.0
