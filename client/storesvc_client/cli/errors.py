"""How storectl reports an error: one sentence on stderr, or one JSON document there."""

import json
from collections.abc import Mapping
from typing import IO, Any

import click


class Refusal(click.ClickException):
    """A request that is well formed and cannot be granted."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the sentence."""
        click.echo(f"storectl: {self.format_message()}", file=file, err=file is None)


class Interrupted(Refusal):
    """Ctrl-C; its exit code is that of shells."""

    exit_code = 130


def json_line(error: Exception) -> str:
    """Returns an error as one line of JSON.

    ``kind`` is the name of the class, ``reason`` that of an ``ErrorReason`` of the
    contract or "", ``metadata`` what the message mentions, for programs.
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
    return json.dumps({"error": document}, ensure_ascii=False)
