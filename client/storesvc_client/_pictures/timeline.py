"""The checkpoints of a run over steps or time, with a metric on the same axis.

Each kind of mark has a lane of its own: saved, with deleted checkpoints hollow; tags;
pinned; held; damaged. Checkpoints that are close together share a mark, so that a run
of 10,000 steps has as many elements as one of 200.

Example:
    >>> checkpoints = run.checkpoints(deleted=True)
    >>> svg = timeline(checkpoints, tags=run.tags.list(), metric="loss")
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

from storesvc_client._pictures.mark_names import (
    PlacedName,
    needs_row_above,
    placed_names,
)
from storesvc_client._pictures.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    Style,
    document,
    element,
    fitted,
    line,
    note,
    number,
    text_width,
    words,
)
from storesvc_client._pictures.time_axis import time_scale
from storesvc_client._pictures.timeline_marks import BIN, Lane, Mark, lanes_of
from storesvc_client._values.axes import Place, Ticks, scale
from storesvc_client._values.texts import count_text
from storesvc_client._values.values import Checkpoint, HoldInfo, Tag

Axis: TypeAlias = Literal["step", "time"]

# margins
_LEFT: Final = 76.0
_RIGHT: Final = 34.0
_TOP: Final = 14.0
_BOTTOM: Final = 40.0

_METRIC: Final = 180.0
"""Height of the plot of the metric."""

_LANE: Final = 24.0
"""Height of a lane."""

_NAMES: Final = 16.0
"""Height of the row of names above the marks of tags."""

_RADIUS: Final = 4.0

_Value: TypeAlias = tuple[float, float]


def timeline(
    checkpoints: Iterable[Checkpoint],
    *,
    tags: Iterable[Tag] = (),
    holds: Iterable[HoldInfo] = (),
    damaged: Collection[int] = (),
    metric: str = "",
    axis: Axis = "step",
    width: float = 960,
) -> str:
    """Returns a timeline as SVG.

    Args:
        checkpoints: The checkpoints of a run, also deleted ones, in any order.
        tags: Tags of the run.
        holds: Holds of the run.
        damaged: Steps of damaged checkpoints.
        metric: Name of the metric above the lanes; "" for none.
        axis: "step", or "time" of the commits.
        width: Width in pixels.
    """
    every = [*checkpoints]
    if not every:
        return note("no checkpoints", width=width)
    at = _step if axis == "step" else _time
    positions = [at(one) for one in every]
    start, end = _LEFT + _RADIUS + 2, width - _RIGHT
    if axis == "step":
        place, ticks = scale(positions, start, end, whole=True)
    else:
        place, ticks = time_scale(positions, start, end)
    body, top = list[str](), _TOP
    if metric:
        body += _metric(every, metric, at, place, (top, width))
        top += _METRIC + _TOP
    lanes = lanes_of(every, tags=tags, holds=holds, damaged=damaged, at=at, place=place)
    names = [*_names(lanes, width)]
    top += _NAMES if needs_row_above(names) else 0.0
    bottom = top + _LANE * len(lanes)
    body += _axis(place, ticks, axis, bottom=bottom, width=width)
    for name in names:
        body.append(_name(name, top + _LANE / 2))
    for lane in lanes:
        body += _lane(lane, top + _LANE / 2, width)
        top += _LANE
    label = _label(every, lanes, metric, axis)
    return document(body, label=label, width=width, height=bottom + _BOTTOM)


def _step(checkpoint: Checkpoint) -> float:
    return float(checkpoint.step)


def _time(checkpoint: Checkpoint) -> float:
    return checkpoint.commit_time.timestamp()


def _label(
    every: Sequence[Checkpoint], lanes: Sequence[Lane], metric: str, axis: Axis
) -> str:
    """Returns the picture in words."""
    counts = [
        f"{sum(mark.count for mark in lane.marks):,} {lane.name}".replace(
            "tags", "tagged"
        )
        for lane in lanes
        if lane.name != "saved"
    ]
    deleted = sum(one.delete_time is not None for one in every)
    counts += [f"{deleted:,} deleted"] if deleted else []
    checkpoints = ", ".join([count_text(len(every), "checkpoint"), *counts])
    above = f"{metric} and " if metric else ""
    over = "steps" if axis == "step" else "time"
    return f"{above}{checkpoints}, over {over}"


def _axis(
    place: Place, ticks: Ticks, axis: Axis, *, bottom: float, width: float
) -> Iterator[str]:
    """Yields the axis at the bottom, and a line through all lanes at each tick."""
    yield line(_LEFT, bottom, width - _RIGHT, bottom)
    reached = 0.0
    for at, label in ticks:
        x, half = place(at), text_width(label) / 2
        yield line(x, _TOP, x, bottom, opacity=0.12)
        yield line(x, bottom, x, bottom + 4)
        if x - half > reached and x + half < width:
            yield words(label, x, bottom + 17, text_anchor="middle")
            reached = x + half + 6
    middle = (_LEFT + width - _RIGHT) / 2
    yield words(axis, middle, bottom + 33, text_anchor="middle", fill_opacity=0.7)


def _lane(lane: Lane, y: float, width: float) -> Iterator[str]:
    """Yields the name of a lane, its line and its marks."""
    yield words(lane.name, _LEFT - 8, y + 4, text_anchor="end")
    if lane.name != "tags":  # whose names it would cross out
        yield line(_LEFT, y, width - _RIGHT, y, opacity=0.15)
    for mark in lane.marks:
        yield _drawn(lane.name, mark, y)


def _drawn(lane: str, mark: Mark, y: float) -> str:
    x, r = mark.x, _RADIUS
    match lane:
        case "saved":
            return _saved(mark, y)
        case "tags":
            return _path(mark, _diamond(x, y, r + 1), fill=PURPLE)
        case "pinned":
            return element(
                "rect",
                title=mark.title,
                x=x - r,
                y=y - r,
                width=2 * r,
                height=2 * r,
                fill=GREEN,
            )
        case "held":
            return element(
                "circle",
                title=mark.title,
                cx=x,
                cy=y,
                r=r,
                fill="none",
                stroke=ORANGE,
                stroke_width=2.5,
            )
        case _:
            cross = f"M{number(x - r)} {number(y - r)}l8 8m0 -8l-8 8"
            return _path(mark, cross, fill="none", stroke=RED, stroke_width=2.5)


def _path(mark: Mark, places: str, **attributes: Any) -> str:
    return element("path", title=mark.title, d=places, **attributes)


def _diamond(x: float, y: float, r: float) -> str:
    sides = " ".join(f"l{a * r} {b * r}" for a, b in ((1, 1), (-1, 1), (-1, -1)))
    return f"M{number(x)} {number(y - r)}{sides}z"


def _saved(mark: Mark, y: float) -> str:
    """Returns a dot for one checkpoint and a bar for several; hollow if deleted."""
    style: Style = {
        "stroke": BLUE,
        "stroke_width": 1.5,
        "fill": "none",
    }
    if mark.kept:
        style |= {"fill": BLUE, "fill_opacity": 0.3 + 0.7 * mark.kept}
    if mark.count == 1:
        return element("circle", title=mark.title, cx=mark.x, cy=y, r=_RADIUS, **style)
    wide, tall = BIN - 3.0, 14.0
    return element(
        "rect",
        title=mark.title,
        x=mark.x - wide / 2,
        y=y - tall / 2,
        width=wide,
        height=tall,
        rx=2,
        **style,
    )


def _names(lanes: Sequence[Lane], width: float) -> Iterator[PlacedName]:
    """Yields the names of tags that have room."""
    for lane in lanes:
        if lane.name == "tags":
            marks = [(mark.x, ", ".join(mark.names)) for mark in lane.marks]
            yield from placed_names(marks, radius=_RADIUS + 1, width=width)


def _name(name: PlacedName, y: float) -> str:
    y = y + 4 - (_NAMES if name.is_above else 0.0)
    anchor = {"text_anchor": name.anchor, "pointer_events": "none"}
    return words(name.text, name.x, y, **anchor)


def _metric(
    every: Sequence[Checkpoint],
    metric: str,
    at: Callable[[Checkpoint], float],
    place: Place,
    corner: tuple[float, float],
) -> Iterator[str]:
    """Yields the plot of a metric: its axis, lines between gaps, and dots while there
    are few."""
    top, width = corner
    bottom = top + _METRIC
    ordered = sorted(every, key=at)
    points = [(at(one), one.metrics.get(metric, math.nan)) for one in ordered]
    drawn = [value for _, value in points if math.isfinite(value)]
    name = fitted(metric, width - _RIGHT - _LEFT - 12)
    if not drawn:
        yield words(f"no finite value of {name}", _LEFT + 8, top + _METRIC / 2)
        return
    y, ticks = scale(drawn, bottom - 4, top + 4, whole=False)
    for value, label in ticks:
        yield line(_LEFT, y(value), width - _RIGHT, y(value), opacity=0.25)
        text = label if text_width(label) < _LEFT - 8 else f"{value:.2g}"
        yield words(text, _LEFT - 8, y(value) + 4, text_anchor="end")
    yield words(name, width - _RIGHT - 4, top + 8, text_anchor="end", font_weight=600)
    for stretch in _stretches(points):
        yield from _line([(place(x), y(value)) for x, value in stretch])
    if len(drawn) <= (width - _LEFT - _RIGHT) / (2 * BIN):
        for (x, value), one in zip(points, ordered, strict=True):
            if math.isfinite(value):
                yield _dot(place(x), y(value), f"step {one.step:,}: {value:.6g}")


def _stretches(points: Iterable[_Value]) -> Iterator[list[_Value]]:
    """Yields the points between gaps."""
    stretch: list[_Value] = []
    for x, value in (*points, (0.0, math.nan)):
        if math.isfinite(value):
            stretch.append((x, value))
        elif stretch:
            yield stretch
            stretch = []


def _line(places: Sequence[_Value]) -> Iterator[str]:
    if len(places) == 1:
        yield _dot(*places[0], "")
        return
    points = " ".join(f"{number(x)},{number(y)}" for x, y in _thinned(places))
    style: Style = {"stroke_width": 1.8, "stroke_linejoin": "round"}
    yield element("polyline", points=points, fill="none", stroke=BLUE, **style)


def _thinned(places: Sequence[_Value]) -> Iterator[_Value]:
    """Yields the first, lowest, highest and last place of each column of pixels."""
    column: list[_Value] = []
    for place in places:
        if column and int(place[0]) != int(column[0][0]):
            yield from _extremes(column)
            column = []
        column.append(place)
    yield from _extremes(column)


def _extremes(column: Sequence[_Value]) -> list[_Value]:
    if len(column) <= 4:
        return [*column]
    heights = [y for _, y in column]
    low, high = heights.index(min(heights)), heights.index(max(heights))
    return [column[at] for at in sorted({0, low, high, len(column) - 1})]


def _dot(x: float, y: float, title: str) -> str:
    return element("circle", title=title, cx=x, cy=y, r=2.6, fill=BLUE)
