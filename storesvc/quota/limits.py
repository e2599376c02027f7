"""Limits of namespaces and principals: rules, rates and counts.

Nothing here waits or reads a clock: times are arguments.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

BURST_SECONDS: Final = 2.0
"""A rate may be exceeded by the calls of this time, after a pause as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRule:
    """Maximum amounts; 0: unlimited."""

    namespaces: tuple[str, ...] = ()
    """Patterns of namespaces; empty: the rule of each principal."""
    stored_bytes: int = 0
    """Bytes that the checkpoints of a namespace store."""
    stored_bytes_soft: int = 0
    """Stored bytes above which the server warns."""
    streams: int = 0
    """Streams with data or tables at a time."""
    watches: int = 0
    """Watches at a time."""
    uploads: int = 0
    """Uploads that were begun and have not ended."""
    bytes_in_flight: int = 0
    """Memory for chunks that streams may hold in the server."""
    requests_per_second: int = 0
    """Calls that begin in a second."""


def rule_of(rules: Iterable[QuotaRule], namespace: str) -> QuotaRule | None:
    """Returns the first rule that matches a namespace; None if there is none."""
    for rule in rules:
        if any(fnmatchcase(namespace, pattern) for pattern in rule.namespaces):
            return rule
    return None


class Bucket:
    """A token bucket: limits a rate. Calls that come too early take their turn later,
    in the order in which they come."""

    def __init__(self, *, now: float) -> None:
        self._at = now
        self._level = math.inf
        """Calls that may begin at once; negative: calls that wait."""

    def take(self, rate: float, *, now: float, most_seconds: float) -> float | None:
        """Takes a turn, and returns the time until it; None: the wait would be longer
        than the maximum, and no turn is taken.

        Args:
            rate: Calls a second.
            now: The time.
            most_seconds: Maximum wait.
        """
        level = self._filled(rate, now) - 1.0
        wait = max(0.0, -level / rate)
        if wait > most_seconds:
            return None
        self._level, self._at = level, now
        return wait

    def used(self, rate: float, *, now: float) -> int:
        """Returns how many calls of a second are used up."""
        burst = max(1.0, rate * BURST_SECONDS)
        return round(min(rate, burst - self._filled(rate, now)))

    def _filled(self, rate: float, now: float) -> float:
        burst = max(1.0, rate * BURST_SECONDS)
        return min(burst, self._level + (now - self._at) * rate)
