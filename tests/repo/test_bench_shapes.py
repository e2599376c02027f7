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


def rounds(*seconds: float, slowest: float = 0) -> Any:
    """Rounds that took so many seconds to save, of which an eighth held the caller up,
    and half of that to restore."""
    return [
        {
            "bytes": GB,
            "leaves": 3,
            "save": {
                "seconds": s,
                "returned": s / 8,
                "slowest": slowest,
                "user": 2 * s,
                "sys": s,
            },
            "restore": {"seconds": s / 2, "user": s, "sys": s / 4},
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
    assert 500 == len(draw("leaves", 1, is_quick=True))
    assert 2_000 == len(draw("leaves", 1, is_quick=False))


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
    found = {"orbax": rounds(99, 3, 30, 300), "embedded": rounds(1, 1, 10, 100)}

    measured = ratios.to_orbax(found, "embedded", "save")

    assert measured is not None
    assert (3, 3, 3) == (measured.middle, measured.low, measured.high)


@pytest.mark.parametrize(
    ("last", "is_decided"), [((4, 4, 4, 4, 4), True), ((2, 4, 6, 2, 6), False)]
)
def test_rounds_go_on_until_the_judged_ratios_are_decided(
    last: tuple[float, ...], is_decided: bool
) -> None:
    ones = rounds(*[1] * 6)
    found = {"orbax": rounds(1, *last), "embedded": ones, "sums": rounds(*[1] * 6)}

    assert is_decided == ratios.is_decided(found)


def test_without_a_judged_ratio_nothing_is_decided() -> None:
    assert not ratios.is_decided({"embedded": rounds(*[1] * 9)})


def test_the_worst_and_the_median_shape_are_judged() -> None:
    def found(speed: float) -> Found:
        return {"orbax": rounds(1, *[speed] * 5), "embedded": rounds(*[1] * 6)}

    results = {"rows": found(2), "mesh": found(4), "odd": found(8), "small": found(1)}

    what = "embedded save, speed / orbax, worst shape"
    assert (2, "missed by 29%") == judged(results, what)
    what = "embedded save, speed / orbax, median shape"
    assert (4, "met") == judged(results, what)
    what = "small: embedded save, median / orbax's"
    assert (1, "missed by 100%") == judged(results, what)


def test_the_cpu_of_both_ends_and_modes_is_judged_by_the_floor() -> None:
    results = {
        "rows": {"streamed-none": rounds(1, 3), "grpc-files": rounds(1, 2)},
        "odd": {"streamed-none": rounds(1, 2), "grpc-files": rounds(1, 2)},
    }

    what = "streamed-none save, CPU / grpc-files, worst shape"
    assert (1.5, "missed by 25%") == judged(results, what)


def test_the_cpu_of_restores_is_judged_after_the_first() -> None:
    results = {"rows": {"direct-none": rounds(9, 0.4, 0.4)}}

    what = "direct-none restore, CPU-s/GB, worst shape"
    assert (0.5, "met") == judged(results, what)


def test_the_first_restore_of_a_process_is_judged_apart() -> None:
    results = {"odd": {"direct-none": rounds(2, 1), "orbax": rounds(8, 99)}}

    what = "direct-none first restore, speed / orbax, worst shape"
    assert (4, "met") == judged(results, what)


def test_the_time_until_a_save_returns_is_judged_by_one_copy() -> None:
    results = {"odd": {"embedded": rounds(1, 4), "memcpy": rounds(1, 8)}}

    what = "embedded save returns, time / memcpy, worst shape"
    assert (0.5, "met") == judged(results, what)


def test_a_loop_is_judged_by_its_median_and_its_slowest() -> None:
    results = {
        "small": {"embedded": rounds(1, 2, 2, slowest=8), "orbax": rounds(1, 4, 4)}
    }

    what = "small: embedded save, median / orbax's"
    assert (0.5, "met") == judged(results, what)
    what = "small: embedded save, slowest / median"
    assert (4, "missed by 33%") == judged(results, what)


def test_without_results_every_bar_is_not_measured() -> None:
    assert {None} == {verdict.value for verdict in verdicts({}, BARS)}
    absent = {name: {"orbax": [{"absent": "x"}]} for name in SHAPES}
    assert {None} == {verdict.value for verdict in verdicts(absent, BARS)}


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ("rows", "0.50 0.25 1.00 8.00 4.00 1.00 0.50 2.00 4.00 1.00"),
        ("leaves", "2.00 4.00 1.00 8.00 4.00 1.00 2.00 0.50 4.00 1.00"),
        (
            "small",
            "2000 4000 5000 8000 4000 1000 2000 500 4000 1000",
        ),
    ],
)
def test_a_table_shows_rates_or_times(shape: str, line: str) -> None:
    lines = table(shape, {"embedded": rounds(1, 2, 4, 6, slowest=5)}).splitlines()

    assert lines[0].startswith(f"{shape}: ")
    assert "1,000.0 MB, 3 leaves, 3 rounds after the first" in lines[0]
    name, *cells = lines[-1].split()
    assert name == "embedded"
    assert list(map(float, line.split())) == list(map(float, cells))


def test_a_table_compares_saves_with_orbax_and_with_the_floors() -> None:
    found = {
        "memcpy": rounds(1, 1, 1),
        "sums": rounds(1, 2, 2),
        "embedded": rounds(1, 2, 4),
        "direct-none": rounds(1, 2, 4),
        "orbax": rounds(1, 4, 4),
    }

    *_, embedded, direct, _ = table("rows", found).splitlines()

    # to Orbax: the best, the median of the rounds; back; CPU
    assert ["2.00", "1.50"] == embedded.split()[4:6]
    assert ["3.00", "1.50"] == embedded.split()[8:10]
    assert ["1.50"] == direct.split()[8:9]


def test_the_last_table_marks_what_is_not_decided() -> None:
    ones = rounds(*[1] * 6)
    results = {
        "rows": {"orbax": rounds(*[3] * 6), "embedded": ones},
        "odd": {"orbax": rounds(1, 2, 4, 6, 8, 9), "embedded": ones},
    }

    lines = ratios_table(results).splitlines()

    assert ["rows", "3.00", "3.00"] == lines[2].split()
    assert ["odd", "6.00?", "6.00?"] == lines[3].split()
    assert ["worst", "3.00", "3.00"] == lines[4].split()
    assert ["median", "4.50", "4.50"] == lines[5].split()
    assert lines[-1].startswith("?: not decided")


def test_nothing_compared_is_no_table() -> None:
    assert ratios_table({"rows": {"embedded": rounds(1, 1)}}) == ""
