"""Runs the rounds of each shape, prints tables, draws the plot."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.shapes.bars import BARS
from benchmarks.shapes.drawing import SHAPES, draw
from benchmarks.shapes.plots import plot
from benchmarks.shapes.ratios import is_decided
from benchmarks.shapes.tables import LEGEND, ratios_table, table
from benchmarks.speed.bars import Found, verdicts
from benchmarks.speed.meters import available_bytes
from benchmarks.speed.rounds import OUTPUT, PLACES, SETTINGS
from benchmarks.speed.tables import bars_table
from benchmarks.speed.works import LOCAL

FLOORS: Final = (
    *("memcpy", "memcpy-new", "files", "sums", "sums-threads", "copies-threads"),
    "grpc-files",
)
CONTENDERS: Final = (*FLOORS, *LOCAL, "orbax", "orbax-raw")
DEFAULT: Final = (
    *("memcpy", "memcpy-new", "sums", "sums-threads", "copies-threads", "grpc-files"),
    *(
        "embedded",
        "embedded-none",
        "embedded-none-new",
        "direct-none",
        "streamed-none",
        "orbax",
    ),
)
TLS: Final = {"grpc-files": "grpc-files-tls", "streamed-none": "streamed-none-tls"}
"""Contenders that have a variant with TLS."""

SEED: Final = 9
CLOSE_SECONDS: Final = 60


def main() -> None:
    """Runs it."""
    arguments = _arguments()
    names = [TLS.get(n, n) if arguments.tls else n for n in arguments.contenders]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    text = f"seed {arguments.seed}, {arguments.values}\n\n"
    print(text, end="")
    results: dict[str, Found] = {}
    for shape in arguments.only:
        if lacking := _lacking(shape, len(names), arguments):
            print(lacking, end="\n\n")
            text += lacking + "\n\n"
            continue
        found = _rounds(shape, names, arguments)
        results[shape] = found
        print(table(shape, found), end="\n\n", flush=True)
        # written after each shape, as the next ones take long
        text += table(shape, found) + "\n\n"
        (OUTPUT / "shapes.txt").write_text(text)
        report = {
            "cores": os.cpu_count(),
            "seed": arguments.seed,
            "values": arguments.values,
            "is_quick": arguments.quick,
            "results": results,
        }
        (OUTPUT / "shapes.json").write_text(json.dumps(report, indent=1))
    judged = [each for each in verdicts(results, BARS) if each.value is not None]
    last = "\n\n".join(
        filter(None, [LEGEND, ratios_table(results), bars_table(judged)])
    )
    print(last)
    (OUTPUT / "shapes.txt").write_text(text + last + "\n")
    plot(results, OUTPUT / "shapes.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks shapes")
    parser.add_argument("--seed", type=int, default=SEED, help="draws the leaves")
    parser.add_argument(
        "--values",
        choices=("weights", "bits"),
        default="weights",
        help="of the leaves: normally distributed, or random bits",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="most rounds after the first; fewer if the ratios are certain before",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a quarter of the bytes; fewer leaves and saves",
    )
    parser.add_argument(
        "--tls", action="store_true", help="streamed and its floor use TLS"
    )
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=[*DEFAULT]
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {arguments.rounds}")
    return arguments


def _lacking(shape: str, contenders: int, arguments: argparse.Namespace) -> str:
    """Returns why a shape does not fit the memory; "" if it does.

    Each contender holds the state, the restored one and its files, on tmpfs; while one
    works, there are also its next files and what it copies.
    """
    leaves = draw(shape, arguments.seed, is_quick=arguments.quick).values()
    size = sum(leaf.size_bytes for leaf in leaves)
    needed, there = (3 * contenders + 4) * size, available_bytes()
    if needed <= there:
        return ""
    return (
        f"{shape}: left out, expected {needed / 1e9:.0f} GB of free memory, got "
        f"{there / 1e9:.0f} GB; take fewer --contenders, or --quick"
    )


def _rounds(
    shape: str, names: Sequence[str], arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Returns the measurements of each contender in each round."""
    order = random.Random(arguments.seed)
    settings = [str(arguments.seed), arguments.values]
    quick = ["quick"] if arguments.quick else []
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        place = Path(stack.enter_context(_directory()))
        for name in names:
            if not name.startswith(FLOORS):
                (place / name).mkdir()
        _say(f"{shape}: step 0")
        if _run("begin", shape, *settings, str(place), *quick).wait():
            sys.exit("step 0 could not be saved; the error stands above")
        started = []
        for name in names:
            (place / name).mkdir(exist_ok=True)
            process = _run(name, shape, *settings, str(place / name), *quick)
            started.append(stack.enter_context(_end_after(process)))
        for name, process in zip(names, started, strict=True):  # all are starting
            _say(f"{shape}: making the state for {name}")
            worker = _Worker(name, process)
            if "absent" in worker.made:
                found[name].append(dict(worker.made))
            else:
                workers[name] = worker
        for number in range(arguments.rounds + 1):
            for name in order.sample(list(workers), len(workers)):
                _say(f"{shape}: round {number} of {arguments.rounds}, {name}")
                found[name].append(workers[name].turn(is_first=not number))
            if is_decided(found):
                break
    _say("")
    return found


class _Worker:
    """A process that runs one contender."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self._name = name
        self._process = process
        self.made: Mapping[str, Any] = self._answer()
        """Size of its state."""

    def turn(self, *, is_first: bool) -> dict[str, Any]:
        """Returns the costs of a save and a restore in a round; in the first one of a
        store, the restore of what another process has saved comes first."""
        is_floor = self._name.startswith(FLOORS)
        if is_first and not is_floor:
            restored = self._ask("restore")
            self._ask("check")
            saved = self._ask("save")
        else:
            saved, restored = self._ask("save"), self._ask("restore")
            if not is_floor:
                self._ask("check")
        return {**self.made, "save": saved, "restore": restored}

    def _ask(self, what: str) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._name} failed; its own words stand above")
        found: dict[str, Any] = json.loads(line)
        return found


def _directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="storesvc-bench-", dir=PLACES["tmpfs"])


def _run(*arguments: str) -> "subprocess.Popen[str]":
    """Starts a worker."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.shapes.worker", *arguments],
        env=os.environ | SETTINGS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def _end_after(
    process: "subprocess.Popen[str]",
) -> "Iterator[subprocess.Popen[str]]":
    """Ends a worker after the context."""
    with process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends its server and itself
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _say(what: str) -> None:
    print(f"{what:60}", end="\r", file=sys.stderr)
