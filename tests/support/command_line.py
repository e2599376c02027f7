"""Runs storectl; returns its output and its error messages."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from storesvc_client.cli import main

COMMAND = [sys.executable, "-m", "storesvc_client.cli"]


def storectl(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--store", address, *arguments])


def printed(address: str, *arguments: str) -> str:
    result = storectl(address, *arguments)

    assert 0 == result.exit_code, result.output
    return result.stdout


def document(address: str, *arguments: str) -> Any:
    return json.loads(printed(address, *arguments, "--json"))


def refusal(address: str, *arguments: str) -> str:
    """Returns the error message of a command that fails."""
    result = storectl(address, *arguments)

    assert (1, "") == (result.exit_code, result.stdout)
    assert result.stderr.startswith("storectl: ")
    assert 1 == result.stderr.count("\n")
    return result.stderr.removeprefix("storectl: ").rstrip()


def table(text: str) -> list[list[str]]:
    """Returns the cells of a plain table: two spaces or more separate its columns."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def on_a_terminal(*arguments: str, columns: int, term: str = "dumb") -> str:
    """Returns the output of a command in a terminal of that many columns; a dumb one
    shows no bold text."""
    inside, outside = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=outside,
        stdout=outside,
        stderr=outside,
        env={**os.environ, "COLUMNS": str(columns), "TERM": term},
    )
    os.close(outside)
    written = b""
    # A terminal whose last writer has gone answers with an error.
    try:
        while part := os.read(inside, 4096):
            written += part
    except OSError as e:
        assert errno.EIO == e.errno
    os.close(inside)
    assert 0 == process.wait()
    return written.decode()
