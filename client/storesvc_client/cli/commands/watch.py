"""``storectl watch``: prints events of checkpoints as they happen."""

from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import click

from storesvc_client._values.texts import json_text, pairs_text, printable, size_text
from storesvc_client.cli.arguments import WholeNumber, parent_path
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Interrupted, Refusal
from storesvc_client.cli.output import json_value, print_note
from storesvc_client.cli.paths import NamespacePath, RunPath

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from storesvc_client import Client, Event


@click.command()
@click.argument(
    "path",
    type=parent_path,
    metavar="PATH",
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)
@click.option(
    "--since",
    metavar="now|latest|TOKEN",
    default="now",
    show_default=True,
    help="Start now, with the newest checkpoint, or after the event with this "
    "resume_token.",
)
@click.option(
    "--count", type=WholeNumber(min=1), metavar="N", help="End after N events."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
@pass_connection
def watch(
    connection: Connection,
    *,
    path: NamespacePath | RunPath,
    since: str,
    count: int | None,
    as_json: bool,
) -> None:
    """Print events of checkpoints, a line each.

    Watches a run, or all runs of a namespace, through restarts of the server, until
    Ctrl-C. If a damaged record ends it, the error names the command that continues
    after it.

    \b
    Examples:
      storectl watch prod/llama-8b --since latest
      storectl watch prod --json --count 1
    """
    try:
        with connection.open() as client:
            events = _events(client, path, since)
            print_note(f"watching {path}")
            with _resume_hint(path):
                for event in islice(events, count):
                    click.echo(_json_line(event) if as_json else _line(event))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(Interrupted.exit_code) from None


@contextmanager
def _resume_hint(path: NamespacePath | RunPath) -> "Generator[None]":
    """Adds the command that continues after a damaged record to the error."""
    from storesvc_client import DataLossError

    try:
        yield
    except DataLossError as e:
        token = e.metadata["resume_token"]
        raise Refusal(f"{e}: storectl watch {path} --since {token}") from e


def _events(
    client: "Client", path: NamespacePath | RunPath, since: str
) -> "Iterator[Event]":
    match path:
        case NamespacePath(namespace):
            return client.watch(namespace, since)
        case RunPath(run):
            return client.run(run).watch(since)


def _line(event: "Event") -> str:
    cells = [f"{event.kind:<9}", f"{event.run}@{event.step}"]
    if event.tag:
        cells.append(event.tag)
    elif event.kind == "committed" and event.checkpoint is not None:
        cells.append(size_text(event.checkpoint.size_bytes))
        if event.checkpoint.metrics:
            cells.append(pairs_text(event.checkpoint.metrics))
    elif event.kind == "updated" and event.checkpoint and event.checkpoint.labels:
        cells.append(pairs_text(event.checkpoint.labels))
    return printable("  ".join(cells))


def _json_line(event: "Event") -> str:
    return json_text(json_value(event))
