"""The benchmark of shapes draws by its seed, and judges by paired ratios."""

from typing import Any

import pytest

from benchmarks.shapes import ratios
from benchmarks.shapes.bars import BARS
from benchmarks.shapes.drawing import (
    DEVICES,
    QUICK_STATE_BYTES,
    SHAPES,
    SHARD_BYTES,
    STATE_BYTES,
    draw,
)
from benchmarks.shapes.tables import ratios_table, table
from benchmarks.speed.bars import Found, Results, verdicts

SIZED = [name for name, shape in SHAPES.items() if shape.judged == "size"]
GB = 10**9


def rounds(*seconds: float, slowest: float = 0, **figures: float) -> Any:
    """Rounds that took so many seconds to save, and half of that to restore."""
    return [
        {
            "bytes": GB,
            "leaves": 3,
            "save": {"seconds": s, "slowest": slowest, "user": 2 * s, "sys": s}
            | figures,
            "restore": {"seconds": s / 2, "slowest": 0, "user": s, "sys": s / 4},
        }
        for s in seconds
    ]


def judged(results: Results, what: str) -> tuple[float | None, str]:
    """Returns the value and the verdict of a bar."""
    (verdict,) = [v for v in verdicts(results, BARS) if v.bar.what == what]
    return verdict.value, str(verdict)


@pytest.mark.parametrize("name", SHAPES)
def test_a_seed_draws_the_same_leaves_and_another_seed_others(name: str) -> None:
    drawn = draw(name, 1, is_quick=True)

    assert drawn == draw(name, 1, is_quick=True)
    assert drawn != draw(name, 2, is_quick=True)


@pytest.mark.parametrize("name", SHAPES)
def test_devices_divide_the_dimensions_that_they_share(name: str) -> None:
    for seed in range(5):
        for leaf in draw(name, seed, is_quick=True).values():
            parts = [1 if axis is None else leaf.mesh[axis] for axis in leaf.split]
            assert [0] * len(parts) == [
                n % part for n, part in zip(leaf.shape, parts, strict=True)
            ]
            assert len(leaf.mesh) <= 2
            assert leaf.mesh[0] * leaf.mesh[-1] <= DEVICES**2


@pytest.mark.parametrize("name", [name for name in SIZED if name != "one"])
def test_sizes_of_states_and_shards_are_in_their_ranges(name: str) -> None:
    for seed in range(20):
        leaves = draw(name, seed, is_quick=False).values()
        shards = [leaf.shard_bytes for leaf in leaves]
        total = sum(leaf.size_bytes for leaf in leaves)

        assert SHARD_BYTES[0] * 0.8 < min(shards)
        assert max(shards) < SHARD_BYTES[1] * 1.2
        assert STATE_BYTES[0] * 0.9 < total < STATE_BYTES[1] * 1.1


def test_quick_states_are_smaller() -> None:
    leaves = draw("rows", 1, is_quick=True).values()

    assert sum(leaf.size_bytes for leaf in leaves) < QUICK_STATE_BYTES[1] * 1.2
    assert 2_000 == len(draw("leaves", 1, is_quick=True))
    assert 50_000 == len(draw("leaves", 1, is_quick=False))


def test_odd_dimensions_are_not_divided_by_eight_devices() -> None:
    for leaf in draw("odd", 1, is_quick=False).values():
        assert all(n % 2 for n in leaf.shape)


def test_the_interval_of_equal_ratios_is_a_point() -> None:
    found = ratios.interval([2.0] * 5)

    assert (2, 2, 2) == (found.middle, found.low, found.high)
    assert found.is_decided


def test_an_interval_holds_its_median_and_is_reproducible() -> None:
    measured = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    found = ratios.interval(measured)

    assert 1 <= found.low < found.middle == 4 < found.high <= 7
    assert found == ratios.interval(measured)
    assert not found.is_decided


def test_few_rounds_decide_nothing_even_if_they_agree() -> None:
    assert not ratios.interval([2.0] * 4).is_decided


def test_ratios_are_paired_within_rounds_and_leave_out_the_first() -> None:
    found = {"orbax": rounds(99, 3, 30, 300), "direct": rounds(1, 1, 10, 100)}

    measured = ratios.to_orbax(found, "direct", "save")

    assert measured is not None
    assert (3, 3, 3) == (measured.middle, measured.low, measured.high)


