"""Axes of plots: the place of a value, and ticks at round numbers.

Example:
    >>> place, ticks = scale([0.0, 100.0], 0.0, 700.0, whole=True)
    >>> place(50.0)
    350.0
    >>> [label for _, label in ticks]
    ['0', '20', '40', '60', '80', '100']
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

Place: TypeAlias = Callable[[float], float]
"""Returns the place of a value on an axis."""

Ticks: TypeAlias = Sequence[tuple[float, str]]
"""Values of ticks, and their texts."""

_TICKS: Final = 7
"""Maximum number of intervals between ticks."""

_MAX: Final = 1e300


def scale(
    values: Sequence[float], start: float, end: float, *, whole: bool
) -> tuple[Place, Ticks]:
    """Returns the place of a value on an axis, and the ticks with their texts.

    Args:
        values: The values, all finite; those beyond 1e300 are drawn at the edge.
        start: Place of the lowest value.
        end: Place of the highest value.
        whole: Whether ticks must be whole numbers.
    """
    low, high = (min(max(v, -_MAX), _MAX) for v in (min(values), max(values)))
    margin = 0.0 if whole else 0.05 * (high - low)
    resolution = max(abs(low) * 1e-15, abs(high) * 1e-15, 1 / _MAX)
    if high - low <= resolution:  # one value: in the middle
        margin = max(abs(low) * 0.05, 1.0)
    # there is no step below 0
    low = max(low - margin, 0.0) if whole and low >= 0 else low - margin
    high += margin
    step = _nice((high - low) / _TICKS)
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step), math.floor(high / step)
    # significant digits by which neighbouring ticks differ
    exact = math.log10(max(abs(low), abs(high)) / step)
    digits = min(max(math.ceil(exact + 1e-9) + 1, 1), 17)
    labels = {_label(i * step, digits): i * step for i in range(first, last + 1)}

    def place(value: float) -> float:
        share = (value - low) / (high - low)
        return start + (end - start) * min(max(share, 0.0), 1.0)

    return place, [(at, label) for label, at in labels.items()]


def _nice(length: float) -> float:
    """Returns the least of 1, 2 and 5 times a power of ten that is not shorter."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= length * (1 - 1e-9))


def _label(value: float, digits: int) -> str:
    if abs(value) < 1e7 and value == int(value):
        return f"{int(value):,}"
    return f"{value:.{max(digits, 2)}g}"
