"""Guards conditional writes of files against equal modification times.

TensorStore's file driver identifies a version of a file by its inode and mtime. Kernels
reuse inodes and stamp mtimes at a coarse tick (10 ms on Linux), so two writes within
one tick can produce the same version, and a conditional write based on the first could
overwrite the second. A conditional write therefore waits until the previous version of
the file is at least one tick old; no version then repeats.
"""

import time
from pathlib import Path
from typing import Final

TICK_SECONDS: Final = 0.011
"""Upper bound of a kernel's timestamp granularity (Linux: 10 ms), plus a margin."""


def seconds_until_next(path: Path) -> float:
    """Returns the seconds until a new write of `path` gets a different mtime.

    0 where it already does. Blocks on the file system: call it from a thread.
    """
    try:
        written = path.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # there is no previous version to confuse
        return 0.0
    age = (time.time_ns() - written) / 1e9
    return TICK_SECONDS - max(0.0, age) if age < TICK_SECONDS else 0.0