@pytest.mark.parametrize(
    ("last", "is_decided"), [((4, 4, 4, 4, 4), True), ((2, 4, 6, 2, 6), False)]
)
def test_rounds_go_on_until_the_judged_ratios_are_decided(
    last: tuple[float, ...], is_decided: bool
) -> None:
    ones = rounds(*[1] * 6)
    found = {"orbax": rounds(1, *last), "direct": ones, "streamed": rounds(*[1] * 6)}

    assert is_decided == ratios.is_decided(found)


def test_without_a_judged_ratio_nothing_is_decided() -> None:
    assert not ratios.is_decided({"direct": rounds(*[1] * 9)})


def test_the_worst_and_the_median_shape_are_judged() -> None:
    def found(speed: float) -> Found:
        return {"orbax": rounds(1, *[speed] * 5), "direct": rounds(*[1] * 6)}

    results = {"rows": found(2), "mesh": found(4), "odd": found(8), "leaves": found(1)}

    what = "direct save, speed / orbax, worst shape"
    assert (2, "missed by 20%") == judged(results, what)
    what = "direct save, speed / orbax, median shape"
    assert (4, "met") == judged(results, what)
    what = "leaves: direct save, speed / orbax"
    assert (1, "missed by 75%") == judged(results, what)


def test_the_cpu_of_both_ends_and_modes_is_judged_by_the_floor() -> None:
    results = {
        "rows": {"streamed": rounds(1, 3), "grpc-files": rounds(1, 2)},
        "odd": {"streamed": rounds(1, 2), "grpc-files": rounds(1, 2)},
    }

    what = "streamed save, CPU / grpc-files, worst shape"
    assert (1.5, "missed by 25%") == judged(results, what)


def test_the_cpu_of_restores_is_judged_after_the_first() -> None:
    results = {"rows": {"direct": rounds(9, 0.4, 0.4)}}

    what = "direct restore, CPU-s/GB after the first, worst shape"
    assert (0.5, "met") == judged(results, what)


def test_a_loop_is_judged_by_its_median_and_its_slowest() -> None:
    results = {
        "small": {"direct": rounds(1, 2, 2, slowest=8), "orbax": rounds(1, 4, 4)}
    }

    what = "small: direct save in a loop, median / orbax's"
    assert (0.5, "met") == judged(results, what)
    what = "small: direct save in a loop, slowest / median"
    assert (4, "missed by 33%") == judged(results, what)


def test_without_results_every_bar_is_not_measured() -> None:
    assert {None} == {verdict.value for verdict in verdicts({}, BARS)}
    absent = {name: {"orbax": [{"absent": "x"}]} for name in SHAPES}
    assert {None} == {verdict.value for verdict in verdicts(absent, BARS)}


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ("rows", "direct              0.50    0.25    1.00    8.00    4.00"),
        ("leaves", "direct              2.00    4.00    1.00    8.00    4.00"),
        ("small", "direct           2000.00 4000.00 5000.00 8000.00 4000.00"),
    ],
)
def test_a_table_shows_rates_or_times(shape: str, line: str) -> None:
    lines = table(shape, {"direct": rounds(1, 2, 4, 6, slowest=5)}).splitlines()

    assert lines[0].startswith(f"{shape}: ")
    assert "1,000.0 MB, 3 leaves, 3 rounds after the first" in lines[0]
    assert lines[-1].startswith(line)


def test_the_last_table_marks_what_is_not_decided() -> None:
    ones = rounds(*[1] * 6)
    results = {
        "rows": {"orbax": rounds(*[3] * 6), "direct": ones},
        "odd": {"orbax": rounds(1, 2, 4, 6, 8, 9), "direct": ones},
    }

    lines = ratios_table(results).splitlines()

    assert "3.00 [3.00, 3.00] " in lines[1]
    assert "6.00 [2.00, 9.00]?" in lines[2]
    assert ["worst", "3.00", "3.00"] == lines[3].split()
    assert ["median", "4.50", "4.50"] == lines[4].split()
    assert lines[-1].startswith("?: not decided")


def test_nothing_compared_is_no_table() -> None:
    assert ratios_table({"rows": {"direct": rounds(1, 1)}}) == ""
