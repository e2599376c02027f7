"""A histogram as bars.

Example:
    >>> svg = histogram_chart(statistics.symlog, remark=statistics.sample)
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from storesvc_client._pictures.svg import (
    BLUE,
    document,
    element,
    fit_text,
    line,
    note,
    text_width,
    words,
)
from storesvc_client._views.axes import Place, Ticks, scale

if TYPE_CHECKING:
    from storesvc_client._pictures.statistics import Histogram

# margins
_LEFT: Final = 64.0
_RIGHT: Final = 24.0
_TOP: Final = 12.0
_BOTTOM: Final = 42.0


def histogram_chart(
    histogram: "Histogram | None",
    *,
    remark: str = "",
    width: float = 480,
    height: float = 240,
) -> str:
    """Returns a histogram as SVG.

    Args:
        histogram: Bins; None if no value is finite.
        remark: Text below, about what was counted.
        width: Width in pixels.
        height: Height in pixels.
    """
    if histogram is None:
        return note("no finite values", width=width)
    bottom, right = height - _BOTTOM, width - _RIGHT
    x, x_ticks = _x_axis(histogram, _LEFT, right)
    most = max(histogram.counts)
    y, y_ticks = scale([0.0, float(most)], bottom, _TOP, whole=True)
    body = [*_axes(x, x_ticks, y, y_ticks, right=right, bottom=bottom)]
    body += _bars(histogram, x, y, bottom)
    name = "symmetric log scale" if histogram.unit else "linear scale"
    below = f"{name}, {remark}" if remark else name
    shown = fit_text(below, right - _LEFT)
    middle = (_LEFT + right) / 2
    body.append(
        words(shown, middle, height - 8, text_anchor="middle", fill_opacity=0.7)
    )
    low, high = histogram.edges[0], histogram.edges[-1]
    label = f"histogram from {low:.6g} to {high:.6g}, {below}"
    return document(body, label=label, width=width, height=height)


def _x_axis(histogram: "Histogram", start: float, end: float) -> tuple[Place, Ticks]:
    low, high = histogram.edges[0], histogram.edges[-1]
    if low == high:
        place, ticks = scale([low], start, end, whole=False)
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
) -> tuple[Place, Ticks]:
    # the difference could overflow
    factor = 1.0 if math.isfinite(high - low) else 0.5
    length = high * factor - low * factor

    def place(value: float) -> float:
        share = (value * factor - low * factor) / length
        return start + (end - start) * min(max(share, 0.0), 1.0)

    _, ticks = scale([low, high], start, end, whole=False)
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


def _axes(
    x: Place, x_ticks: Ticks, y: Place, y_ticks: Ticks, *, right: float, bottom: float
) -> Iterator[str]:
    """Yields the axes, lines at the ticks, and their texts as far as they fit."""
    for at, label in y_ticks:
        yield line(_LEFT, y(at), right, y(at), opacity=0.2)
        yield words(label, _LEFT - 6, y(at) + 4, text_anchor="end")
    # 0 and the ends are named first; the others where there is room
    taken = [(-math.inf, 0.0), (right + _RIGHT, math.inf)]
    order = sorted(range(len(x_ticks)), key=lambda at: _rank(at, x_ticks))
    for at, label in (x_ticks[number] for number in order):
        place, half = x(at), text_width(label) / 2 + 4
        yield line(place, bottom, place, bottom + 4)
        if all(place + half <= a or place - half >= b for a, b in taken):
            taken.append((place - half, place + half))
            yield words(label, place, bottom + 17, text_anchor="middle")
    yield line(_LEFT, bottom, right, bottom)


def _rank(at: int, ticks: Ticks) -> tuple[int, int]:
    value, _ = ticks[at]
    if value == 0:
        return 0, at
    return (1, at) if at in (0, len(ticks) - 1) else (2 + at % 2, at)


def _bars(histogram: "Histogram", x: Place, y: Place, bottom: float) -> Iterator[str]:
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
        yield element(
            "rect",
            title=f"{values}\n{count:,} of {total:,}",
            x=left,
            y=top,
            width=max(right - left - 0.5, 0.5),
            height=bottom - top,
            fill=BLUE,
        )
