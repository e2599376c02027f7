"""When it is time to log a wait."""

import time
from typing import Final

LOOK_SECONDS: Final = 10.0
"""After which a wait is first told; it is told again after twice as long, and so on,"""

MOST_LOOK_SECONDS: Final = 120.0
"""up to this."""


class Looks:
    """Of one wait, which begins."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = LOOK_SECONDS
        self._next = self._began + self._seconds

    @property
    def waited(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until it is time."""
        return max(0.0, self._next - time.monotonic())

    def are_due(self) -> bool:
        """Returns whether it is time; if so, the next time is later."""
        if self.left:
            return False
        self._seconds = min(2 * self._seconds, MOST_LOOK_SECONDS)
        self._next = time.monotonic() + self._seconds
        return True
