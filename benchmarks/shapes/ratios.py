"""Ratios to other contenders, paired within rounds, and how certain their median is.

Pure functions of the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.speed.bars import Found, Rounds

Figure: TypeAlias = Callable[[Mapping[str, Any], str], float]
"""Reads a figure of a round in a phase."""

LEAST_ROUNDS: Final = 5
"""Rounds that an interval needs: that of fewer would be narrow by chance."""

WIDTH: Final = 0.1
"""Width below which an interval decides, as a share of the ratio."""

_DRAWS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median, and the interval that holds it with 95 %."""

    middle: float
    low: float
    high: float
    count: int
    """Rounds it is of."""

    @property
    def is_decided(self) -> bool:
        """Whether the interval is narrow."""
        width = self.high - self.low
        return self.count >= LEAST_ROUNDS and width < WIDTH * self.middle


def seconds(round_: Mapping[str, Any], phase: str) -> float:
    """Returns the seconds of a phase."""
    return float(round_[phase]["seconds"])


def returned(round_: Mapping[str, Any], phase: str) -> float:
    """Returns the seconds until a save gave control back to its caller."""
    return float(round_[phase]["returned"])


def cpu(round_: Mapping[str, Any], phase: str) -> float:
    """Returns the CPU seconds of a phase, of both ends and in both modes."""
    return float(round_[phase]["user"] + round_[phase]["sys"])


def measured(found: Found, name: str) -> Rounds:
    """Returns the rounds of a contender after the first, which warms up.

    Raises:
        LookupError: There are none.
    """
    rounds = found[name]
    if "absent" in rounds[0] or len(rounds) < 2:
        raise LookupError(name)
    return rounds[1:]


def interval(ratios: Sequence[float]) -> Interval:
    """Returns the median of ratios, and its interval by bootstrap; the same ratios have
    the same interval."""
    drawn = np.random.default_rng(0).choice(ratios, (_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Interval(
        middle=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        count=len(ratios),
    )


def ratio(found: Found, phase: str, figure: Figure, above: str, below: str) -> Interval:
    """Returns the ratio of a figure of two contenders, paired by round.

    Raises:
        LookupError: One of them was not measured.
    """
    pairs = zip(measured(found, above), measured(found, below), strict=True)
    return interval([figure(a, phase) / figure(b, phase) for a, b in pairs])


def first(found: Found, phase: str, above: str, below: str) -> float:
    """Returns the ratio of the seconds of two contenders in the first round.

    Raises:
        LookupError: One of them was not measured.
    """
    measured(found, above)
    measured(found, below)
    return seconds(found[above][0], phase) / seconds(found[below][0], phase)


def to_orbax(found: Found, name: str, phase: str) -> Interval | None:
    """Returns the ratio of a contender's speed to Orbax's; None: not measured."""
    try:
        return ratio(found, phase, seconds, "orbax", name)
    except LookupError:
        return None


def is_decided(found: Found) -> bool:
    """Returns whether all ratios that bars judge are decided, and there are any."""
    known = []
    for phase in ("save", "restore"):
        for figure, above, below in JUDGED:
            try:
                known.append(ratio(found, phase, figure, above, below))
            except LookupError:
                continue
    return bool(known) and all(each.is_decided for each in known)


JUDGED: Final[Sequence[tuple[Figure, str, str]]] = (
    (seconds, "orbax", "embedded"),
    (seconds, "orbax", "direct-none"),
    (cpu, "streamed-none", "grpc-files"),
    (cpu, "streamed-none-tls", "grpc-files-tls"),
)
"""Ratios that bars judge."""
