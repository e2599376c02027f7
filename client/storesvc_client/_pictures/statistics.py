"""Counts the values of an array in bounded memory, part by part.

Types of at most 16 bits have one counter for each value: everything is exact. Other
values are counted by sign, exponent and the first 8 bits of the mantissa of their
float64 (8 MiB of counters), so that a histogram of any range and scale can be made
afterwards; mean and standard deviation of parts are combined as Chan, Golub and LeVeque
do (1983), with powers of two taken out where squares would overflow.

NaN and infinite values are counted, and change nothing else.

Means of the blocks of an array: at most 64 by 64, over its last two axes.

Values along earlier axes are in the same mean. Blocks without a finite value, or that
were not read, have none.

Histograms of counted values, on a linear scale and on a symmetric logarithmic one.

Between its linear middle and its ends, a symmetric logarithmic scale shows values of
every magnitude, negative ones too: the place of ``x`` is ``log(1 + |x| / unit)``, with
the sign of ``x``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from storesvc_client._pictures.leaf_statistics import Counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc.format.grids import Region

    F64: TypeAlias = NDArray[np.float64]
    I64: TypeAlias = NDArray[np.int64]

_KEPT_BITS: Final = 20
"""Bits of a float64 that choose its counter: sign, exponent, 8 of the mantissa."""

_DROPPED: Final = np.uint64(64 - _KEPT_BITS)
_POSITIVE: Final = 1 << (_KEPT_BITS - 1)
_SAFE_EXPONENT: Final = 480
"""Exponent of two up to which squares of values, and sums of them, do not overflow."""


_LEAST_EXPONENT: Final = -1100
"""Exponent of two below that of every float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally(Counted):
    """Finite values by place, and what else was counted."""

    low: "F64"
    """Lowest value of each counter, ascending."""
    high: "F64"
    """Highest value of each counter; equal to ``low`` if it counts one value."""
    counts: "I64"


def tallying(dtype: "np.dtype[Any]") -> "_EachValue | _Rounded":
    """Returns counters for arrays of a dtype; of complex values, their modulus is
    counted."""
    if dtype.itemsize <= 2:
        return _EachValue(dtype)
    return _Rounded(dtype)


def as_float64(array: "NDArray[Any]") -> "F64":
    """Returns values as float64; of complex values, the modulus."""
    with np.errstate(all="ignore"):  # NaN of small floats, and modulus beyond float64
        if array.dtype.kind == "c":
            return np.abs(array.astype(np.complex128))
        return array.astype(np.float64)


class _EachValue:
    """One counter for each value of a type of 8 or 16 bits."""

    def __init__(self, dtype: "np.dtype[Any]") -> None:
        self._bits = np.dtype(f"uint{8 * dtype.itemsize}")
        every = np.arange(1 << (8 * dtype.itemsize)).astype(self._bits)
        if dtype.kind == "b":
            self._values = (every > 0).astype(np.float64)
        else:
            self._values = as_float64(every.view(dtype))
        self._counts = np.zeros(len(every), np.int64)

    def add(self, part: "NDArray[Any]") -> None:
        bits = np.ascontiguousarray(part).reshape(-1).view(self._bits)
        self._counts += np.bincount(bits, minlength=len(self._counts))

    def tally(self) -> Tally:
        """Returns what was counted so far."""
        values, counts = self._values, self._counts
        is_there = np.isfinite(values) & (counts > 0)
        # +0 and -0, and bits that a type ignores, are one value
        found, where = np.unique(values[is_there] + 0.0, return_inverse=True)
        each = np.bincount(where, counts[is_there], minlength=len(found))
        total = each.sum()
        mean = float((found * each).sum() / total) if total else None
        std = None
        if mean is not None:
            std = math.sqrt(((found - mean) ** 2 * each).sum() / total)
        return Tally(
            low=found,
            high=found,
            counts=each.astype(np.int64),
            nan_count=int(counts[np.isnan(values)].sum()),
            inf_count=int(counts[np.isinf(values)].sum()),
            zero_count=int(counts[values == 0].sum()),
            minimum=float(found[0]) if total else None,
            maximum=float(found[-1]) if total else None,
            mean=mean,
            std=std,
        )


