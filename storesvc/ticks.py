"""Time stamps of files, which tell one write of a place from another.

The generation of a file is its inode and the time of its last change (TensorStore's
file driver). A file that is replaced gives its inode back, and kernels may stamp files
by the tick of a clock: two writes within one tick could look the same, and a write
that was conditional on the first could come after the second. So a conditional write
waits until the one before is a tick old; then no generation of a place comes twice.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, Final, Self

import tensorstore as ts

TICK_SECONDS: Final = 0.011
"""Longer than the tick of any kernel: that of Linux is 10 ms at most."""


class Ticks:
    """Those of the files below one root; other storages count their writes."""

    def __init__(self, root: Path | None) -> None:
        self._root = root

    @classmethod
    def of(cls, store: "ts.KvStore") -> Self:
        """Returns those below the root of a storage."""
        spec: dict[str, Any] = store.spec().to_json()
        return cls(Path(spec["path"]) if spec["driver"] == "file" else None)

    async def pass_since(self, place: str) -> None:
        """Waits until a write of a place gets another time stamp than it has."""
        if self._root is None:
            return
        try:
            written = (self._root / place).stat().st_mtime_ns
        except OSError:  # nothing is there, so nothing can be taken for it
            return
        age = (time.time_ns() - written) / 1e9
        if age < TICK_SECONDS:
            await asyncio.sleep(TICK_SECONDS - max(0.0, age))
