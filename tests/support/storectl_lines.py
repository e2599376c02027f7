"""Checks command lines of storectl, such as in documents and manifests.

Nothing is run, and no file needs to exist.
"""

from collections.abc import Sequence

import click

from storesvc_client.cli import main


def check_line(words: Sequence[str]) -> None:
    """Checks a command line as storectl does.

    Args:
        words: Arguments after ``storectl``.

    Raises:
        UsageError: storectl would reject it.
    """
    group = click.Context(main, info_name="storectl")
    rest = _check(main, group, words)
    if not rest:
        return
    command = main.get_command(group, rest[0])
    if command is None:
        raise click.UsageError(f"no command {rest[0]}")
    _check(command, click.Context(command, parent=group), rest[1:])


def _check(
    command: click.Command, context: click.Context, words: Sequence[str]
) -> list[str]:
    """Checks the options of a command, and returns the remaining arguments."""
    given, rest, _ = command.make_parser(context).parse_args(list(words))
    for parameter in command.params:
        value = given.get(str(parameter.name))
        is_given = isinstance(value, str | bool | list | tuple)  # else click's "unset"
        if parameter.required and not is_given:
            raise click.MissingParameter(param=parameter, ctx=context)
        if is_given and not isinstance(parameter.type, click.Path):
            parameter.type_cast_value(context, value)
    return rest
