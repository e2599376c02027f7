"""Suggestions for names that do not exist."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from storesvc.format.names import LATEST

if TYPE_CHECKING:
    from storesvc_client import Client, StoreError

_MOST_RUNS: Final = 10_000
"""Maximum runs that are read for a suggestion."""

_WORDS: Final = {
    "copy": "cp",
    "delete": "rm",
    "info": "stat",
    "list": "ls",
    "remove": "rm",
    "show": "stat",
    "tags": "tag",
}
"""Commands by the names that they have in other programs."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the most similar of the known names; None if none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, [*known], n=1)), None)


def command_hint(name: str, commands: Iterable[str]) -> str:
    """Returns the suggestion of a command, for the end of a message, or ""."""
    found = _WORDS.get(name) or nearest(name, commands)
    return f" Did you mean {found!r}?" if found else ""


def namespace_hint(client: "Client", namespace: str) -> str:
    """Returns the suggestion of a namespace with a similar name, or ""."""
    # Damaged records are no reason for a message without a suggestion.
    runs = islice(client.runs(on_damage=lambda _: None), _MOST_RUNS)
    known = {run.name.partition("/")[0] for run in runs}
    found = nearest(namespace, known - {namespace})
    return f"; did you mean {found}?" if found else ""


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
