"""The tally of a verification: what was seen, and how much of it is told.

However much is damaged, what waits to be told is bounded: past a number of damages
only their number is kept.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.inspect.damage import Damage

MAX_DAMAGES: Final = 10_000
"""Told one by one of a checkpoint."""

DAMAGES_A_REPORT: Final = 100
"""Below the limit of a message, with the longest keys."""


@dataclass(frozen=True, slots=True)
class Report:
    """How far a verification is."""

    chunk_count: int
    """Chunks looked at so far."""
    stored_bytes: int
    """Their bytes, as stored."""
    damages: tuple[Damage, ...]
    """Found since the last report."""


class Tally:
    """What a verification has seen, and not yet reported."""

    def __init__(self, chunk_count: int) -> None:
        self.damaged = np.zeros(chunk_count, np.bool_)
        """Chunks that are damaged, however many are told of."""
        self._chunk_count = 0
        self._stored_bytes = 0
        self._found: deque[Damage] = deque()
        self._told = 0
        self._silent: list[Damage] = []
        self._silent_count = 0

    def add(self, found: Iterable[Damage]) -> None:
        """Takes damages; of very many, only their number."""
        for damage in found:
            if damage.chunk is not None:
                self.damaged[damage.chunk] = True
            if self._told < MAX_DAMAGES:
                self._found.append(damage)
                self._told += 1
            else:
                self._silent = self._silent or [damage]
                self._silent_count += 1

    def advance(self, chunk_count: int, stored_bytes: int) -> None:
        """Takes note of chunks that were looked at."""
        self._chunk_count += chunk_count
        self._stored_bytes += stored_bytes

    def close(self) -> None:
        """Sums up what is too much to be told."""
        for first in self._silent:
            message = (
                f"{self._silent_count} more damages, beginning with {first.message}"
            )
            summary = Damage(
                key=first.key, index=first.index, kind=first.kind, message=message
            )
            self._found.append(summary)

    def reports(self) -> Iterator[Report]:
        """Yields all that was not reported yet; one report at least."""
        while True:
            count = min(len(self._found), DAMAGES_A_REPORT)
            told = tuple(self._found.popleft() for _ in range(count))
            yield Report(self._chunk_count, self._stored_bytes, told)
            if not self._found:
                return
