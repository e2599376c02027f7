"""The checkpoints of a run over steps or time, with a metric on the same axis.

Each kind of mark has a lane of its own: saved, with deleted checkpoints hollow; tags,
whose names are where no other mark or name is; pinned; held; damaged. Checkpoints that
are close together share a mark, so that a run of 10,000 steps has as many elements as
one of 200. An axis of time has ticks at round hours, days and months of this machine's
zone.

Example:
    >>> checkpoints = run.checkpoints(deleted=True)
    >>> svg = timeline(checkpoints, tags=run.tags.list(), metric="loss")
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from storesvc_client._pictures.plots import (
    Scale,
    Ticks,
    draw_metric,
    draw_y_axis,
    make_scale,
)
from storesvc_client._pictures.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
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
from storesvc_client._values.models import Checkpoint, HoldInfo, Tag
from storesvc_client._views.texts import count_text, printable, time_text

_GAP: Final = 6.0
"""Space between a name and what is next to it."""

_WIDEST: Final = 150.0
"""Width beyond which a name is shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedName:
    text: str
    x: float
    anchor: Literal["start", "end"]
    is_above: bool
    """True for the row above the marks."""


def placed_names(
    marks: Sequence[tuple[float, str]], *, radius: float, width: float
) -> Iterator[PlacedName]:
    """Yields the names that have room: on the right of their mark, on its left, or
    above it.
    """
    beside, above = 0.0, 0.0  # ends of the last name in each row
    edges = [*(x - radius for x, _ in marks[1:]), width]
    before = [0.0, *(x + radius for x, _ in marks[:-1])]
    for (x, name), edge, last in zip(marks, edges, before, strict=True):
        text = fit_text(name, _WIDEST)
        length = text_width(text)
        right, left = x + radius + _GAP - 1, x - radius - _GAP + 1
        if right + length + _GAP <= edge or (edge == width and right + length <= edge):
            yield PlacedName(text=text, x=right, anchor="start", is_above=False)
            beside = right + length
        elif left - length >= max(beside, last) + _GAP:
            yield PlacedName(text=text, x=left, anchor="end", is_above=False)
        elif x - radius >= above + _GAP and x - radius + length <= width:
            yield PlacedName(text=text, x=x - radius, anchor="start", is_above=True)
            above = x - radius + length
        elif x + radius - length >= above + _GAP:
            yield PlacedName(text=text, x=x + radius, anchor="end", is_above=True)
            above = x + radius


_TICKS: Final = 7
"""Maximum number of intervals between ticks."""

_DAY: Final = 86_400
_STEPS: Final = (
    *(1, 2, 5, 10, 30, 60, 120, 300, 600, 1800),
    *(3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600),
    *(days * _DAY for days in (1, 2, 5, 10, 30, 60, 120, 365, 730, 3650, 36_500)),
)
"""Seconds between ticks."""


def make_time_scale(
    times: list[float], start: float, end: float
) -> tuple[Scale, Ticks]:
    """Returns the scale and the ticks of an axis of time."""
    low, high = min(times), max(times)
    if low == high:  # one time: in the middle
        low, high = low - 60, high + 60

    def place(time: float) -> float:
        return start + (end - start) * (time - low) / (high - low)

    step = next((s for s in _STEPS if s * _TICKS >= high - low), _STEPS[-1])
    form = "%Y-%m-%d" if step >= _DAY else "%m-%d %H:%M"
    form = "%H:%M:%S" if step < 60 else form
    ticks = list[tuple[float, str]]()
    # at multiples of the step since a local midnight
    first = datetime.fromtimestamp(low).astimezone()
    time = first.replace(hour=0, minute=0, second=0, microsecond=0)
    while time.timestamp() <= high:
        if time.timestamp() >= low:
            ticks.append((time.timestamp(), time.strftime(form)))
        time += timedelta(seconds=step)
    return place, ticks


BIN: Final = 8.0
"""Width in pixels within which checkpoints share a mark."""

_NAMED: Final = 6
"""Maximum number of names in the tooltip of a mark."""

_Words: TypeAlias = Mapping[str, Sequence[str]]
"""Names of tags, or texts about holds, by uid of the checkpoint."""

