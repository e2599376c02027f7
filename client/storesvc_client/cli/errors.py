"""Reports errors on stderr: one sentence, or one line of JSON."""

from collections.abc import Mapping
from typing import IO, Any

import click

from storesvc_client._values.texts import json_text


class Refusal(click.ClickException):
    """A valid request that the store or the machine rejects."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the message."""
        click.echo(f"storectl: {self.format_message()}", file=file, err=file is None)


class Interrupted(Refusal):
    """Ctrl-C; exits with the code of shells."""

    exit_code = 130


def json_line(error: Exception) -> str:
    """Returns an error as one line of JSON.

    ``kind`` is the name of the class, ``reason`` the name of an ``ErrorReason`` of the
    contract or "", ``metadata`` the values in the message, for programs.
    """
    source = error.__cause__ if isinstance(error, Refusal) else None
    cause = source if hasattr(source, "reason") else error
    text = error.format_message() if isinstance(error, click.ClickException) else error
    metadata: Mapping[str, str] = getattr(cause, "metadata", {})
    document = {
        "kind": type(cause).__name__,
        "reason": getattr(cause, "reason", ""),
        "message": str(text),
        "metadata": dict(metadata),
    }
    return json_text({"error": document})
