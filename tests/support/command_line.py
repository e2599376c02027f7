"""Runs storectl; returns its output and its error messages."""

import json
import re
from typing import Any

from click.testing import CliRunner, Result

from storesvc_client.cli import main


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
