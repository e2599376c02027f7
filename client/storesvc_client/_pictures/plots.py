"""Line plots of a metric over steps, and what they share with other pictures.

Checkpoints without the metric, or whose value is not finite, leave a gap. A point
without neighbours is drawn as a dot, and so is every point while they are few.

Example:
    >>> plot = Plot("loss", "prod/llama-8b", ((1, 2.5), (2, None), (3, 1.5)))
    >>> plot.save("loss.svg")

An axis has ticks at round numbers:

    >>> scale, ticks = make_scale([0.0, 100.0], 0.0, 700.0, whole=True)
    >>> scale(50.0)
    350.0
    >>> [label for _, label in ticks]
    ['0', '20', '40', '60', '80', '100']
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeAlias

from storesvc_client._pictures.svg import (
    BLUE,
    Drawing,
    document,
    element,
    escape_text,
    line,
    number,
    words,
)
from storesvc_client._views.texts import number_text, printable
from storesvc_client.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from storesvc_client._values.models import Checkpoint

Scale: TypeAlias = Callable[[float], float]
"""Returns the place of a value on an axis."""

Ticks: TypeAlias = Sequence[tuple[float, str]]
"""Values of ticks, and their texts."""

_TICKS: Final = 7
"""Maximum number of intervals between ticks."""

_MAX: Final = 1e300


def make_scale(
    values: Sequence[float], start: float, end: float, *, whole: bool
) -> tuple[Scale, Ticks]:
    """Returns the scale and the ticks of an axis.

    Args:
        values: The values, all finite; those beyond 1e300 are drawn at the edge.
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


def draw_y_axis(y: Scale, ticks: Ticks, left: float, right: float) -> Iterator[str]:
    """Yields a line at each tick, and its text on the left."""
    for at, label in ticks:
        yield line(left, y(at), right, y(at), opacity=0.25)
        yield words(label, left - 8, y(at) + 4, text_anchor="end")


_Place: TypeAlias = tuple[float, float]


def draw_metric(
    points: Iterable[tuple[float, float, str]], *, dots: bool
) -> Iterator[str]:
    """Yields a line for each part between gaps, and the dots.

    Args:
        points: The place of each point, from the left, and its tooltip; a place whose
            height is NaN is a gap.
        dots: Whether each point has a dot; those without neighbours have one anyway.
    """
    for is_gap, together in groupby(points, key=lambda point: math.isnan(point[1])):
        if is_gap:
            continue
        stretch = [*together]
        if len(stretch) > 1:
            thinned = _thin_places([(x, y) for x, y, _ in stretch])
            yield element(
                "polyline",
                points=" ".join(f"{number(x)},{number(y)}" for x, y in thinned),
                fill="none",
                stroke=BLUE,
                stroke_width=1.8,
                stroke_linejoin="round",
            )
        if dots or len(stretch) == 1:
            for x, y, title in stretch:
                yield element("circle", title=title, cx=x, cy=y, r=2.6, fill=BLUE)


def _thin_places(places: Sequence[_Place]) -> Iterator[_Place]:
    """Yields the first, lowest, highest and last place of each column of pixels."""
    for _, together in groupby(places, key=lambda place: int(place[0])):
        column = [*together]
        heights = [y for _, y in column]
        low, high = heights.index(min(heights)), heights.index(max(heights))
        for at in sorted({0, low, high, len(column) - 1}):
            yield column[at]


Point: TypeAlias = tuple[int, float | None]
"""Step and value; None where the metric is missing."""

_WIDTH: Final = 640
_HEIGHT: Final = 320
# margins
_LEFT: Final = 76
_RIGHT: Final = 16
_TOP: Final = 34
_BOTTOM: Final = 46

_MANY: Final = 80
"""Points above which only those without neighbours are drawn as dots."""


@dataclass(frozen=True, slots=True, repr=False)
class Plot(Drawing):
    """A plot of a metric over the steps of a run; returned by ``Run.plot``.

    A notebook shows it; ``svg`` is its text, and ``save`` writes that to a file.

    >>> run.plot("loss").save("loss.svg")
    """

    metric: str
    """Name of the metric."""
    run: str
    """Name of the run, ``namespace/run``."""
    points: tuple[Point, ...]
    """Steps, ascending, and their values; None where a checkpoint lacks the metric or
    it is not finite."""

    def __repr__(self) -> str:
        drawn = sum(value is not None for _, value in self.points)
        points = f"{drawn} {'point' if drawn == 1 else 'points'}"
        return f"<Plot of {printable(self.metric)} of {self.run}, {points}>"

    def _draw(self) -> tuple[str, str]:
        title = f"{self.metric} of {self.run}"
        parts = _draw_parts(title, self.points)
        drawing = document(parts, label=title, width=_WIDTH, height=_HEIGHT)
        return f"plot of {self.metric}", drawing


def make_plot(run: str, metric: str, checkpoints: Iterable["Checkpoint"]) -> Plot:
    """Returns the plot of a metric."""
    if not isinstance(metric, str):
        raise InvalidRequestError(
            f"plot of {run}: expected the name of a metric, got {metric!r}"
        )
    points, known = list[Point](), set[str]()
    for found in checkpoints:
        known.update(found.metrics)
        value = found.metrics.get(metric)
        is_drawn = value is not None and math.isfinite(value)
        points.append((found.step, value if is_drawn else None))
    if metric not in known:
        # names come from the store, and may have characters that control a terminal
        nearest = [*map(printable, get_close_matches(metric, known, cutoff=0.0))]
        raise NotFoundError(
            f"no checkpoint of {run} has the metric {metric!r}; "
            + (f"nearest: {', '.join(nearest)}" if nearest else "none has a metric")
        )
    return Plot(metric, run, tuple(sorted(points)))


def _draw_parts(title: str, points: Sequence[Point]) -> Iterator[str]:
    """Yields the titles, the axes and the line."""
    yield element("title", escape_text(title))
    yield words(title, _LEFT, 20, font_size=14)
    values = [value for _, value in points if value is not None]
    if not values:
        yield words("no finite value", _LEFT, _HEIGHT / 2)
        return
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    x, x_ticks = make_scale(
        [float(step) for step, _ in points], _LEFT, right, whole=True
    )
    y, y_ticks = make_scale(values, bottom, _TOP, whole=False)
    yield from draw_y_axis(y, y_ticks, _LEFT, right)
    for at, label in x_ticks:
        yield line(x(at), bottom, x(at), bottom + 4)
        yield words(label, x(at), bottom + 17, text_anchor="middle")
    yield line(_LEFT, _TOP, _LEFT, bottom)
    yield line(_LEFT, bottom, right, bottom)
    yield words("step", (_LEFT + right) / 2, _HEIGHT - 10, text_anchor="middle")
    places = (
        (x(step), math.nan, "")
        if value is None
        else (x(step), y(value), f"step {step}: {number_text(value)}")
        for step, value in points
    )
    yield from draw_metric(places, dots=len(values) <= _MANY)
