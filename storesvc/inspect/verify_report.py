"""Tally of a verification: counts chunks and damages, and cuts them into reports.

Memory is bounded, however much is damaged: damages beyond a maximum are only counted.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from storesvc.inspect.damage import Damage

MAX_DAMAGES: Final = 10_000
"""Maximum damages of a checkpoint that are reported one by one."""

DAMAGES_A_REPORT: Final = 100
"""Maximum damages of a report: it fits a message even with the longest keys."""


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of a verification since it began."""

    chunk_count: int
    """Chunks read so far."""
    stored_bytes: int
    """Stored bytes of these chunks."""
    damages: tuple[Damage, ...]
    """Damages found since the last report."""


class Tally:
    """The result of a verification, as far as it has not been reported."""

    def __init__(self, chunk_count: int) -> None:
        self.damaged = np.zeros(chunk_count, np.bool_)
        """For each ordinal whether its chunk is damaged, reported or not."""
        self._chunk_count = 0
        self._stored_bytes = 0
        self._found: deque[Damage] = deque()
        self._reported_count = 0
        self._first_excess: list[Damage] = []
        self._excess_count = 0

    def add(self, found: Iterable[Damage]) -> None:
        """Adds damages; beyond ``MAX_DAMAGES`` only counts them."""
        for damage in found:
            if damage.chunk is not None:
                self.damaged[damage.chunk] = True
            if self._reported_count < MAX_DAMAGES:
                self._found.append(damage)
                self._reported_count += 1
            else:
                self._first_excess = self._first_excess or [damage]
                self._excess_count += 1

    def advance(self, chunk_count: int, stored_bytes: int) -> None:
        """Adds chunks that were read."""
        self._chunk_count += chunk_count
        self._stored_bytes += stored_bytes

    def close(self) -> None:
        """Adds one damage that stands for all beyond ``MAX_DAMAGES``."""
        for first in self._first_excess:
            message = (
                f"{self._excess_count} more damages, beginning with {first.message}"
            )
            summary = Damage(
                key=first.key, index=first.index, kind=first.kind, message=message
            )
            self._found.append(summary)

    def reports(self) -> Iterator[Report]:
        """Yields all that was not reported yet, in one report or more."""
        while True:
            count = min(len(self._found), DAMAGES_A_REPORT)
            damages = tuple(self._found.popleft() for _ in range(count))
            yield Report(self._chunk_count, self._stored_bytes, damages)
            if not self._found:
                return
