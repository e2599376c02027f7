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
    requests_per_second: int = 0
    """Calls that begin in a second."""


def rule_of(rules: Iterable[QuotaRule], namespace: str) -> QuotaRule | None:
    """Returns the first rule that matches a namespace; None if there is none."""
    for rule in rules:
        if any(fnmatchcase(namespace, pattern) for pattern in rule.namespaces):
            return rule
    return None


class Bucket:
    """A token bucket: limits a rate."""

    def __init__(self, *, now: float) -> None:
        self._at = now
        self._level = math.inf
        """Calls that may begin at once; at most the burst."""

    def seconds_until_free(self, rate: float, *, now: float) -> float:
        """Returns the time until a call may begin; 0: it may begin now, and is
        counted.

        Args:
            rate: Calls a second.
            now: The time.
        """
        burst = max(1.0, rate * BURST_SECONDS)
        self._level = min(burst, self._level + (now - self._at) * rate)
        self._at = now
        if self._level < 1.0:
            return (1.0 - self._level) / rate
        self._level -= 1.0
        return 0.0

    def used(self, rate: float, *, now: float) -> int:
        """Returns how many calls of a second are used up."""
        burst = max(1.0, rate * BURST_SECONDS)
        level = min(burst, self._level + (now - self._at) * rate)
        return round(min(rate, burst - level))
