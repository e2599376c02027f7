"""Measures the time of short commands, and of opening an embedded store.

    python -m benchmarks startup [--repeats 10]

Each measurement is a new process; the commands take turns. The first process of each,
which compiles bytecode, does not count. Bars: 0.3 s for the commands, 0.5 s for
``connect`` after the imports.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

import storesvc_client as store
from tests.support.server_process import ServerProcess

RUN = "bench/startup"
STORECTL = (sys.executable, "-m", "storesvc_client.cli")

CONNECT = """
import sys, time
import storesvc_client as store
import storesvc.server.embedded, storesvc_client._api.client
began, busy = time.perf_counter(), time.process_time()
with store.connect(sys.argv[1]):
    opened = time.perf_counter()
    opened_busy = time.process_time()
print(opened - began, opened_busy - busy)
"""
"""What it takes to open a store, once all is imported; in the process itself."""

_fresh = count()


def main() -> None:
    """Prints medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "store")
        with store.connect(root.as_uri()) as client:
            for step in range(3):
                client.run(RUN).save(step, {"x": np.ones(step + 1)}).result()
        server = ServerProcess(root, Path(directory))
        server.start()
        try:
            report(measure(root, server.address, repeats))
        finally:
            server.kill()


def measure(root: Path, address: str, repeats: int) -> dict[str, list[list[float]]]:
    """Returns the wall-clock and CPU seconds of each."""
    commands = {
        "storectl --help": ("--help",),
        "storectl ls, a server's": ("-s", address, "ls", RUN),
        "storectl ls, of files": ("-s", root.as_uri(), "ls", RUN),
    }
    taken: dict[str, list[list[float]]] = {}
    for _ in range(repeats + 1):
        for name, arguments in commands.items():
            taken.setdefault(name, []).append(command_seconds(*arguments))
        fresh = root.with_name(f"fresh-{next(_fresh)}")
        for name, path in (("connect, a new store", fresh), ("connect", root)):
            taken.setdefault(name, []).append(connect_seconds(path))
    return {name: seconds[1:] for name, seconds in taken.items()}


def command_seconds(*arguments: str) -> list[float]:
    """Returns the wall-clock and CPU seconds of a command."""
    began, busy = time.perf_counter(), busy_seconds()
    started([*STORECTL, *arguments])
    return [time.perf_counter() - began, busy_seconds() - busy]


def connect_seconds(root: Path) -> list[float]:
    """Returns the wall-clock and CPU seconds of opening a store."""
    text = started([sys.executable, "-c", CONNECT, root.as_uri()])
    return [float(part) for part in text.split()]


def started(command: list[str]) -> str:
    """Returns the output of a program."""
    # with cached bytecode of its imports, as when it is installed
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def busy_seconds() -> float:
    """Returns the CPU seconds of the children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(taken: dict[str, list[list[float]]]) -> None:
    """Prints a table."""
    print(f"{'':24} {'median s':>9} {'least s':>8} {'CPU s':>6}")
    for name, seconds in taken.items():
        passed, busy = zip(*seconds, strict=True)
        print(f"{name:24} {median(passed):9.3f} {min(passed):8.3f} {median(busy):6.3f}")


if __name__ == "__main__":
    main()
