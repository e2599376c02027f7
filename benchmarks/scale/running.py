"""Runs the series, prints the tables, draws the plot."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from benchmarks.scale import works
from benchmarks.scale.bars import BARS
from benchmarks.scale.tables import fleet_table, plot, table
from benchmarks.speed.bars import verdicts
from benchmarks.speed.rounds import OUTPUT
from benchmarks.speed.tables import bars_table

Sizes: TypeAlias = Sequence[int]

SERIES: Final[Mapping[str, tuple[Callable[[Sizes], works.Rows], Sizes, Sizes]]] = {
    "save": (works.save_jointly, (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 8, 32)),
    "late": (works.wait_for_one, (8, 64, 256), (8,)),
    "steps": (works.use_many_steps, (10, 100, 1000, 3000, 10_000), (30, 300)),
    "retention": (works.retain_after_commit, (10, 1000, 10_000), (300,)),
    "runs": (works.collect_many_runs, (10, 100, 1000), (10, 30)),
    "files": (works.collect_many_files, (10_000, 100_000, 1_000_000), (1000, 10_000)),
    "names": (works.collect_simulated_names, (10**6, 50 * 10**6), (10**6,)),
    "leaves": (works.join_with_many_leaves, (100, 1000, 10_000), (100, 1000)),
    "outage": (works.meet_an_outage, (8, 64, 256), (4,)),
}
"""Works, and their sizes: all, and of ``--quick``."""


def main() -> None:
    """Runs them; fails with ``--assert`` if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--quick", action="store_true", help="small sizes: a minute")
    parser.add_argument("--only", nargs="+", choices=SERIES, default=[*SERIES])
    parser.add_argument("--assert", action="store_true", help="fail if one is missed")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of what is provoked here
    OUTPUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    text = ""

    def show(part: str) -> None:
        nonlocal text
        print(part, end="\n\n", flush=True)
        text += part + "\n\n"
        (OUTPUT / "scale.txt").write_text(text)

    for name in arguments.only:
        work, whole, quick = SERIES[name]
        if sizes := quick if arguments.quick else whole:
            results[name] = {str(size): [cost] for size, cost in work(sizes)}
            show(table(name, work.__doc__ or "", results))
            report = {"cores": os.cpu_count(), "results": results}
            (OUTPUT / "scale.json").write_text(json.dumps(report, indent=1))
    if computed := fleet_table(results):
        show(computed)
    judged = [each for each in verdicts(results, BARS) if each.value is not None]
    show(bars_table(judged))
    plot(results, OUTPUT / "scale.png")
    missed = [each.bar.what for each in judged if str(each) != "met"]
    if vars(arguments)["assert"] and missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")
