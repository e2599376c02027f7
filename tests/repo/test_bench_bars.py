"""The benchmark judges by its bars what it measured, and only that."""

from typing import Any

import pytest

from benchmarks.speed.bars import BARS, Results, verdicts
from benchmarks.speed.links import LATENCY_SECONDS, bound, save_bound_seconds
from benchmarks.speed.tables import bars_table, table
from benchmarks.speed.works import CONTENDERS, WORKS


def judged(results: Results, what: str) -> tuple[float | None, str]:
    """Returns the value and the verdict of a bar."""
    (verdict,) = [each for each in verdicts(results) if each.bar.what == what]
    return verdict.value, str(verdict)


def phased(work: str, **seconds: float) -> Results:
    """A restore that took each contender so many seconds."""
    return {
        f"{work} on tmpfs": {
            name.replace("_", "-"): [{"bytes": 2 * 10**9, "restore": {"seconds": s}}]
            for name, s in seconds.items()
        }
    }


def figures(work: str, name: str, **values: Any) -> Results:
    return {f"{work} on tmpfs": {name: [values]}}


def test_without_results_every_bar_is_not_measured() -> None:
    assert {(None, "not measured")} == {(v.value, str(v)) for v in verdicts({})}


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1, "met"), (2, "met"), (2.5, "missed by 20%")]
)
def test_a_speed_is_judged_as_a_ratio(seconds: float, verdict: str) -> None:
    results = phased("lm", direct_none=seconds, orbax=10)

    what = "lm: direct-none restore, speed / orbax"
    assert (10 / seconds, verdict) == judged(results, what)


def test_a_bar_needs_both_contenders() -> None:
    what = "lm: direct-none restore, speed / orbax-raw"

    assert (None, "not measured") == judged(phased("lm", direct_none=1, orbax=10), what)


def test_contenders_that_are_not_installed_are_not_measured() -> None:
    results = figures("lora", "embedded", absent="x is not installed")

    what = "lora: embedded, bytes / first save"
    assert (None, "not measured") == judged(results, what)


def test_a_save_to_a_bucket_is_judged_by_the_bound_of_its_link() -> None:
    half = 2 * save_bound_seconds(10**9)  # seconds at half the speed of the bound
    results = figures(
        "gcs", "bucket", bytes=10**9, save={"seconds": half, "extra_mib": 256}
    )

    assert (0.5, "missed by 44%") == judged(
        results, "gcs: bucket save, speed / bound of the link"
    )
    assert (256, "met") == judged(results, "gcs: bucket save, MiB above the state")


def test_the_bound_of_a_save_is_a_round_trip_and_the_rate_of_fifteen_connections() -> (
    None
):
    assert LATENCY_SECONDS + 1 == pytest.approx(save_bound_seconds(750e6))


def test_the_table_of_a_bucket_has_the_part_of_the_bound_that_is_reached() -> None:
    took = {"seconds": 2 * save_bound_seconds(10**9), "cpu_seconds": 1, "extra_mib": 0}
    measured = [{"bytes": 10**9, "save": took, "restore": took}]
    measured[0]["first"] = {"save": 1, "restore": 1}

    lines = table("gcs", "tmpfs", {"bucket": measured}).splitlines()

    (reached,) = [line for line in lines if line.startswith("of the bound")]
    assert "0.50" == reached.split()[3]


def test_latency_bounds_small_requests_and_the_rate_large_ones() -> None:
    assert 10 / LATENCY_SECONDS == pytest.approx(bound(10, 1), rel=1e-6)
    assert 10 * 50e6 == pytest.approx(bound(10, 10**12), rel=1e-4)


def test_a_figure_is_the_median_of_the_rounds() -> None:
    rounds = [{"time_share": share} for share in (0.1, 0.3, 0.9)]
    results = {"lora on tmpfs": {"embedded": rounds}}

    what = "lora: embedded, time / first save"
    assert (0.3, "missed by 50%") == judged(results, what)


def test_results_on_disk_are_judged_by_no_bar() -> None:
    results = {"lora on disk": {"embedded": [{"time_share": 0.1}]}}

    what = "lora: embedded, time / first save"
    assert (None, "not measured") == judged(results, what)


@pytest.mark.parametrize(("ours", "copies"), [("direct-none", 0), ("embedded", 1)])
def test_a_save_in_the_background_may_hold_one_copy_of_the_state_any_save_64_mib(
    ours: str, copies: int
) -> None:
    save = {"extra_mib": 1000.0 * copies + 64}
    results = figures("lm", ours, bytes=1000 << 20, save=save)

    what = f"lm: {ours} save, MiB above the budget"
    assert (64, "met") == judged(results, what)


def test_the_cpu_of_the_server_is_counted_for_each_gb() -> None:
    restore = {"others_cpu_seconds": 1.5}
    results = figures("lm", "streamed-none", bytes=2 * 10**9, restore=restore)

    what = "lm: streamed-none restore, CPU-s/GB of the server"
    assert (0.75, "missed by 25%") == judged(results, what)


def test_the_table_has_a_line_for_each_bar() -> None:
    first, *lines = bars_table(verdicts({})).splitlines()

    assert first.startswith("bar ")
    assert [bar.what for bar in BARS] == [line[:68].rstrip() for line in lines]


def test_bars_are_about_works_that_there_are() -> None:
    assert {bar.what.partition(":")[0] for bar in BARS} <= WORKS.keys()
    assert {name for work in WORKS.values() for name in work.contenders} <= {
        *CONTENDERS
    }


@pytest.mark.parametrize(
    ("gigabytes", "line"),
    [
        (2, "0.50    0.25      4.00      32      1.00    0.40      2.00       1"),
        (0.01, "4.00    8.00      8.00      32      2.00    5.00      4.00       1"),
    ],
)
def test_a_table_shows_rates_and_for_a_small_state_seconds(
    gigabytes: float, line: str
) -> None:
    rounds = [
        {
            "bytes": gigabytes * 1e9,
            "save": {"seconds": 4.0, "cpu_seconds": 8.0, "extra_mib": 32.0},
            "restore": {"seconds": 2.0, "cpu_seconds": 4.0, "extra_mib": 1.0},
            "first": {"save": 8.0, "restore": 5.0},
        }
    ]

    lines = table("lm", "tmpfs", {"orbax": rounds}).splitlines()

    assert ["orbax", *line.split()] == lines[3].split()
    assert ("CPU-s/GB" in lines[2]) == (gigabytes == 2)
