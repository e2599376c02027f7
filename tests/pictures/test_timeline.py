"""A timeline has a mark for each state of a checkpoint, with a metric above it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._pictures.svg import BLUE, GREEN, ORANGE, PURPLE, RED, text_width
from storesvc_client._pictures.timeline import (
    make_lanes,
    make_time_scale,
    placed_names,
    timeline,
)
from tests.pictures.models import START, checkpoint, hold, tag
from tests.pictures.parsed import HOSTILE, SVG, filled, parsed, texts, titles

FEW = [
    checkpoint(100, metrics={"loss": 3.0}, deleted=True),
    checkpoint(200, metrics={"loss": 2.0}, pinned=True),
    checkpoint(300, metrics={"loss": math.nan}),
    checkpoint(400, metrics={"loss": 1.0}),
]


def saved_dots(root: ET.Element) -> list[ET.Element]:
    """Returns the marks of single checkpoints, from the left to the right."""
    found = [
        one
        for one in root.iter(f"{SVG}circle")
        if one.get("stroke") == BLUE and one.get("r") == "4"
    ]
    return sorted(found, key=lambda one: float(one.attrib["cx"]))


def test_each_checkpoint_has_a_dot_that_is_hollow_if_it_is_deleted() -> None:
    dots = saved_dots(parsed(timeline(FEW)))

    assert ["none", BLUE, BLUE, BLUE] == [dot.get("fill") for dot in dots]
    places = [float(dot.attrib["cx"]) for dot in dots]
    gaps = [right - left for left, right in pairwise(places)]
    assert gaps[0] == pytest.approx(gaps[1], abs=0.02)
    assert gaps[0] == pytest.approx(gaps[2], abs=0.02)
    assert "deleted" in (dots[0].findtext(f"{SVG}title") or "")


def test_tags_pins_holds_and_damage_have_lanes_of_their_own() -> None:
    root = parsed(
        timeline(
            FEW,
            tags=[tag("best", 400), tag("gone", 7)],
            holds=[hold("eval", 300)],
            damaged={100},
        )
    )

    shown = texts(root)
    assert {"tags", "saved", "pinned", "held", "damaged", "best"} <= {*shown}
    assert "gone" not in shown  # no checkpoint of the list
    assert 1 == len(filled(root, "path", PURPLE))
    assert 1 == len(filled(root, "rect", GREEN))
    assert [ORANGE] == [
        one.get("stroke")
        for one in root.iter(f"{SVG}circle")
        if one.get("stroke") == ORANGE
    ]
    assert 1 == sum(one.get("stroke") == RED for one in root.iter(f"{SVG}path"))
    assert any("held by eval" in title for title in titles(root))
    assert (
        "4 checkpoints, 1 tagged, 1 pinned, 1 held, 1 damaged, 1 deleted, over steps"
        == root.attrib["aria-label"]
    )


def test_lanes_without_a_mark_are_left_out() -> None:
    shown = texts(parsed(timeline([checkpoint(1)])))

    assert "saved" in shown
    assert not {"tags", "pinned", "held", "damaged"} & {*shown}


def test_a_run_without_checkpoints_says_so() -> None:
    assert ["no checkpoints"] == texts(parsed(timeline([])))


def test_the_metric_is_drawn_above_its_checkpoints() -> None:
    root = parsed(timeline(FEW, metric="loss"))

    values = [one for one in filled(root, "circle", BLUE) if one.get("r") == "2.6"]
    finite = [
        dot for dot, one in zip(saved_dots(root), FEW, strict=True) if one.step != 300
    ]
    assert {dot.attrib["cx"] for dot in finite} == {one.attrib["cx"] for one in values}
    assert "step 200: 2" in titles(root)
    (line,) = root.iter(f"{SVG}polyline")  # 300 is a gap
    assert 2 == len(line.attrib["points"].split())
    heights = [float(place.split(",")[1]) for place in line.attrib["points"].split()]
    assert heights[0] < heights[1]  # 3.0 is above 2.0


@pytest.mark.parametrize(
    "values", [(-3.3138184e226, -3.3138185e226), (1e-300, 2e-300), (1e308, -1e308)]
)
def test_a_metric_of_any_magnitude_stays_in_its_frame(values: Sequence[float]) -> None:
    every = [
        checkpoint(step, metrics={"loss": value}) for step, value in enumerate(values)
    ]

    (line,) = parsed(timeline(every, metric="loss")).iter(f"{SVG}polyline")

    assert 2 == len(line.attrib["points"].split())


def test_a_metric_without_finite_values_says_so() -> None:
    root = parsed(timeline(FEW, metric="accuracy"))

    assert "no finite value of accuracy" in texts(root)
    assert 4 == len(saved_dots(root))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300, unique=True))
def test_no_checkpoint_is_lost_where_several_share_a_mark(steps: list[int]) -> None:
    every = [checkpoint(step, deleted=step % 3 == 0, minutes=0) for step in steps]

    (lane,) = make_lanes(
        every,
        tags=(),
        holds=(),
        damaged=(),
        at=lambda one: float(one.step),
        place=lambda step: step / 1e6,
    )

    assert len(steps) == sum(mark.count for mark in lane.marks)
    kept = sum(mark.count * mark.kept for mark in lane.marks)
    assert sum(step % 3 != 0 for step in steps) == pytest.approx(kept)
    parsed(timeline(every))


def test_ten_thousand_steps_have_as_few_elements_as_two_hundred() -> None:
    many = [
        checkpoint(
            step,
            metrics={"loss": 1 / (step + 1)},
            pinned=step % 7 == 0,
            deleted=step % 2 == 0,
        )
        for step in range(10_000)
    ]

    root = parsed(
        timeline(
            many,
            metric="loss",
            tags=[tag(f"tag-{step}", step) for step in range(0, 10_000, 3)],
            holds=[hold("eval", step) for step in range(0, 10_000, 3)],
            damaged=range(0, 10_000, 5),
        )
    )

    assert len([*root.iter()]) < 1_500
    assert any("deleted\nsteps 0 to" in title for title in titles(root))
    assert len(ET.tostring(root)) < 200_000


@pytest.mark.parametrize("spike", range(5_000, 5_012, 2))
def test_a_spike_of_one_step_is_still_drawn_among_many(spike: int) -> None:
    many = [
        checkpoint(step, metrics={"loss": 9.0 if step == spike else 1.0})
        for step in range(10_000)
    ]

    (line,) = parsed(timeline(many, metric="loss")).iter(f"{SVG}polyline")

    heights = [float(place.split(",")[1]) for place in line.attrib["points"].split()]
    assert len(heights) < 4_000
    assert 1 == sum(height < 100 for height in heights)


def test_over_time_distances_are_those_of_the_commits() -> None:
    every = [checkpoint(step, minutes=at) for step, at in ((1, 0), (2, 90), (3, 120))]

    root = parsed(timeline(every, axis="time"))

    first, second, third = (float(dot.attrib["cx"]) for dot in saved_dots(root))
    assert (second - first) == pytest.approx(3 * (third - second), abs=0.05)
    assert "time" in texts(root)


@given(st.floats(1e9, 4e9), st.floats(0, 3e9).map(lambda length: min(length, 3e9)))
def test_ticks_of_time_are_few_and_within_the_axis(start: float, length: float) -> None:
    place, ticks = make_time_scale([start, start + length], 0, 700)

    assert len(ticks) <= 9
    assert all(-1e-6 <= place(at) <= 700 + 1e-6 for at, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


def test_ticks_of_a_day_are_round_hours() -> None:
    start = START.timestamp()

    _, ticks = make_time_scale([start, start + 86_400], 0, 700)

    assert 4 <= len(ticks)
    assert {":00"} == {label[-3:] for _, label in ticks}


@given(
    st.lists(st.floats(80, 900), min_size=1, max_size=30, unique=True),
    st.integers(0, 40),
)
def test_names_of_marks_do_not_overlap(places: list[float], length: int) -> None:
    marks = [(x, "n" * (length + at % 5)) for at, x in enumerate(sorted(places))]

    found = [*placed_names(marks, radius=5, width=960)]

    for is_above in (True, False):
        row = [one for one in found if one.is_above == is_above]
        ends = [
            (one.x, one.x + text_width(one.text))
            if one.anchor == "start"
            else (one.x - text_width(one.text), one.x)
            for one in row
        ]
        assert all(end <= 960 for _, end in ends)
        assert all(left[1] <= right[0] for left, right in pairwise(ends))
        if not is_above:
            for x, _ in marks:
                assert not any(left < x < right for left, right in ends)


def test_names_of_two_tags_at_the_right_edge_are_both_shown() -> None:
    steps = [checkpoint(step) for step in range(0, 41_000, 1_000)]

    shown = texts(
        parsed(
            timeline(steps, tags=[tag("best", 38_000), tag("latest-stable", 40_000)])
        )
    )

    assert {"best", "latest-stable"} <= {*shown}


def test_hostile_names_of_a_run_are_texts_and_not_markup() -> None:
    every = [checkpoint(1, metrics={HOSTILE: 1.0}), checkpoint(2)]

    svg = timeline(
        every, tags=[tag(HOSTILE, 1)], holds=[hold(HOSTILE, 2)], metric=HOSTILE
    )

    parsed(svg)
    assert "<script" not in svg
    assert "&lt;script&gt;alert(1)" in svg
