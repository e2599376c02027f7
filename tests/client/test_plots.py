"""A run plots a metric over its steps as SVG."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._pictures.plots import Point

SVG = "{http://www.w3.org/2000/svg}"
TREE = {"x": np.ones(1)}


def drawn(plot: store.Plot) -> ET.Element:
    """Returns the parsed plot, which must have finite places within its frame."""
    assert "<script" not in plot.svg
    root = ET.fromstring(plot.svg)
    assert f"{SVG}svg" == root.tag
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for name, most in (("x", width), ("y", height)):
            for attribute in (name, f"{name}1", f"{name}2", f"c{name}"):
                if attribute in element.attrib:
                    assert 0 <= float(element.attrib[attribute]) <= most
    for x, y in (place for line in lines(root) for place in line):
        assert 0 <= x <= width
        assert 0 <= y <= height
    return root


def lines(root: ET.Element) -> list[list[tuple[float, float]]]:
    """Returns the places on each line between gaps."""
    return [
        [
            (float(x), float(y))
            for x, y in (place.split(",") for place in line.attrib["points"].split())
        ]
        for line in root.iter(f"{SVG}polyline")
    ]


def dots(root: ET.Element) -> list[str]:
    """Returns the title of each dot."""
    return ["".join(dot.itertext()) for dot in root.iter(f"{SVG}circle")]


def labels(root: ET.Element, anchor: str) -> list[str]:
    """Returns the texts at an axis."""
    return [
        found.text or ""
        for found in root.iter(f"{SVG}text")
        if found.get("text-anchor") == anchor
    ]


def test_a_metric_is_plotted_over_the_steps(run: store.Run, tmp_path: Path) -> None:
    for step, loss in ((0, 3.0), (100, 2.0), (200, 1.5), (300, 1.0)):
        run.save(step, TREE, metrics={"loss": loss}).result()

    plot = run.plot("loss")

    root = drawn(plot)
    assert ((0, 3.0), (100, 2.0), (200, 1.5), (300, 1.0)) == plot.points
    assert f"<Plot of loss of {run.name}, 4 points>" == repr(plot)
    assert plot.svg == plot._repr_svg_()
    assert f"loss of {run.name}" == root.findtext(f"{SVG}title")
    assert ["0", "50", "100", "150", "200", "250", "300", "step"] == labels(
        root, "middle"
    )
    assert ["1", "1.5", "2", "2.5", "3"] == labels(root, "end")
    (line,) = lines(root)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # it falls
    gaps = np.diff([x for x, _ in line])
    assert np.allclose(gaps, gaps[0], atol=0.11)
    assert ["step 0: 3", "step 100: 2", "step 200: 1.5", "step 300: 1"] == dots(root)

    path = plot.save(tmp_path / "loss.svg")
    assert plot.svg == path.read_text(encoding="utf-8")


def test_missing_and_infinite_values_leave_gaps(run: store.Run) -> None:
    values = [1.0, 2.0, None, 3.0, math.nan, 4.0, 5.0, math.inf]
    for step, value in enumerate(values):
        metrics = {"other": 1.0} if value is None else {"loss": value}
        run.save(step, TREE, metrics=metrics).result()

    plot = run.plot("loss")

    expected = (1.0, 2.0, None, 3.0, None, 4.0, 5.0, None)
    assert tuple(enumerate(expected)) == plot.points
    root = drawn(plot)
    assert [2, 2] == [len(line) for line in lines(root)]
    assert 5 == len(dots(root))
    assert "step 3: 3" in dots(root)


def test_one_point_is_a_dot(run: store.Run) -> None:
    run.save(5, TREE, metrics={"loss": 0.25}).result()

    root = drawn(run.plot("loss"))

    assert [] == lines(root)
    assert ["step 5: 0.25"] == dots(root)
    assert "5" in labels(root, "middle")


def test_a_metric_without_a_finite_value_says_so(run: store.Run) -> None:
    run.save(5, TREE, metrics={"loss": math.nan}).result()

    assert "no finite value" in "".join(drawn(run.plot("loss")).itertext())


def test_an_unknown_metric_is_rejected_with_the_nearest(run: store.Run) -> None:
    with pytest.raises(store.NotFoundError, match=run.name):
        run.plot("loss")
    run.save(1, TREE).result()
    with pytest.raises(store.NotFoundError, match="none has a metric"):
        run.plot("loss")
    run.save(2, TREE, metrics={"loss": 1.0, "accuracy": 0.5}).result()
    with pytest.raises(store.NotFoundError, match="'lsos'; nearest: loss"):
        run.plot("lsos")
    run.save(3, TREE, metrics={"\x1b[2Jloss": 1.0}).result()
    with pytest.raises(store.NotFoundError, match=r"nearest: \\x1b\[2Jloss, loss"):
        run.plot("[2Jloss")  # an error must not control the terminal
    assert f"<Plot of \\x1b[2Jloss of {run.name}, 1 point>" == repr(
        run.plot("\x1b[2Jloss")
    )
    with pytest.raises(store.InvalidRequestError, match="name of a metric, got 7"):
        run.plot(7)  # type: ignore[arg-type]


def test_a_plot_is_saved_as_svg_only(run: store.Run, tmp_path: Path) -> None:
    run.save(1, TREE, metrics={"loss": 1.0}).result()

    with pytest.raises(store.InvalidRequestError, match=r"ends in \.svg, got .*png"):
        run.plot("loss").save(tmp_path / "loss.png")
    assert [] == list(tmp_path.glob("*.png"))


def test_hostile_names_are_drawn_as_text() -> None:
    plot = store.Plot('<script>"&\x07\u202e', "a/b", ((1, 1.0), (2, 2.0)))

    assert '<script>"&\\x07\\u202e of a/b' == drawn(plot).findtext(f"{SVG}title")


def test_many_points_are_a_line_without_dots() -> None:
    points: list[Point] = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[5000] = (5000, None)
    points[5002] = (5002, None)
    plot = store.Plot("loss", "a/b", tuple(points))

    root = drawn(plot)

    before, after = lines(root)
    assert before[-1][0] < after[0][0]
    # a few places for each column of pixels
    assert all(500 < len(line) <= 4 * 300 for line in (before, after))
    assert ["step 5001: "] == [re.sub(r"[-\d.]+$", "", dot) for dot in dots(root)]
    assert len(plot.svg) < 200_000


STEPS = st.integers(0, 2**63 - 1)
VALUES = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(STEPS, VALUES, min_size=1, max_size=20))
@example({0: 1.7976931348623157e308, 1: -1.7976931348623157e308})
@example({0: 5e-324, 1: 0.0})
@example({0: 1e16, 1: 1e16 + 2, 2: 1e16 + 4})
@example({0: 1.79e308})
@example({2**63 - 1: 0.0, 2**63 - 2: -0.0})
def test_any_values_are_drawn_within_the_frame(values: dict[int, float | None]) -> None:
    points: tuple[Point, ...] = tuple(sorted(values.items()))

    root = drawn(store.Plot("loss", "a/b", points))

    known = sum(value is not None for value in values.values())
    assert known == len(dots(root))
    for anchor in ("middle", "end"):
        found = labels(root, anchor)
        assert len(set(found)) == len(found) <= 12
    if known:
        assert len(labels(root, "middle")) >= 2  # a step and the name of the axis


@given(st.floats(1e-6, 1e6), st.floats(-1e6, 1e6))
def test_ticks_are_distinct_and_their_texts_are_their_places(
    span: float, low: float
) -> None:
    root = drawn(store.Plot("loss", "a/b", ((0, low), (1, low + span))))

    ticks = [float(text.replace(",", "")) for text in labels(root, "end")]
    assert len(ticks) >= 2
    assert sorted(set(ticks)) == ticks
    gaps = np.diff(ticks)
    assert np.allclose(gaps, gaps[0], rtol=1e-3)
