"""Programs that tests run in an interpreter of their own."""

import subprocess
import sys
from collections.abc import Mapping


def run_python(
    program: str,
    *arguments: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns what it printed, and its exit code."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=env)
