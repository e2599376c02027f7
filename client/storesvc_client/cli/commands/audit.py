"""``storectl audit``: verifies audit logs."""

from pathlib import Path

import click

from storesvc.format.audit_chain import lines_of
from storesvc.format.audit_chain import verify as verify_lines
from storesvc_client._values.texts import printable
from storesvc_client.cli.errors import Refusal


@click.group()
def audit() -> None:
    """Verify the audit log of a server.

    \b
    Examples:
      storectl audit verify /var/log/storesvc/audit.log
      storectl audit verify audit.log.2 audit.log.1 audit.log
    """


@audit.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE...",
)
def verify(*, files: tuple[Path, ...]) -> None:
    """Check that no line of a log was changed, removed, added or moved.

    Give the files of a log that was rotated in their order, the oldest first. Prints
    the digest of the last line: keep it elsewhere to find even a log that was replaced
    as a whole.

    Exit code 1: a line does not continue the line before it.
    """
    found = verify_lines(
        line for file in files for line in lines_of(file.read_bytes(), str(file))
    )
    if found.broken:
        raise Refusal(f"{found.broken}; the log was changed, or files are missing")
    torn = f", {found.torn} of them cut off by a crash" if found.torn else ""
    click.echo(
        printable(
            f"{found.lines} lines{torn}, {found.first} to {found.last}; the digest of "
            f"the last one is {found.digest or 'none'}"
        )
    )
