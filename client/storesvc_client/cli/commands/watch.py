"""``storectl watch`` prints events of checkpoints; ``trace`` the timeline of a save."""

import shutil
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from storesvc_client._views.texts import (
    json_text,
    json_value,
    pairs_text,
    printable,
    size_text,
)
from storesvc_client.cli.arguments import (
    WholeNumber,
    json_option,
    parent_path,
    path_argument,
    whole_checkpoint,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Interrupted, Refusal
from storesvc_client.cli.output import print_json, print_note
from storesvc_client.cli.paths import CheckpointPath, NamespacePath, RunPath

if TYPE_CHECKING:
    from collections.abc import Generator

    from storesvc_client import Event


@click.command()
@path_argument("path", whole_checkpoint, required=False)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show the report of a restore or a save that a job has written.",
)
@json_option
@pass_connection
def trace(
    connection: Connection,
    *,
    path: CheckpointPath | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Show how long each part of a save took.

    One table for each process: the phases until it had stored its chunks, from
    their first start to their last end, and the seconds that its threads spent
    in them. Of more than 16 processes, those that took longest are kept. The
    trace has the same id in a collector of OpenTelemetry.

    A restore is not in the store. With --report, the timeline is that of a file
    with the text of report.to_json(), and no server is needed.

    \b
    Examples:
      storectl trace prod/llama-8b@latest
      storectl trace prod/llama-8b@500 --json
      storectl trace --report restore.json
    """
    from storesvc_client._telemetry.reports import (
        MAX_REPORT_BYTES,
        parse_report,
        report_document,
        report_text,
        trace_text,
    )

    if (path is None) == (report is None):
        raise click.UsageError(
            "expected a checkpoint or --report FILE, got "
            + ("neither" if path is None else "both; omit one of them")
        )
    width = shutil.get_terminal_size((100, 0)).columns
    if report is not None:
        place = f"report {printable(str(report))}"
        try:
            with report.open("rb") as file:
                data = file.read(MAX_REPORT_BYTES + 1)
        except OSError as e:
            why = e.strerror
            raise Refusal(f"{place}: cannot be read: {why}; correct the path") from e
        read = parse_report(data, place)
        document, text = report_document(read), report_text(read, width=width)
    else:
        assert path is not None
        with connection.open() as client:
            found = client.run(path.run).trace(path.which)
        document, text = json_value(found), trace_text(found, width=width)
    if as_json:
        print_json(document)
    else:
        click.echo(text)


@click.command()
@path_argument("path", parent_path)
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
            if isinstance(path, RunPath):
                events = client.run(path.run).watch(since)
            else:
                events = client.watch(path.namespace, since)
            print_note(f"watching {path}")
            with _resume_hint(path):
                for event in islice(events, count):
                    text = json_text(json_value(event)) if as_json else _line(event)
                    click.echo(text)
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
