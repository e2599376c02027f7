"""Statistics of the values of a leaf, in one pass over its chunks and bounded memory.

Example:
    >>> found = opened.statistics("params/kernel")
    >>> found.mean, found.nan_count
    (0.0013, 0)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from storesvc_client._values.models import LeafInfo
from storesvc_client._views.notebook import heading, note, table
from storesvc_client._views.tables import Column
from storesvc_client._views.texts import (
    count_text,
    dtype_text,
    number_text,
    shape_text,
    size_text,
)
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc.format.grids import Region
    from storesvc_client._pictures.picture import Picture
    from storesvc_client._pictures.statistics import Histogram, Means

_PART: Final = 1 << 20
"""Maximum number of elements that are converted at once."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LeafStatistics:
    """Statistics of a leaf; from ``OpenCheckpoint.statistics``.

    NaN and infinite values are counted, and no other number includes them. Of complex
    leaves all numbers are about the modulus.
    """

    leaf: LeafInfo
    """The leaf."""
    count: int
    """Number of elements that were read."""
    read_chunk_count: int
    """Number of chunks that were read."""
    nan_count: int
    """Number of elements that are NaN."""
    inf_count: int
    """Number of elements that are infinite."""
    zero_count: int
    """Number of elements that are 0."""
    minimum: float | None
    """Lowest value; None if none is finite, as are the following."""
    maximum: float | None
    """Highest value."""
    mean: float | None
    """Mean."""
    std: float | None
    """Standard deviation of the population."""
    linear: "Histogram | None"
    """Histogram with bins of one width."""
    symlog: "Histogram | None"
    """Histogram on a symmetric logarithmic scale."""
    means: "Means | None"
    """Means of at most 64 by 64 blocks over the last two axes; None for leaves of rank
    0 and 1."""

    def __repr__(self) -> str:
        return f"<LeafStatistics of {self.leaf.key}, {self.sample}>"

    def _repr_html_(self) -> str:
        values = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "mean": self.mean,
            "standard deviation": self.std,
            "NaN": self.nan_count,
            "infinite": self.inf_count,
            "zero": self.zero_count,
        }
        rows = [(name, number_text(value)) for name, value in values.items()]
        title = f"{self.leaf.key}: {dtype_text(self.leaf)}{shape_text(self.leaf)}"
        columns = (Column(""), Column("", right=True))
        return heading(title) + note(self.sample) + table(columns, rows)

    @property
    def is_sample(self) -> bool:
        """True if not all chunks were read."""
        return self.read_chunk_count < self.leaf.chunk_count

    @property
    def sample(self) -> str:
        """Text about what was read, such as "all 4,096 elements"."""
        if not self.is_sample:
            return f"all {count_text(self.count, 'element')}"
        chunks = f"{self.read_chunk_count:,} of {self.leaf.chunk_count:,} chunks"
        return f"sample of {count_text(self.count, 'element')} in {chunks}"

    @property
    def zero_share(self) -> float:
        """Share of the elements that are 0, from 0 to 1."""
        return self.zero_count / self.count if self.count else 0.0

    def histogram(self, *, scale: Literal["linear", "symlog"] = "symlog") -> "Picture":
        """Returns the histogram as a picture.

        Args:
            scale: "linear" or "symlog".

        Raises:
            InvalidRequestError: The scale is another one.
        """
        from storesvc_client._pictures.histogram_chart import histogram_chart
        from storesvc_client._pictures.picture import Picture

        if scale not in ("linear", "symlog"):
            raise InvalidRequestError(
                f"histogram of {self.leaf.key}: expected scale= 'linear' or 'symlog', "
                f"got {scale!r}"
            )
        found = self.linear if scale == "linear" else self.symlog
        drawing = histogram_chart(found, remark=self.sample)
        return Picture(name=f"histogram of {self.leaf.key}", drawing=drawing)

    def heatmap(self) -> "Picture":
        """Returns the means of blocks as a picture."""
        from storesvc_client._pictures.heatmap import heatmap
        from storesvc_client._pictures.picture import Picture

        drawing = heatmap(self.means, self.leaf.shape, remark=self.sample)
        return Picture(name=f"heatmap of {self.leaf.key}", drawing=drawing)


def leaf_statistics(
    leaf: LeafInfo, blocks: "Iterable[tuple[Region, NDArray[Any]]]"
) -> LeafStatistics:
    """Returns the statistics of a leaf.

    Args:
        leaf: The leaf.
        blocks: Its chunks, or some of them: the region of each, and its values.
    """
    from storesvc.format.dtypes import DTYPES
    from storesvc_client._pictures.statistics import (
        BlockMeans,
        linear_histogram,
        symlog_histogram,
        tallying,
    )

    counters = tallying(DTYPES[leaf.dtype])
    has_blocks = len(leaf.shape) >= 2 and 0 not in leaf.shape
    means = BlockMeans(leaf.shape) if has_blocks else None
    count = chunks = 0
    for region, values in blocks:
        count, chunks = count + values.size, chunks + 1
        for at, part in _parts(region, values):
            counters.add(part)
            if means is not None:
                means.add(at, part)
    tally = counters.tally()
    return LeafStatistics(
        leaf=leaf,
        count=count,
        read_chunk_count=chunks,
        nan_count=tally.nan_count,
        inf_count=tally.inf_count,
        zero_count=tally.zero_count,
        minimum=tally.minimum,
        maximum=tally.maximum,
        mean=tally.mean,
        std=tally.std,
        linear=linear_histogram(tally),
        symlog=symlog_histogram(tally),
        means=None if means is None else means.means(),
    )


def sampled_chunks(leaf: LeafInfo, chunk_bytes: int, budget_bytes: int) -> list[int]:
    """Returns the numbers of the chunks that a budget allows to read: all, or some that
    are evenly distributed.

    Args:
        leaf: The leaf.
        chunk_bytes: Bytes of a chunk.
        budget_bytes: Maximum bytes to read.

    Raises:
        InvalidRequestError: The budget is less than a chunk.
    """
    most = budget_bytes // chunk_bytes if chunk_bytes else leaf.chunk_count
    if most < 1 and leaf.chunk_count:
        raise InvalidRequestError(
            f"statistics of {leaf.key}: expected budget_bytes= of at least one chunk, "
            f"{chunk_bytes} ({size_text(chunk_bytes)}), got {budget_bytes}"
        )
    count = leaf.chunk_count
    if most >= count:
        return [*range(count)]
    return [(2 * at + 1) * count // (2 * most) for at in range(most)]


def _parts(
    region: "Region", values: "NDArray[Any]"
) -> "Iterator[tuple[Region, NDArray[Any]]]":
    """Yields parts of at most ``_PART`` elements, with their regions."""
    if values.size <= _PART:
        if values.size:
            yield region, values
        return
    axis = next(at for at, n in enumerate(values.shape) if n > 1)
    length = values.shape[axis]
    step = max(_PART * length // values.size, 1)
    start = region[axis][0]
    for first in range(0, length, step):
        last = min(first + step, length)
        at = (start + first, start + last)
        index = (*(slice(None),) * axis, slice(first, last))
        yield from _parts((*region[:axis], at, *region[axis + 1 :]), values[index])
