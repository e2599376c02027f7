"""How storectl says no: one sentence on stderr, and exit code 1."""

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