_NO_WORDS: Final[_Words] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark of a lane."""

    x: float
    """Place of its middle."""
    count: int
    """Number of checkpoints that it stands for."""
    kept: float
    """Share of them that is not deleted."""
    names: tuple[str, ...]
    """Names of tags, in the lane of tags."""
    title: str
    """Text of the tooltip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks of one kind."""

    name: str
    """"saved", "tags", "pinned", "held" or "damaged"."""
    marks: tuple[Mark, ...]


def make_lanes(
    checkpoints: Sequence[Checkpoint],
    *,
    tags: Iterable[Tag],
    holds: Iterable[HoldInfo],
    damaged: Collection[int],
    at: Callable[[Checkpoint], float],
    place: Scale,
) -> list[Lane]:
    """Returns the lanes that have a mark, from the top to the bottom."""
    names = _group_pairs((tag.uid, tag.name) for tag in tags)
    owners = _group_pairs((hold.uid, f"held by {hold.owner}") for hold in holds)

    def lane(
        name: str, chosen: Iterable[Checkpoint], words: _Words = _NO_WORDS
    ) -> Lane:
        bins = defaultdict[int, list[Checkpoint]](list)
        for one in chosen:
            bins[int(place(at(one)) // BIN)].append(one)
        marks = (_mark(found, at, place, words) for _, found in sorted(bins.items()))
        return Lane(name=name, marks=tuple(marks))

    steps = frozenset(damaged)
    lanes = (
        lane("tags", (one for one in checkpoints if one.uid in names), names),
        lane("saved", checkpoints),
        lane("pinned", (one for one in checkpoints if one.pinned)),
        lane("held", (one for one in checkpoints if one.uid in owners), owners),
        lane("damaged", (one for one in checkpoints if one.step in steps)),
    )
    return [one for one in lanes if one.marks]


def _mark(
    found: Sequence[Checkpoint],
    at: Callable[[Checkpoint], float],
    place: Scale,
    words: _Words,
) -> Mark:
    ordered = sorted(found, key=at)
    places = [place(at(one)) for one in (ordered[0], ordered[-1])]
    deleted = sum(one.delete_time is not None for one in ordered)
    names = [name for one in ordered for name in words.get(one.uid, ())]
    listed = [*map(printable, names[:_NAMED])]
    if len(names) > _NAMED:
        listed.append(f"and {len(names) - _NAMED:,} more")
    return Mark(
        x=sum(places) / 2,
        count=len(ordered),
        kept=1 - deleted / len(ordered),
        names=tuple(names),
        title="\n".join((*_about(ordered, deleted), *listed)),
    )


def _about(ordered: Sequence[Checkpoint], deleted: int) -> list[str]:
    """Returns the lines of a tooltip about checkpoints."""
    first, last = ordered[0], ordered[-1]
    if len(ordered) > 1:
        gone = f", {deleted:,} deleted" if deleted else ""
        steps = f"steps {first.step:,} to {last.step:,}"
        return [f"{count_text(len(ordered), 'checkpoint')}{gone}", steps]
    states = {"deleted": bool(deleted), "pinned": first.pinned}
    lines = [f"step {first.step:,}", f"committed {time_text(first.commit_time)}"]
    return [*lines, *(state for state, applies in states.items() if applies)]


def _group_pairs(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for uid, name in pairs:
        found[uid].append(name)
    return dict(found)


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
    """Returns a timeline as SVG."""
    every = [*checkpoints]
    if not every:
        return note("no checkpoints", width=width)

    def at(checkpoint: Checkpoint) -> float:
        is_step = axis == "step"
        return checkpoint.step if is_step else checkpoint.commit_time.timestamp()

    positions = [at(one) for one in every]
    start, end = _LEFT + _RADIUS + 2, width - _RIGHT
    if axis == "step":
        place, ticks = make_scale(positions, start, end, whole=True)
    else:
        place, ticks = make_time_scale(positions, start, end)
    body, top = list[str](), _TOP
    if metric:
        body += _metric(every, metric, at, place, (top, width))
        top += _METRIC + _TOP
    lanes = make_lanes(
        every, tags=tags, holds=holds, damaged=damaged, at=at, place=place
    )
    tagged = [mark for lane in lanes if lane.name == "tags" for mark in lane.marks]
    marks = [(mark.x, ", ".join(mark.names)) for mark in tagged]
    names = [*placed_names(marks, radius=_RADIUS + 1, width=width)] if marks else []
    if any(name.is_above for name in names):
        top += _NAMES
    bottom = top + _LANE * len(lanes)
    body += _axis(place, ticks, axis, bottom=bottom, width=width)
    for name in names:
        y = top + _LANE / 2 + 4 - (_NAMES if name.is_above else 0.0)
        anchor = {"text_anchor": name.anchor, "pointer_events": "none"}
        body.append(words(name.text, name.x, y, **anchor))
    for row, lane in enumerate(lanes):
        body += _lane(lane, top + _LANE * (row + 0.5), width)
    label = _label(every, lanes, metric, axis)
    return document(body, label=label, width=width, height=bottom + _BOTTOM)


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
    place: Scale, ticks: Ticks, axis: Axis, *, bottom: float, width: float
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
            return _draw_checkpoint(mark, y)
        case "tags":
            ways = ((1, 1), (-1, 1), (-1, -1))
            sides = " ".join(f"l{a * (r + 1)} {b * (r + 1)}" for a, b in ways)
            diamond = f"M{number(x)} {number(y - r - 1)}{sides}z"
            return _path(mark, diamond, fill=PURPLE)
        case "pinned":
            return draw_rect(x - r, y - r, 2 * r, 2 * r, title=mark.title, fill=GREEN)
        case "held":
            ring: Style = {"fill": "none", "stroke": ORANGE, "stroke_width": 2.5}
            return element("circle", title=mark.title, cx=x, cy=y, r=r, **ring)
        case _:
            cross = f"M{number(x - r)} {number(y - r)}l8 8m0 -8l-8 8"
            return _path(mark, cross, fill="none", stroke=RED, stroke_width=2.5)


def _path(mark: Mark, places: str, **attributes: Any) -> str:
    return element("path", title=mark.title, d=places, **attributes)


def _draw_checkpoint(mark: Mark, y: float) -> str:
    """Returns a dot for one checkpoint and a bar for several; hollow if deleted."""
    style: Style = {"stroke": BLUE, "stroke_width": 1.5, "fill": "none"}
    if mark.kept:
        style |= {"fill": BLUE, "fill_opacity": 0.3 + 0.7 * mark.kept}
    if mark.count == 1:
        return element("circle", title=mark.title, cx=mark.x, cy=y, r=_RADIUS, **style)
    wide, tall = BIN - 3.0, 14.0
    corner = mark.x - wide / 2, y - tall / 2
    return draw_rect(*corner, wide, tall, title=mark.title, rx=2, **style)


def _metric(
    every: Sequence[Checkpoint],
    metric: str,
    at: Callable[[Checkpoint], float],
    place: Scale,
    corner: tuple[float, float],
) -> Iterator[str]:
    """Yields the plot of a metric: its axis, lines between gaps, and dots while there
    are few."""
    top, width = corner
    bottom = top + _METRIC
    ordered = sorted(every, key=at)
    points = [(at(one), one.metrics.get(metric, math.nan)) for one in ordered]
    drawn = [value for _, value in points if math.isfinite(value)]
    name = fit_text(metric, width - _RIGHT - _LEFT - 12)
    if not drawn:
        yield words(f"no finite value of {name}", _LEFT + 8, top + _METRIC / 2)
        return
    y, ticks = make_scale(drawn, bottom - 4, top + 4, whole=False)
    named = [
        (value, label if text_width(label) < _LEFT - 8 else f"{value:.2g}")
        for value, label in ticks
    ]
    yield from draw_y_axis(y, named, _LEFT, width - _RIGHT)
    yield words(name, width - _RIGHT - 4, top + 8, text_anchor="end", font_weight=600)
    places = (
        (place(x), y(value), f"step {one.step:,}: {value:.6g}")
        if math.isfinite(value)
        else (place(x), math.nan, "")
        for (x, value), one in zip(points, ordered, strict=True)
    )
    few = len(drawn) <= (width - _LEFT - _RIGHT) / (2 * BIN)
    yield from draw_metric(places, dots=few)
