"""Defines the options of storectl itself, given before or after a command."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from storesvc_client.cli.arguments import store_target
from storesvc_client.cli.completion import complete_context
from storesvc_client.cli.connection import DEFAULT_TARGET, VERBOSE, Connection

_F = TypeVar("_F", bound=Callable[..., Any])

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)

_OPTIONS: Final[dict[tuple[str, ...], dict[str, Any]]] = {
    ("--store", "-s"): {
        "type": store_target,
        "metavar": "TARGET",
        "envvar": "STORECTL_STORE",
        "show_envvar": True,
        "default": DEFAULT_TARGET,
        "show_default": True,
        "help": "HOST[:PORT] of a server, or of several with commas between, or the "
        "root of a store to open here: /path, file:///path, gs://bucket/prefix.",
    },
    ("--context", "-c"): {
        "metavar": "NAME",
        "shell_complete": complete_context,
        "help": "Store and options that storectl config set NAME has kept, in place of "
        "the current context.",
    },
    ("--ca",): {
        "type": _FILE,
        "metavar": "FILE",
        "envvar": "STORECTL_CA",
        "show_envvar": True,
        "help": "Certificates (PEM) to trust, in place of the system's.",
    },
    ("--cert",): {
        "type": _FILE,
        "metavar": "FILE",
        "envvar": "STORECTL_CERT",
        "show_envvar": True,
        "help": "Client certificate (PEM), for a server that requires one.",
    },
    ("--key",): {
        "type": _FILE,
        "metavar": "FILE",
        "envvar": "STORECTL_KEY",
        "show_envvar": True,
        "help": "Its private key (PEM).",
    },
    ("--token-file",): {
        "type": _FILE,
        "metavar": "FILE",
        "envvar": "STORECTL_TOKEN_FILE",
        "show_envvar": True,
        "help": "File with a bearer token, in place of the one of storectl login.",
    },
    ("--insecure",): {
        "is_flag": True,
        "help": "Use plaintext to a server on another machine.",
    },
    ("--timeout",): {
        "type": click.FloatRange(min=0, min_open=True),
        "default": 30.0,
        "show_default": True,
        "metavar": "SECONDS",
        "help": "Maximum wait for one response.",
    },
    ("--verbose",): {
        "is_flag": True,
        "help": "Show tracebacks, and the log of native libraries.",
    },
}


_OF_BOTH: Final = ("type", "is_flag", "shell_complete")
"""Settings of an option before a command that it has after a command, too."""


def global_options(function: _F) -> _F:
    """Adds the options to the group."""
    for names, settings in reversed(_OPTIONS.items()):
        function = click.option(*names, **settings)(function)
    return function


def accept_global_options(command: click.Command) -> None:
    """Adds the options of storectl to a command, where they override storectl's, and to
    the commands of a group.

    An option that the command itself defines, such as ``serve --insecure``, is kept.
    """
    own = {name for parameter in command.params for name in parameter.opts}
    command.params.extend(_repeated(own))
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            accept_global_options(inner)


def _repeated(own: set[str]) -> Iterator[click.Option]:
    for names, settings in _OPTIONS.items():
        if own.isdisjoint(names):
            kept = {k: v for k, v in settings.items() if k in _OF_BOTH}
            yield click.Option(
                names, expose_value=False, hidden=True, callback=_override, **kept
            )


def _override(context: click.Context, option: click.Parameter, value: Any) -> None:
    name = str(option.name)
    if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        return
    if name == "verbose":
        context.meta[VERBOSE] = True
    elif isinstance(context.obj, Connection):
        field = "target" if name == "store" else name
        changes: dict[str, Any] = {field: value}
        changes["from_environment"] = context.obj.from_environment - {name}
        changes["given"] = context.obj.given | {name}
        context.obj = replace(context.obj, **changes)
