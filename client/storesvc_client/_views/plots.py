"""Line plots of a metric over steps, as SVG; no other library draws them.

Greys and the blue of the line can be read on a white and on a black page, so that a
plot needs no background. Checkpoints without the metric, or whose value is not finite,
leave a gap. A point without neighbours is drawn as a dot, and so is every point while
they are few.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

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

_GREY: Final = "#767676"
_BLUE: Final = "#2b83ea"


@dataclass(frozen=True, slots=True, repr=False)
class Plot:
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

    @property
    def svg(self) -> str:
        """Text of the plot, as SVG."""
        return _drawing(f"{self.metric} of {self.run}", self.points)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: "str | PathLike[str]") -> Path:
        """Writes the plot to a file, and returns its path.

        Args:
            path: A path that ends in ``.svg``.

        Raises:
            InvalidRequestError: The path has another suffix.
            OSError: The file cannot be written.
        """
        return write_svg(f"plot of {self.metric}", self.svg, path)


def write_svg(place: str, svg: str, path: "str | PathLike[str]") -> Path:
    """Writes a drawing to a file, and returns its path.

    Raises:
        InvalidRequestError: The path has another suffix.
        OSError: The file cannot be written.
    """
    file = Path(path)
    if file.suffix.lower() != ".svg":
        raise InvalidRequestError(
            f"{place}: expected a file that ends in .svg, got {str(file)!r}"
        )
    file.write_text(svg, encoding="utf-8")
    return file


def make_plot(run: str, metric: str, checkpoints: Iterable["Checkpoint"]) -> Plot:
    """Returns the plot of a metric.

    Raises:
        NotFoundError: No checkpoint has the metric; names the nearest.
    """
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


def _drawing(title: str, points: Sequence[Point]) -> str:
    drawn = [(step, value) for step, value in points if value is not None]
    shown = escape(printable(title))
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="11" fill="{_GREY}">'
    )
    parts = [
        start,
        f"<title>{shown}</title>",
        f'<text x="{_LEFT}" y="20" font-size="14">{shown}</text>',
    ]
    if not drawn:
        parts.append(f'<text x="{_LEFT}" y="{_HEIGHT / 2}">no finite value</text>')
        return "".join([*parts, "</svg>"])
    steps = [float(step) for step, _ in points]
    x, x_ticks = make_scale(steps, _LEFT, _WIDTH - _RIGHT, whole=True)
    values = [value for _, value in drawn]
    y, y_ticks = make_scale(values, _HEIGHT - _BOTTOM, _TOP, whole=False)
    parts += _axes(x, x_ticks, y, y_ticks)
    parts += _line(points, x, y, dots=len(drawn) <= _MANY)
    return "".join([*parts, "</svg>"])


def _axes(x: Scale, x_ticks: Ticks, y: Scale, y_ticks: Ticks) -> list[str]:
    """Returns axes, lines at the ticks, and their texts."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for at, label in y_ticks:
        parts.append(_segment(_LEFT, y(at), right, y(at), opacity=0.3))
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{label}'
            "</text>"
        )
    for at, label in x_ticks:
        parts.append(_segment(x(at), bottom, x(at), bottom + 4))
        parts.append(
            f'<text x="{x(at):.1f}" y="{bottom + 17}" text-anchor="middle">{label}'
            "</text>"
        )
    parts.append(_segment(_LEFT, _TOP, _LEFT, bottom))
    parts.append(_segment(_LEFT, bottom, right, bottom))
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">step</text>'
    )
    return parts


def _segment(
    x1: float, y1: float, x2: float, y2: float, *, opacity: float = 1.0
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{_GREY}" stroke-opacity="{opacity}"/>'
    )


def _line(points: Sequence[Point], x: Scale, y: Scale, *, dots: bool) -> list[str]:
    """Returns a line for each part between gaps, and the dots."""
    parts, stretch = [], list[tuple[int, float]]()
    for step, value in [*points, (0, None)]:
        if value is not None:
            stretch.append((step, value))
            continue
        if len(stretch) > 1:
            places = " ".join(f"{x(at):.1f},{y(v):.1f}" for at, v in stretch)
            parts.append(
                f'<polyline points="{places}" fill="none" stroke="{_BLUE}" '
                'stroke-width="1.8" stroke-linejoin="round"/>'
            )
        if dots or len(stretch) == 1:
            parts += [
                f'<circle cx="{x(at):.1f}" cy="{y(v):.1f}" r="2.6" fill="{_BLUE}">'
                f"<title>step {at}: {number_text(v)}</title></circle>"
                for at, v in stretch
            ]
        stretch = []
    return parts
