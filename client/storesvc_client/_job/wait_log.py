"""Times at which a long wait is logged."""

import time
from typing import Final

FIRST_SECONDS: Final = 10.0
"""Seconds after which a wait is first logged; the interval doubles with each line
..."""

MAX_SECONDS: Final = 120.0
"""... up to this."""


class WaitLogTimer:
    """The log times of one wait, which starts now."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = FIRST_SECONDS
        self._next = self._began + self._seconds

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the next log line."""
        return max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        """Returns whether a log line is due; if so, schedules the next one."""
        if self.left:
            return False
        self._seconds = min(2 * self._seconds, MAX_SECONDS)
        self._next = time.monotonic() + self._seconds
        return True
