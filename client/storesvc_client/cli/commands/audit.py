"""``storectl audit``: lists the audit log of a server, and verifies its files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc.format.audit_chain import FIRST, split_lines
from storesvc.format.audit_chain import verify as verify_lines
from storesvc_client._values.call_kinds import (
    AUTHENTICATIONS,
    STAGES,
)
from storesvc_client._views.tables import (
    Column,
    Shrink,
    Table,
    field_column,
    time_column,
)
from storesvc_client._views.texts import ABSENT, count_text, printable
from storesvc_client.cli.arguments import (
    WholeNumber,
    existing_file,
    json_option,
    parent_path,
    past_time,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Listing, print_note
from storesvc_client.cli.paths import NamespacePath, RunPath

if TYPE_CHECKING:
    from storesvc_client import AuditEntry

DEFAULT_LIMIT: Final = 100
"""Entries that are shown if there is no --limit."""


@click.group()
def audit() -> None:
    """Show the audit log of a server, or verify its files.

    \b
    Examples:
      storectl audit ls --stage denied --since 24h
      storectl audit verify /var/log/storesvc/audit.log
      storectl audit verify audit.log.2 audit.log.1 audit.log
    """


def _caller_text(entry: "AuditEntry") -> str:
    if entry.problem:
        return ABSENT
    # an entry about the log itself has the server in place of the caller
    return (entry.principal or "(anonymous)") if entry.method else entry.server


def _stage_text(entry: "AuditEntry") -> str:
    return "unreadable" if entry.problem else entry.stage or ABSENT


def _reason_text(entry: "AuditEntry") -> str:
    return entry.problem or entry.reason_text or ABSENT


LISTING: Final = Listing(
    Table(
        "entry",
        (
            *(time_column("TIME", "time"), Column("PRINCIPAL", _caller_text)),
            Column("STAGE", _stage_text),
            field_column("METHOD", "method"),
            field_column("OBJECT", "object_name", shrink=Shrink.PREFIX),
            Column("REASON", _reason_text, shrink=Shrink.END),
        ),
    )
)


@audit.command("ls")
@click.option("--principal", metavar="NAME", help="List only calls of this caller.")
@click.option(
    "--method", metavar="RPC", help="List only this rpc, such as DeleteCheckpoint."
)
@click.option(
    "--run",
    "parent",
    type=parent_path,
    metavar="PATH",
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
    help="List only what is about this run, or about a namespace and its runs.",
)
@click.option(
    "--stage", type=click.Choice(STAGES), help="List only entries of this stage."
)
@click.option(
    "--authentication",
    type=click.Choice(AUTHENTICATIONS),
    help="List only calls whose caller was authenticated so, or not at all: anonymous.",
)
@click.option(
    "--since",
    type=past_time,
    metavar="AGE|TIME",
    help="List only entries since then: 24h, or 2026-11-24T07:55Z.",
)
@click.option(
    "--limit",
    type=WholeNumber(min=1),
    metavar="N",
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Print the N newest entries only; a line on stderr says if there may be more.",
)
@json_option
@pass_connection
def list_entries(
    connection: Connection,
    /,
    *,
    parent: NamespacePath | RunPath | None,
    limit: int,
    as_json: bool,
    **chosen: Any,
) -> None:
    """List entries of the audit log of a server, the newest first.

    Needs the permission audit.read on all runs. Each server has its own log: give
    --store the address of one of them. A line of the log that cannot be read is listed
    as unreadable, with its place, whatever the other options are.

    \b
    Examples:
      storectl audit ls
      storectl audit ls --stage denied --authentication anonymous --since 24h
      storectl audit ls --run prod/llama-8b --method DeleteCheckpoint --json
    """
    from storesvc_client._api.client import newest

    with connection.open() as client:
        entries = client.audit_entries(
            parent=None if parent is None else str(parent), **chosen
        )
        found = newest(entries, limit)
    LISTING.show(found, as_json=as_json)
    if entries.page_token:
        print_note(
            f"{count_text(len(found), 'entry')} of the log of {entries.server} shown, "
            "there may be more"
        )


@audit.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=existing_file,
    metavar="FILE...",
)
@click.option(
    "--after",
    metavar="DIGEST",
    default=FIRST,
    help="Digest of the line before the first one, if earlier files are not given.",
)
@click.option(
    "--has",
    "expected",
    multiple=True,
    metavar="DIGEST",
    help="Require the line with this digest, which was kept elsewhere.",
)
def verify(*, files: tuple[Path, ...], after: str, expected: tuple[str, ...]) -> None:
    """Check that no line of a log was changed, removed, added or moved.

    Give the files of a log that was rotated in their order, the oldest first. Prints
    the digest of the last line: keep it elsewhere, and give it with --has the next
    time, to find even a log whose end was removed, or that was replaced as a whole.

    Exit code 1: a line does not continue the line before it, or a line is missing.
    """
    found = verify_lines(
        (line for file in files for line in split_lines(file.read_bytes(), str(file))),
        after=after,
        expected=expected,
    )
    if found.broken:
        advice = "give the earlier files too, or the digest of their last line --after"
        is_first = found.lines == 0 and after == FIRST
        raise Refusal(
            f"{found.broken}; the log was changed, or files are missing"
            f"{': ' + advice if is_first else ''}"
        )
    for digest in sorted(found.missing):
        raise Refusal(
            f"{files[-1]}: expected a line with the digest {digest}, got none; lines "
            "at the end were removed, or the files are of another log"
        )
    torn = f", {found.torn} of them cut off by a crash" if found.torn else ""
    click.echo(
        printable(
            f"{found.lines} lines{torn}, {found.first} to {found.last}; the digest of "
            f"the last one is {found.digest if found.lines else 'none'}"
        )
    )
