"""Changes several checkpoints with one command."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import click

from storesvc_client.cli.connection import Connection
from storesvc_client.cli.errors import Refusal, json_line
from storesvc_client.cli.output import print_json, print_note
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import Run

Change: TypeAlias = "Callable[[Run, int], tuple[str, object]]"
"""Changes a checkpoint; returns the output, as a line and as JSON."""


def change_each(
    connection: Connection,
    paths: Iterable[CheckpointPath],
    change: Change,
    *,
    as_json: bool,
) -> None:
    """Changes checkpoints, one after another, and prints each result.

    Args:
        connection: Connection to the store.
        paths: Checkpoints by step.
        change: Function that changes one checkpoint.
        as_json: Whether to print one JSON document, at the end.

    Raises:
        StoreError: A change was rejected; the others are done.
    """
    from storesvc_client import StoreError, UnavailableError

    documents: list[object] = []
    refused: list[StoreError | Refusal] = []
    with connection.open() as client:
        for path in dict.fromkeys(paths):
            assert isinstance(path.which, int)  # click has checked it
            try:
                line, document = change(client.run(path.run), path.which)
            except (StoreError, Refusal) as e:
                refused.append(e)
                if isinstance(e, UnavailableError):  # the others would time out too
                    break
                continue
            documents.append(document)
            if not as_json:
                click.echo(line)
    if as_json and documents:
        print_json(documents)
    for refusal in refused[:-1]:
        if as_json:
            click.echo(json_line(refusal), err=True)
        else:
            print_note(str(refusal))
    if refused:
        raise refused[-1]
