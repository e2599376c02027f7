"""What commands take: paths into a store, stores, ``--json``.

The functions are types of click parameters: from the text that was typed they
make what it means, or say which rule it breaks.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from storesvc.format.names import InvalidNameError
from storesvc_client.cli._paths import (
    CheckpointPath,
    LeafPath,
    StorePath,
    check_target,
    parse_path,
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def any_path(text: str) -> StorePath:
    """Returns the path."""
    try:
        return parse_path(text)
    except InvalidNameError as e:
        raise click.BadParameter(str(e)) from e


def checkpoint_path(text: str) -> CheckpointPath | LeafPath:
    """Returns the path of a checkpoint, or of leaves of one."""
    match any_path(text):
        case CheckpointPath() | LeafPath() as path:
            return path
    raise click.BadParameter(
        f"{text!r}: expected a checkpoint, such as prod/llama-8b@latest"
    )


def leaf_path(text: str) -> LeafPath:
    """Returns the path of leaves."""
    match any_path(text):
        case LeafPath() as path:
            return path
    raise click.BadParameter(
        f"{text!r}: expected leaves of a checkpoint, such as "
        "'prod/llama-8b@latest:params/**', or 'prod/llama-8b@latest:**' for all"
    )


def store_target(text: str) -> str:
    """Returns the store to connect to."""
    try:
        return check_target(text)
    except InvalidNameError as e:
        raise click.BadParameter(str(e)) from e


def json_option(command: _Command) -> _Command:
    """Gives a command the option ``--json``, as its argument ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document."
    )(command)