class _Rounded:
    """Counters of float64 values with the same first bits."""

    def __init__(self, dtype: "np.dtype[Any]") -> None:
        self._is_integer = dtype.kind in "iu"
        self._counts = np.zeros(1 << _KEPT_BITS, np.int64)
        self._nan_count = self._inf_count = self._zero_count = 0
        self._minimum: float = math.inf
        self._maximum: float = -math.inf
        self._moments = _Moments(0, 0.0, 0.0, 0)

    def add(self, part: "NDArray[Any]") -> None:
        values = as_float64(part).reshape(-1)
        is_finite = np.isfinite(values)
        if not is_finite.all():
            nan_count = int(np.isnan(values).sum())
            self._nan_count += nan_count
            self._inf_count += int((~is_finite).sum()) - nan_count
            values = values[is_finite]
        if not len(values):
            return
        ends = (
            (part if self._is_integer else values).min(),
            (part if self._is_integer else values).max(),
        )
        self._minimum = min(self._minimum, ends[0].item())
        self._maximum = max(self._maximum, ends[1].item())
        self._zero_count += len(values) - int(np.count_nonzero(values))
        keys = (values + 0.0).view(np.uint64) >> _DROPPED
        self._counts += np.bincount(keys.astype(np.int64), minlength=len(self._counts))
        self._moments = self._moments.join(_Moments.from_values(values))

    def tally(self) -> Tally:
        keys = np.flatnonzero(self._counts)
        negative, positive = keys[keys >= _POSITIVE][::-1], keys[keys < _POSITIVE]
        nearer, further = self._edges(negative - _POSITIVE)
        low, high = self._edges(positive)
        counts = self._counts[np.concatenate([negative, positive])]
        is_any = len(keys) > 0
        low, high = (
            np.clip(edges, self._minimum, self._maximum) if is_any else edges
            for edges in (
                np.concatenate([-further, low]),
                np.concatenate([-nearer, high]),
            )
        )
        if self._zero_count:  # smaller values share the counter of 0
            low, high, counts = self._without_zeros(low, high, counts)
        return Tally(
            low=low,
            high=high,
            counts=counts,
            nan_count=self._nan_count,
            inf_count=self._inf_count,
            zero_count=self._zero_count,
            minimum=self._minimum if is_any else None,
            maximum=self._maximum if is_any else None,
            mean=self._moments.value_mean if is_any else None,
            std=self._moments.std if is_any else None,
        )

    @staticmethod
    def _edges(keys: "I64") -> "tuple[F64, F64]":
        """Returns the lowest and the highest magnitudes of counters."""
        bits = keys.astype(np.uint64) << _DROPPED
        past = (keys + 1).astype(np.uint64) << _DROPPED
        return bits.view(np.float64), past.view(np.float64)

    def _without_zeros(
        self, low: "F64", high: "F64", counts: "I64"
    ) -> "tuple[F64, F64, I64]":
        """Gives zeros a counter of their own, before the smallest positive values."""
        at = int(np.searchsorted(low, 0.0))
        counts = counts.copy()
        counts[at] -= self._zero_count
        if not counts[at]:
            high = high.copy()
            high[at], counts[at] = 0.0, self._zero_count
            return low, high, counts
        return (
            np.insert(low, at, 0.0),
            np.insert(high, at, 0.0),
            np.insert(counts, at, self._zero_count),
        )


@dataclass(frozen=True, slots=True)
class _Moments:
    """Count, mean, and sum of squared distances from it, of values that are divided by
    a power of two."""

    count: int
    mean: float
    squares: float
    exponent: int

    @classmethod
    def from_values(cls, values: "F64") -> "_Moments":
        """Returns the moments of finite values."""
        peak = max(abs(values.min()), abs(values.max()))
        if not peak:  # an exponent that no other part takes over
            return cls(len(values), 0.0, 0.0, _LEAST_EXPONENT)
        _, exponent = math.frexp(peak)
        if abs(exponent) <= _SAFE_EXPONENT:
            exponent = 0
        else:
            values = np.ldexp(values, -exponent)
        mean = float(values.mean())
        return cls(len(values), mean, float(np.square(values - mean).sum()), exponent)

    def join(self, other: "_Moments") -> "_Moments":
        if not self.count:
            return other
        exponent = max(self.exponent, other.exponent)
        one, two = self.rescale(exponent), other.rescale(exponent)
        count = one.count + two.count
        apart = two.mean - one.mean
        return _Moments(
            count,
            one.mean + apart * (two.count / count),
            one.squares + two.squares + apart**2 * (one.count / count * two.count),
            exponent,
        )

    def rescale(self, exponent: int) -> "_Moments":
        """Returns the same moments, of values divided by another power of two."""
        by = self.exponent - exponent
        squares = math.ldexp(self.squares, 2 * by)
        return _Moments(self.count, math.ldexp(self.mean, by), squares, exponent)

    @property
    def value_mean(self) -> float:
        """Mean of the values themselves."""
        return math.ldexp(self.mean, self.exponent)

    @property
    def std(self) -> float:
        """Standard deviation of the values themselves."""
        return math.ldexp(math.sqrt(self.squares / self.count), self.exponent)


MOST: Final = 64
"""Maximum number of blocks along an axis."""

Means: TypeAlias = tuple[tuple[float | None, ...], ...]
"""Rows of means; None where no finite value was read."""


class BlockMeans:
    """Sums and counts of the blocks of an array of rank 2 or more."""

    def __init__(self, shape: "Sequence[int]") -> None:
        """Creates them.

        Args:
            shape: Shape of the array, at least two sizes, none of them 0.
        """
        self._shape = shape[-2:]
        self._blocks = tuple(min(n, MOST) for n in self._shape)
        self._count = np.zeros(self._blocks)
        self._sums = np.zeros(self._blocks)
        self._divisor = float(np.prod([float(n) for n in shape]))

    def add(self, region: "Region", part: "NDArray[Any]") -> None:
        values = as_float64(part)
        is_finite = np.isfinite(values)
        # divided first, as a sum could overflow
        share = np.where(is_finite, values, 0.0) / self._divisor
        earlier = tuple(range(values.ndim - 2))
        found, sums = (
            is_finite.sum(axis=earlier, dtype=np.float64),
            share.sum(axis=earlier),
        )
        places = []
        for axis, (start, stop) in enumerate(region[-2:]):
            blocks = np.arange(start, stop) * self._blocks[axis] // self._shape[axis]
            firsts = np.flatnonzero(np.diff(blocks, prepend=-1))
            found = np.add.reduceat(found, firsts, axis=axis)
            sums = np.add.reduceat(sums, firsts, axis=axis)
            places.append(blocks[firsts])
        at = np.ix_(*places)
        self._count[at] += found
        self._sums[at] += sums

    def means(self) -> Means:
        is_known = self._count > 0
        scale = self._divisor / np.where(is_known, self._count, 1.0)
        means = self._sums * scale
        return tuple(
            tuple(
                float(mean) if known else None
                for mean, known in zip(row, flags, strict=True)
            )
            for row, flags in zip(means, is_known, strict=True)
        )


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
    return Histogram(
        edges=tuple(map(float, edges)), counts=tuple(counts.tolist()), unit=unit
    )


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
