"""``storectl auth``: what the caller may do."""

from typing import Final

import click

from storesvc_client._values.texts import printable
from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_json, print_note

VERBS: Final = {
    "list": "checkpoints.list",
    "read": "checkpoints.read",
    "watch": "checkpoints.watch",
    "save": "uploads.begin",
    "tag": "tags.set",
    "pin": "checkpoints.pin",
    "delete": "checkpoints.delete",
    "purge": "checkpoints.purge",
    "collect": "garbage.collect",
}
"""Permissions by the words that people say."""


@click.group()
def auth() -> None:
    """Show what you may do.

    \b
    Examples:
      storectl auth can-i delete prod/llama
      storectl auth list prod/llama
    """


@auth.command("can-i")
@click.argument("permission", metavar="VERB")
@click.argument(
    "parent",
    metavar="[RUN|NAMESPACE]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)
@json_option
@pass_connection
def can_i(
    connection: Connection, *, permission: str, parent: str | None, as_json: bool
) -> None:
    """Show whether you have a permission on a run, a namespace or all runs.

    VERB is list, read, watch, save, tag, pin, delete, purge or collect, or a permission
    such as checkpoints.update. The run need not exist.

    Exit code 1: you have not.
    """
    asked = VERBS.get(permission, permission)
    with connection.resolved().open() as client:
        is_permitted = client.test_permissions(parent, [asked]) == [asked]
    if as_json:
        print_json({"permission": asked, "parent": parent, "permitted": is_permitted})
    else:
        answer = "yes" if is_permitted else "no"
        click.echo(printable(f"{answer}: {asked} on {parent or 'all runs'}"))
    if not is_permitted:
        raise click.exceptions.Exit(1)


@auth.command("list")
@click.argument(
    "parent",
    metavar="[RUN|NAMESPACE]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)
@json_option
@pass_connection
def list_permissions(
    connection: Connection, *, parent: str | None, as_json: bool
) -> None:
    """List your permissions on a run, a namespace or all runs."""
    with connection.resolved().open() as client:
        found = client.test_permissions(parent)
    if as_json:
        print_json(found)
    elif not found:
        print_note(f"no permissions on {parent or 'all runs'}")
    else:
        for permission in found:
            click.echo(permission)
