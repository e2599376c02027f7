"""Statistics of the values of a leaf, in one pass over its chunks and bounded memory.

Their pictures are a histogram as bars, and a heatmap of the means of blocks: hue by
sign, strength by magnitude. Values near 0 have the colour of the page, light or dark.

Example:
    >>> found = opened.statistics("params/kernel")
    >>> found.mean, found.nan_count
    (0.0013, 0)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from storesvc_client._pictures.plots import Scale, Ticks, draw_y_axis, make_scale
from storesvc_client._pictures.svg import (
    BLUE,
    Picture,
    Style,
    document,
    draw_rect,
    element,
    fit_text,
    line,
    note,
    number,
    text_width,
    words,
)
from storesvc_client._values.models import LeafInfo
from storesvc_client._views.notebook import heading, table
from storesvc_client._views.notebook import note as notebook_note
from storesvc_client._views.tables import Column
from storesvc_client._views.texts import (
    count_text,
    dtype_text,
    number_text,
    shape_text,
    size_text,
    sizes_text,
)
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc.format.grids import Region
    from storesvc_client._pictures.statistics import Histogram, Means

_PART: Final = 1 << 20
"""Maximum number of elements that are converted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of the values of a leaf, and numbers about those that are finite."""

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LeafStatistics(Counted):
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
        return heading(title) + notebook_note(self.sample) + table(columns, rows)

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

    def histogram(self, *, scale: Literal["linear", "symlog"] = "symlog") -> Picture:
        """Returns the histogram as a picture.

        Args:
            scale: "linear" or "symlog".

        Raises:
            InvalidRequestError: The scale is another one.
        """
        if scale not in ("linear", "symlog"):
            raise InvalidRequestError(
                f"histogram of {self.leaf.key}: expected scale= 'linear' or 'symlog', "
                f"got {scale!r}"
            )
        found = self.linear if scale == "linear" else self.symlog
        drawing = draw_histogram(found, remark=self.sample)
        return Picture(name=f"histogram of {self.leaf.key}", drawing=drawing)

    def heatmap(self) -> Picture:
        """Returns the means of blocks as a picture."""
        drawing = draw_heatmap(self.means, self.leaf.shape, remark=self.sample)
        return Picture(name=f"heatmap of {self.leaf.key}", drawing=drawing)


def leaf_statistics(
    leaf: LeafInfo, blocks: "Iterable[tuple[Region, NDArray[Any]]]"
) -> LeafStatistics:
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
        **{each.name: getattr(tally, each.name) for each in fields(Counted)},
        linear=linear_histogram(tally),
        symlog=symlog_histogram(tally),
        means=None if means is None else means.means(),
    )


def sampled_chunks(leaf: LeafInfo, chunk_bytes: int, budget_bytes: int) -> list[int]:
    """Returns the numbers of the chunks that a budget allows to read: all, or some that
    are evenly distributed."""
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


# margins
_WIDTH: Final = 480.0
_HEIGHT: Final = 240.0
_LEFT: Final = 64.0
_RIGHT: Final = 24.0
_TOP: Final = 12.0
_BOTTOM: Final = 42.0


def draw_histogram(histogram: "Histogram | None", *, remark: str = "") -> str:
    """Returns a histogram as SVG."""
    if histogram is None:
        return note("no finite values", width=_WIDTH)
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    x, x_ticks = _x_axis(histogram, _LEFT, right)
    most = max(histogram.counts)
    y, y_ticks = make_scale([0.0, float(most)], bottom, _TOP, whole=True)
    body = [*_draw_axes(x, x_ticks, y, y_ticks, right=right, bottom=bottom)]
    body += _draw_bars(histogram, x, y, bottom)
    name = "symmetric log scale" if histogram.unit else "linear scale"
    below = f"{name}, {remark}" if remark else name
    shown = fit_text(below, right - _LEFT)
    middle = (_LEFT + right) / 2
    body.append(
        words(shown, middle, _HEIGHT - 8, text_anchor="middle", fill_opacity=0.7)
    )
    low, high = histogram.edges[0], histogram.edges[-1]
    label = f"histogram from {low:.6g} to {high:.6g}, {below}"
    return document(body, label=label, width=_WIDTH, height=_HEIGHT)


def _x_axis(histogram: "Histogram", start: float, end: float) -> tuple[Scale, Ticks]:
    low, high = histogram.edges[0], histogram.edges[-1]
    if low == high:
        place, ticks = make_scale([low], start, end, whole=False)
        return place, [tick for tick in ticks if abs(place(tick[0]) - start) > 1]
    if not histogram.unit:
        return _linear_axis(low, high, start, end)
    from storesvc_client._pictures.statistics import symlog

    unit = histogram.unit
    first, last = symlog(low, unit), symlog(high, unit)

    def place_of(value: float) -> float:
        share = (symlog(value, unit) - first) / (last - first)
        return start + (end - start) * min(max(share, 0.0), 1.0)

    return place_of, [*_powers(low, high, unit)]


def _linear_axis(
    low: float, high: float, start: float, end: float
) -> tuple[Scale, Ticks]:
    # the difference could overflow
    factor = 1.0 if math.isfinite(high - low) else 0.5
    length = high * factor - low * factor

    def place(value: float) -> float:
        share = (value * factor - low * factor) / length
        return start + (end - start) * min(max(share, 0.0), 1.0)

    _, ticks = make_scale([low, high], start, end, whole=False)
    return place, [tick for tick in ticks if low <= tick[0] <= high]


def _powers(low: float, high: float, unit: float) -> Iterator[tuple[float, str]]:
    """Yields 0 and powers of ten of both signs, ascending."""
    first = math.ceil(math.log10(unit) - 1e-9)
    last = math.floor(math.log10(max(abs(low), abs(high))) + 1e-9)
    powers = [
        (10.0**at, f"{10.0**at:,g}" if -3 <= at <= 4 else f"1e{at}")
        for at in range(first, last + 1)
    ]
    every = [*((-value, f"-{text}") for value, text in reversed(powers)), (0.0, "0")]
    every += powers
    yield from (tick for tick in every if low <= tick[0] <= high)


def _draw_axes(
    x: Scale, x_ticks: Ticks, y: Scale, y_ticks: Ticks, *, right: float, bottom: float
) -> Iterator[str]:
    """Yields the axes, lines at the ticks, and their texts as far as they fit."""
    yield from draw_y_axis(y, y_ticks, _LEFT, right)
    # 0 and the ends are named first; the others where there is room
    taken = [(-math.inf, 0.0), (right + _RIGHT, math.inf)]
    last = len(x_ticks) - 1

    def rank(at: int) -> tuple[int, int]:
        if x_ticks[at][0] == 0:
            return 0, at
        return (1, at) if at in (0, last) else (2 + at % 2, at)

    for at, label in (x_ticks[index] for index in sorted(range(last + 1), key=rank)):
        place, half = x(at), text_width(label) / 2 + 4
        yield line(place, bottom, place, bottom + 4)
        if all(place + half <= a or place - half >= b for a, b in taken):
            taken.append((place - half, place + half))
            yield words(label, place, bottom + 17, text_anchor="middle")
    yield line(_LEFT, bottom, right, bottom)


def _draw_bars(
    histogram: "Histogram", x: Scale, y: Scale, bottom: float
) -> Iterator[str]:
    total = sum(histogram.counts)
    edges = zip(histogram.edges[:-1], histogram.edges[1:], strict=True)
    for (low, high), count in zip(edges, histogram.counts, strict=True):
        if not count:
            continue
        left, right = x(low), x(high)
        if low == high and len(histogram.counts) == 1:
            left, right = left - 12, right + 12
        top = min(y(count), bottom - 1)  # one value is seen among millions
        values = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        yield draw_rect(
            *(left, top, max(right - left - 0.5, 0.5), bottom - top),
            title=f"{values}\n{count:,} of {total:,}",
            fill=BLUE,
        )


_NEGATIVE: Final = "#2b83ea"
_POSITIVE: Final = "#d9653b"
_LEVELS: Final = 12
"""Strengths of each hue; all blocks of one are one element."""

_LARGEST_BLOCK: Final = 24.0
_BELOW: Final = 44.0
_SCALE_WIDTH: Final = 160.0
"""Width of the scale of colours."""


def draw_heatmap(
    means: "Means | None", shape: Sequence[int], *, remark: str = ""
) -> str:
    known = [mean for row in means or () for mean in row if mean is not None]
    if means is None or not known:
        text = "a heatmap needs two dimensions" if means is None else "no finite values"
        return note(text, width=_WIDTH)
    columns, rows = len(means[0]), len(means)
    size = min(_WIDTH / columns, _LARGEST_BLOCK)
    strongest = max(abs(min(known)), abs(max(known)))
    body = [*_draw_means(means, size, strongest)]
    top = rows * size + 16
    body += _draw_scale(strongest, top)
    lead = f", mean over {sizes_text(shape[:-2])}" if len(shape) > 2 else ""
    blocks = f"{rows} x {columns} blocks of {sizes_text(shape[-2:])}{lead}"
    caption = f"{blocks}, {remark}" if remark else blocks
    body.append(words(fit_text(caption, _WIDTH), 0, top + 22, fill_opacity=0.7))
    frame: Style = {"fill": "none", "stroke": "currentColor", "stroke_opacity": 0.25}
    body.append(draw_rect(0, 0, columns * size, rows * size, **frame))
    low, high = number_text(min(known)), number_text(max(known))
    label = f"means from {low} to {high} of {caption}"
    return document(body, label=label, width=_WIDTH, height=rows * size + _BELOW)


def _draw_means(means: "Means", size: float, strongest: float) -> Iterator[str]:
    """Yields one path for each strength, and one for blocks without a mean."""
    squares: dict[int | None, list[str]] = {}
    for row, row_means in enumerate(means):
        for column, mean in enumerate(row_means):
            share = (mean or 0) / strongest if strongest else 0
            level = None if mean is None else round(_LEVELS * share)
            x, y, side = (number(n) for n in (column * size, row * size, size))
            square = f"M{x} {y}h{side}v{side}h-{side}z"
            if level is None:  # a cross, so that it differs from 0
                square = f"M{x} {y}l{side} {side}m0 -{side}l-{side} {side}"
            squares.setdefault(level, []).append(square)
    for level, found in squares.items():
        places = "".join(found)
        if level is None:
            yield element(
                "path", d=places, fill="none", stroke="currentColor", stroke_opacity=0.3
            )
        elif level:
            yield element("path", d=places, **_level_style(level))


def _level_style(level: int) -> Style:
    colour = _POSITIVE if level > 0 else _NEGATIVE
    # without smoothing, which would draw lines between neighbours of other strengths
    crisp: Style = {"shape_rendering": "crispEdges"}
    return crisp | {"fill": colour, "fill_opacity": abs(level) / _LEVELS}


def _draw_scale(strongest: float, top: float) -> Iterator[str]:
    """Yields the scale of colours, with its ends and 0."""
    wide, text = _SCALE_WIDTH / (2 * _LEVELS + 1), number_text(strongest)
    yield words(f"-{text}", 0, top + 4)
    start = text_width(f"-{text}") + 8
    for level in range(-_LEVELS, _LEVELS + 1):
        if level:
            x = start + (level + _LEVELS) * wide
            yield draw_rect(x, top - 5, wide, 10, **_level_style(level))
    yield words("0", start + _SCALE_WIDTH / 2, top + 4, text_anchor="middle")
    yield words(text, start + _SCALE_WIDTH + 8, top + 4)
