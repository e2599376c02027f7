"""Histograms of counted values, on a linear scale and on a symmetric logarithmic one.

Between its linear middle and its ends, a symmetric logarithmic scale shows values of
every magnitude, negative ones too: the place of ``x`` is ``log(1 + |x| / unit)``, with
the sign of ``x``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from storesvc_client._pictures.value_tally import Tally

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc_client._pictures.value_tally import F64

BINS: Final = 64

_SMALL_SHARE: Final = 0.01
"""Share of the values other than 0 that are in the linear middle of a scale."""

_DECADES: Final = 2.0**30
"""Largest ratio of the largest magnitude and the unit of a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Numbers of values in 64 bins; in one bin if all values are equal."""

    edges: tuple[float, ...]
    """Edges of the bins, ascending: one more than bins."""
    counts: tuple[int, ...]
    """Number of values in each bin; a value at an edge is in the bin above it."""
    unit: float | None
    """Unit of the symmetric logarithmic scale; None: the scale is linear."""


def linear_histogram(tally: Tally) -> Histogram | None:
    """Returns the histogram with bins of one width; None without finite values."""
    ends = _ends(tally)
    if ends is None:
        return None
    shares = np.linspace(0.0, 1.0, BINS + 1)
    # a difference of the ends could overflow
    edges = ends[0] * (1 - shares) + ends[1] * shares
    return _histogram(tally, ends, edges, unit=None)


def symlog_histogram(tally: Tally) -> Histogram | None:
    """Returns the histogram on a symmetric logarithmic scale; None without finite
    values."""
    ends = _ends(tally)
    if ends is None:
        return None
    unit = _unit(tally)
    start, stop = (symlog(end, unit) for end in ends)
    places = np.linspace(start, stop, BINS + 1)
    edges = np.sign(places) * unit * np.expm1(np.abs(places))
    return _histogram(tally, ends, edges, unit=unit)


def symlog(value: float, unit: float) -> float:
    """Returns the place of a value on a symmetric logarithmic scale."""
    return math.copysign(math.log1p(abs(value) / unit), value)


def _ends(tally: Tally) -> tuple[float, float] | None:
    if tally.minimum is None or tally.maximum is None:
        return None
    return float(tally.minimum), float(tally.maximum)


def _unit(tally: Tally) -> float:
    """Returns the magnitude below which few values are."""
    magnitudes = np.maximum(np.abs(tally.low), np.abs(tally.high))
    is_some = magnitudes > 0
    if not is_some.any():
        return 1.0
    order = np.argsort(magnitudes[is_some])
    ordered, counts = magnitudes[is_some][order], tally.counts[is_some][order]
    at = np.searchsorted(np.cumsum(counts), _SMALL_SHARE * counts.sum())
    largest = float(ordered[-1])
    tiny = float(np.finfo(np.float64).tiny)
    return max(float(ordered[at]), largest / _DECADES, tiny)


def _histogram(
    tally: Tally, ends: tuple[float, float], edges: "F64", *, unit: float | None
) -> Histogram:
    low, high = ends
    if low == high:
        total = int(tally.counts.sum())
        return Histogram(edges=ends, counts=(total,), unit=unit)
    edges = np.maximum.accumulate(np.clip(edges, low, high))
    edges[0], edges[-1] = low, high
    below = _count_below(tally, edges)
    counts = np.diff(np.rint(below)).astype(np.int64)
    return Histogram(edges=_floats(edges), counts=tuple(counts.tolist()), unit=unit)


def _count_below(tally: Tally, edges: "F64") -> "F64":
    """Returns the number of values below each edge; at the last edge, of all."""
    is_point = tally.low == tally.high
    points, counts = tally.low[is_point], tally.counts[is_point]
    sums = np.concatenate([[0], np.cumsum(counts)])
    below = sums[np.searchsorted(points, edges, side="left")].astype(np.float64)
    below[-1] = sums[-1]
    if is_point.all():
        return below
    # Values of a counter are taken to be spread evenly over it. np.interp would divide
    # by the widths, and overflow.
    low, high = tally.low[~is_point], tally.high[~is_point]
    counts = tally.counts[~is_point]
    before = np.cumsum(counts) - counts
    at = np.maximum(np.searchsorted(low, edges, side="right") - 1, 0)
    share = (np.clip(edges, low[at], high[at]) - low[at]) / (high[at] - low[at])
    spread: F64 = below + before[at] + share * counts[at]
    return spread


def _floats(values: "NDArray[np.float64] | Sequence[float]") -> tuple[float, ...]:
    return tuple(map(float, values))
