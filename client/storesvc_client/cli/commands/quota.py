"""``storectl quota``: shows the quotas of a namespace."""

from typing import TYPE_CHECKING

import click

from storesvc_client._values.texts import size_text
from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import (
    Column,
    Shrink,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from storesvc_client import Quota


@click.command()
@click.argument(
    "namespace", shell_complete=complete_path(Part.NAMESPACE, Part.NAMESPACE)
)
@json_option
@pass_connection
def quota(connection: Connection, *, namespace: str, as_json: bool) -> None:
    """Show the quotas of a namespace, and how much is used.

    Your own quotas are in the list, too. Each server counts its own calls; stored bytes
    are of the whole store.

    \b
    Examples:
      storectl quota prod
    """
    with connection.resolved().open() as client:
        found = client.quotas(namespace)
    if as_json:
        print_json(found)
    elif not found:
        print_note(f"no quotas apply to {namespace}")
    else:
        columns = (
            Column("QUOTA"),
            Column("OF", shrink=Shrink.END),
            Column("USED", right=True),
            Column("LIMIT", right=True),
            Column("WARNS AT", right=True),
        )
        print_table(columns, map(_row, found))


def _row(found: "Quota") -> tuple[str, ...]:
    amounts = (found.used, found.limit, found.soft_limit)
    is_size = found.name in ("stored_bytes", "bytes_in_flight")
    used, limit, warns = (
        size_text(amount) if is_size else f"{amount:,}" for amount in amounts
    )
    return (
        found.name,
        found.scope or "(anonymous)",
        used,
        limit if found.limit else "none",
        warns if found.soft_limit else "",
    )
