"""Means of the blocks of an array: at most 64 by 64, over its last two axes.

Values along earlier axes are in the same mean. Blocks without a finite value, or that
were not read, have none.
"""

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from storesvc_client._pictures.value_tally import as_float64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from storesvc.format.grids import Region

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
        """Adds the values of a region."""
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
        """Returns the means."""
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
