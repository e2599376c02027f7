"""Programs that tests run in an interpreter of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SECONDS = 100
"""Maximum wait for a program."""


def run_python(
    program: str,
    *arguments: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns what it printed, and its exit code."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=env)


@contextmanager
def started_python(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts an interpreter with arguments; kills it in the end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_condition(
    holds: Callable[[], object], process: subprocess.Popen[str]
) -> None:
    """Waits until a condition holds, while a process runs."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
