"""The benchmark of growth fits laws to what it counts, and judges them by its bars."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.scale import prices
from benchmarks.scale.bars import BARS
from benchmarks.scale.laws import at_size, exponent, fleet, slope
from benchmarks.scale.tables import ROWS, fleet_table, table
from benchmarks.speed.bars import Results, verdicts

ROOT = Path(__file__).parents[2]
SIZES = (1, 8, 64, 256)
WHOLE = (
    "collection: MiB of 50 million data files",
    "1,000 hosts, 1 TB: dollars a month of saves",
    "1,000 hosts, 1 TB: dollars a month of collections",
)
"""Bars that small sizes do not show."""


def squares(factor: float = 1.0) -> dict[int, float]:
    return {size: factor * size**2 for size in SIZES}


def counted(series: str, costs: Mapping[int, Mapping[str, float]]) -> Results:
    return {series: {str(size): [cost] for size, cost in costs.items()}}


def judged(results: Results, what: str) -> tuple[float | None, str]:
    """Returns the value and the verdict of a bar."""
    (verdict,) = [each for each in verdicts(results, BARS) if each.bar.what == what]
    return verdict.value, str(verdict)


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert exponent(squares(3)) == pytest.approx(2.0)
    assert exponent(dict.fromkeys(SIZES, 7.0)) == pytest.approx(0.0)
    assert exponent(dict.fromkeys(SIZES, 0.0)) == pytest.approx(0.0)


def test_what_one_process_costs_first_is_no_part_of_a_law() -> None:
    assert exponent({1: 1000.0, 8: 8.0, 64: 64.0}) == pytest.approx(1.0)


def test_one_size_has_no_law() -> None:
    with pytest.raises(LookupError):
        exponent({1: 1.0, 8: 8.0})
    with pytest.raises(LookupError):
        slope({8: 8.0})


def test_a_size_that_was_counted_counts_as_it_was() -> None:
    assert 64**2 == at_size(squares(), 64)
    assert at_size(squares(), 1000) == pytest.approx(1000**2)


def test_a_part_of_each_is_assumed_where_a_law_is_flatter() -> None:
    flat = dict.fromkeys(SIZES, 256.0)

    assert at_size(flat, 1000) == pytest.approx(256.0)
    assert at_size(flat, 1000, least=1.0) == pytest.approx(1000.0)


def test_a_herd_of_commits_misses_its_bars() -> None:
    costs = {size: {"commits": size, "requests": size**2} for size in SIZES}
    results = counted("save", costs)

    assert (256, "missed by 25500%") == judged(
        results, "joint save: full commits, the most of any P"
    )
    _, verdict = judged(results, "joint save: exponent of requests over P")
    assert "missed by 90%" == verdict
    assert (256, "missed by 3100%") == judged(
        results, "joint save: requests a process, largest P"
    )


def test_what_was_not_counted_is_not_judged() -> None:
    assert {"not measured"} == {str(each) for each in verdicts({}, BARS)}
    assert "" == fleet_table({})


def cost_each(size: int) -> dict[str, float]:
    """Returns costs of 8 operations a process, as they are at 8 to 256."""
    return dict.fromkeys(ROWS["save"], 8.0 * size)


def test_a_fleet_pays_for_its_data_files_and_for_each_process() -> None:
    few = {"A": 6.0, "B": 10.0}
    results = {
        **counted("save", {size: cost_each(size) for size in SIZES}),
        **counted(
            "steps", {n: {"collection: A": 6, "collection: B": n} for n in SIZES}
        ),
        **counted("files", {10_000: few, 1_000_000: few}),
    }

    found = fleet(results, 1000)

    files, pass_a = found["data files of a save"], found["class A of a collection"]
    assert found["class A of a save"] == pytest.approx(files + 7 * 1000)
    assert found["class B of a save"] == pytest.approx(8 * 1000)
    assert found["dollars a month, saves"] == pytest.approx(
        prices.SAVES * ((files + 7000) * 5e-6 + 8000 * 4e-7)
    )
    assert pass_a == pytest.approx(6 + files / 1000)
    assert found["class B of a collection"] == pytest.approx(prices.HELD)
    assert "dollars a month, saves" in fleet_table(results)


def test_a_table_has_a_column_for_each_size() -> None:
    results = counted("save", {size: cost_each(size) for size in SIZES})

    text = table("save", "P processes", results)

    assert "exponent" in text.splitlines()[1]
    assert all(line.endswith("1.00") for line in text.splitlines()[2:])


def test_the_page_has_the_bars_of_the_benchmark_and_its_last_tables() -> None:
    page, results = (
        (ROOT / name).read_text() for name in ("docs/scale.md", "benchmarks/RESULTS.md")
    )
    blocks = re.findall(r"```text\n(.*?)```", page, re.DOTALL)

    assert 2 == len(blocks)
    assert all(block in results for block in blocks)
    lines = blocks[0].splitlines()[1:]
    assert [bar.what for bar in BARS] == [line[:68].strip() for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_small_sizes_are_counted_and_judged() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--quick"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    lines = run.stdout.splitlines()
    for bar in BARS:
        if bar.what not in WHOLE:
            (line,) = [each for each in lines if each.startswith(f"{bar.what}  ")]
            assert line.endswith("  met"), line
