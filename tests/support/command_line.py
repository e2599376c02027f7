"""Runs storectl; returns its output and its error messages."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner, Result

from storesvc_client.cli import main

COMMAND = [sys.executable, "-m", "storesvc_client.cli"]


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, arguments)


def run_process(
    *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def storectl(address: str, *arguments: str) -> Result:
    return invoke("--store", address, *arguments)


def succeed(*arguments: str, **environment: str) -> str:
    """Returns the output of a command that succeeds, in any store."""
    result = invoke(*arguments, **environment)

    assert 0 == result.exit_code, result.output
    return result.stdout


def printed(address: str, *arguments: str) -> str:
    return succeed("--store", address, *arguments)


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


@dataclass(frozen=True)
class Storectl:
    """The functions of this module for one store."""

    address: str

    def run(self, *arguments: str) -> Result:
        return storectl(self.address, *arguments)

    def printed(self, *arguments: str) -> str:
        return printed(self.address, *arguments)

    def document(self, *arguments: str) -> Any:
        return document(self.address, *arguments)

    def refusal(self, *arguments: str) -> str:
        return refusal(self.address, *arguments)


def on_a_terminal(
    *arguments: str,
    columns: int = 80,
    term: str = "dumb",
    typed: bytes = b"",
    code: int = 0,
) -> str:
    """Returns the output of a command in a terminal of that many columns, at which a
    person has typed; a dumb one shows no bold text."""
    inside, outside = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=outside,
        stdout=outside,
        stderr=outside,
        env={**os.environ, "COLUMNS": str(columns), "TERM": term},
    )
    os.close(outside)
    os.write(inside, typed)
    written = b""
    # A terminal whose last writer has gone answers with an error.
    try:
        while part := os.read(inside, 4096):
            written += part
    except OSError as e:
        assert errno.EIO == e.errno
    os.close(inside)
    assert code == process.wait()
    return written.decode()


def imported_modules(program: str) -> set[str]:
    """Returns the modules that a program has imported when it ends."""
    program += "\nimport sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(run.stdout.splitlines()[-1].split())


def imported_by_storectl(*arguments: str) -> set[str]:
    return imported_modules(
        "from storesvc_client.cli import main\n"
        f"main({list(arguments)!r}, standalone_mode=False)"
    )
