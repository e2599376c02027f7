"""The reference of storectl: the ``--help`` of each command."""

from collections.abc import Iterator
from typing import Final

import click

from storesvc_client.cli import main

WIDTH: Final = 88


def storectl_page() -> str:
    """Returns the Markdown of the page."""
    parts = [
        "# Commands of storectl",
        (
            "Each command with its `--help`. [The command line](../storectl.md) has "
            "examples. Options of the group may be given before or after a command."
        ),
    ]
    for level, words, context in _commands(_context(main, "storectl", None)):
        name = " ".join(words)
        parts.append(f"{'#' * level} {name} {{ #{name.replace(' ', '-')} }}")
        parts.append(f"```text\n{context.get_help().rstrip()}\n```")
    return "\n\n".join(parts)


def _context(
    command: click.Command, name: str, parent: click.Context | None
) -> click.Context:
    settings = command.context_settings
    return click.Context(command, info_name=name, parent=parent, **settings)


def _commands(
    context: click.Context, words: tuple[str, ...] = ("storectl",)
) -> Iterator[tuple[int, tuple[str, ...], click.Context]]:
    """Yields the level of the heading, the words and the context of each command."""
    context.terminal_width = WIDTH
    yield max(len(words), 2), words, context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                inner = _context(below, name, context)
                yield from _commands(inner, (*words, name))
