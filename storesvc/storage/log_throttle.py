"""Throttles the log: one line per key every 10 seconds.

A storage in trouble fails hundreds of requests per second, all in the same way. This
module decides only: times are seconds of any monotonic clock.

Example:
    >>> throttle = LogThrottle()
    >>> [throttle.admits("late", now=now) for now in (0, 9, 10, 11)]
    [True, False, True, False]
"""

from collections.abc import Hashable
from typing import Final

PAUSE_SECONDS: Final = 10.0
"""Minimum time between two lines of one key."""


class LogThrottle:
    """Decides which lines of one log are written. Thread-safe."""

    def __init__(self) -> None:
        self._admitted: dict[Hashable, float] = {}

    def admits(self, key: Hashable, *, now: float) -> bool:
        """Returns whether a line may be logged now; if so, the pause of its key begins.

        Args:
            key: Lines with an equal key are alike. Keys are kept: use few.
            now: The current time.
        """
        last = self._admitted.get(key)
        if last is not None and now - last < PAUSE_SECONDS:
            return False
        self._admitted[key] = now
        return True
