"""Reports errors on stderr: one sentence, or one line of JSON.

Suggestions for names that do not exist.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Final

import click

from storesvc.format.names import LATEST
from storesvc_client._views.texts import json_text

if TYPE_CHECKING:
    from storesvc_client import Client, StoreError


class Refusal(click.ClickException):
    """A valid request that the store or the machine rejects."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
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


_MOST_RUNS: Final = 10_000
"""Maximum runs that are read for a suggestion."""

_WORDS: Final = {
    "copy": "cp",
    "delete": "rm",
    "describe": "stat",
    "info": "stat",
    "list": "ls",
    "remove": "rm",
    "show": "stat",
    "tags": "tag",
}
"""Commands by the names that they have in other programs."""


_OPTIONS: Final = {
    "--format": "--json",
    "--output": "--json",
    "--sort-by": "--sort",
    "-f": "--where",
    "-l": "--where",
    "-n": "--limit",
    "-o": "--json",
    "-q": "--json",
}
"""Options by the names that they have in other programs."""

_HABITS: Final = {
    ("--all-namespaces", "-A"): " 'storectl ls' lists the runs of all namespaces.",
    ("--namespace", "-n"): " A namespace begins a path, as in 'storectl ls prod'.",
    ("--watch", "-w"): " 'storectl watch' prints each change as it happens.",
}
"""Hints for options of other programs that no option stands for."""


def option_hint(error: click.NoSuchOption) -> str:
    """Returns what an absent option stands for elsewhere, for the end of a message, or
    ""."""
    found = _OPTIONS.get(error.option_name)
    parameters = error.ctx.command.params if error.ctx else []
    known = {name for parameter in parameters for name in parameter.opts}
    hint = f" Did you mean {found!r}?" if found in known else ""
    others = (text for names, text in _HABITS.items() if error.option_name in names)
    return hint + next(others, "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the most similar of the known names, or the one whose last part is most
    similar, as of metrics such as train/loss; None if none is similar."""
    from difflib import get_close_matches

    whole = {text: text for text in known}
    parts = {text.rpartition("/")[2]: text for text in whole}
    for names in (whole, parts):
        for found in get_close_matches(name, names, n=1):
            return names[found]
    return None


def command_hint(name: str, commands: Iterable[str]) -> str:
    """Returns the suggestion of a command, for the end of a message, or ""."""
    found = _WORDS.get(name) or nearest(name, commands)
    return f" Did you mean {found!r}?" if found else ""


def check_namespace(client: "Client", namespace: str) -> None:
    """Rejects a namespace that has no run; suggests one with a similar name."""
    if any(client.runs(namespace, on_damage=lambda _: None)):
        return
    # Damaged records are no reason for a message without a suggestion.
    runs = islice(client.runs(on_damage=lambda _: None), _MOST_RUNS)
    known = {run.name.partition("/")[0] for run in runs}
    found = nearest(namespace, known)
    hint = f"; did you mean {found}?" if found else ""
    raise Refusal(f"namespace {namespace} has no runs{hint}")


def error_text(error: "StoreError") -> str:
    """Returns the message of an error, with a path or a command to go on with."""
    metadata: Mapping[str, str] = error.metadata
    run, tag = metadata.get("run"), metadata.get("tag")
    near = metadata.get("nearest", "").split(",")
    match error.reason:
        case "TAG_NOT_FOUND" if run and tag:
            found = nearest(tag, [LATEST, *near]) or near[0]
            hint = f"; did you mean {run}@{found}?" if found else ";"
            return f"{run} has no tag {tag}{hint} 'storectl tag {run}' lists all"
        case "RUN_NOT_FOUND" if run and near[0]:
            namespace = run.partition("/")[0]
            return (
                f"run {run} does not exist; did you mean {near[0]}? 'storectl ls "
                f"{namespace}' lists all"
            )
        case _:
            return str(error)
