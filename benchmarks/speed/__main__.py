"""``python -m benchmarks.speed``: runs the rounds; prints tables, draws plots."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import Final

from benchmarks.speed.bars import Found, Results, verdicts
from benchmarks.speed.plots import plot
from benchmarks.speed.rounds import OUTPUT, PLACES, rounds
from benchmarks.speed.tables import bars_table, table
from benchmarks.speed.works import CONTENDERS, STATES, WORKS

PROGRAMME: Final = (
    *((work, "tmpfs") for work in WORKS if work != "tiny"),
    ("lm", "disk"),
)
"""Works and places that ``make bench`` runs."""


def main() -> None:
    """Runs it."""
    arguments = _arguments()
    name = "-".join(["speed", *arguments.work])
    OUTPUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, Found] = {}
    text = ""
    for work, place in _programme(arguments):
        state = arguments.of or WORKS[work].state
        names = arguments.only or WORKS[work].contenders
        found = rounds(work, place, state, names, arguments.rounds)
        results[f"{work} on {place}"] = found
        print(table(work, place, found), end="\n\n", flush=True)
        # written after each work, as the next ones take long
        text += table(work, place, found) + "\n\n"
        (OUTPUT / f"{name}.txt").write_text(text)
        report = {"cores": os.cpu_count(), "results": results}
        (OUTPUT / f"{name}.json").write_text(json.dumps(report, indent=1))
    if arguments.of is None:  # the bars hold only for the default states of the works
        judged = _judged(results, everything=not arguments.work)
        print(judged)
        (OUTPUT / f"{name}.txt").write_text(text + judged + "\n")
    plot(results, OUTPUT / f"{name}.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed")
    parser.add_argument(
        "work", nargs="*", metavar="WORK", help="none: all, and lm on disk too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="+", choices=PLACES, default=["tmpfs"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--of", choices=STATES, help="a state instead of the work's")
    arguments = parser.parse_args()
    if unknown := set(arguments.work) - set(WORKS):
        parser.error(f"expected {', '.join(WORKS)}, got {', '.join(unknown)}")
    return arguments


def _programme(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if not arguments.work:
        yield from PROGRAMME
    for work in arguments.work:
        for place in arguments.on:
            yield work, place


def _judged(results: Results, *, everything: bool) -> str:
    found = verdicts(results)
    if not everything:
        found = [verdict for verdict in found if verdict.value is not None]
    return bars_table(found) if found else ""


if __name__ == "__main__":
    main()
