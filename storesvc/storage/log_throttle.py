"""Lines for the log, sparingly: of many that tell alike, one in a while.

A storage in trouble fails hundreds of requests in a second, all of them the same way.
Decides only: moments are seconds of any clock that never goes back.

Example:
    >>> lines = Sparing()
    >>> [lines.admits("late", now=now) for now in (0, 9, 10, 11)]
    [True, False, True, False]
"""

from collections.abc import Hashable
from typing import Final

PAUSE_SECONDS: Final = 10.0
"""Between two lines that tell alike."""


class Sparing:
    """Lines of one log. Threads may share it."""

    def __init__(self) -> None:
        self._admitted: dict[Hashable, float] = {}

    def admits(self, kind: Hashable, *, now: float) -> bool:
        """Returns whether there was no line of a kind in the last while.

        Args:
            kind: What the line tells; of few.
            now: When.
        """
        last = self._admitted.get(kind)
        if last is not None and now - last < PAUSE_SECONDS:
            return False
        self._admitted[kind] = now
        return True
