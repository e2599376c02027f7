"""Calls that concern the caller of a server: ``storectl auth``, ``login``, ``ping``,
``quota`` and ``whoami``."""

from typing import TYPE_CHECKING, Final

import click

from storesvc_client._views.tables import Column, Shrink, Table, field_column
from storesvc_client._views.texts import printable, quota_amount_text
from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import (
    Listing,
    print_fields,
    print_json,
    print_note,
    print_result,
)

if TYPE_CHECKING:
    from storesvc_client import Quota
    from storesvc_client.cli.logins import Prompt


@click.command()
@click.option("--issuer", metavar="URL", help="Issuer, if the server lists several.")
@click.option("--out", is_flag=True, help="Forget the login instead.")
@pass_connection
def login(connection: Connection, *, issuer: str | None, out: bool) -> None:
    """Log in to a store with a browser, and keep the token.

    Prints a page and a code; confirm the login there, on any machine. The token is kept
    in tokens.json next to the configuration, which only you may read, and is renewed
    while the issuer permits it. Commands for the same store use it, unless
    --token-file is given.

    \b
    Examples:
      storectl login --store ckpt.example:7070
      storectl login --store ckpt.example:7070 --out
    """
    from storesvc_client.cli.logins import keep_login, log_in

    resolved = connection.resolve()
    if out:
        keep_login(resolved.target, None)
        click.echo(printable(f"logged out of {resolved.target}"))
        return
    options = resolved.login_options()
    choices = [each for each in options if issuer in (None, each.issuer)]
    if len(choices) != 1:
        known = ", ".join(each.issuer for each in options) or "none"
        raise Refusal(
            f"{resolved.target}: expected one issuer to log in at, got {len(choices)}; "
            f"the server lists: {known}; name one with --issuer, or use --token-file"
        )
    (choice,) = choices
    found = log_in(
        issuer=choice.issuer,
        client_id=choice.client_id,
        audience=choice.audience,
        scopes=tuple(choice.scopes),
        show=_show,
    )
    keep_login(resolved.target, found)
    with resolved.open() as client:
        identity = client.identity()
    click.echo(printable(f"logged in to {resolved.target} as {identity.principal}"))


def _show(prompt: "Prompt") -> None:
    click.echo(printable(f"open {prompt.url} and confirm the code {prompt.code}"))


@click.command()
@json_option
@pass_connection
def ping(connection: Connection, *, as_json: bool) -> None:
    """Check that a server accepts calls; print what it serves.

    The server answers without a call to its bucket: an unreachable bucket is no reason
    to restart the server.

    \b
    Examples:
      storectl ping
      storectl --store ckpt.example:7070 --timeout 5 ping   as a probe does

    Exit code 1: it does not accept calls.
    """
    connection = connection.resolve()
    with connection.open() as client:
        info = client.info()
    text = f"{connection.target}: store {info.store_uid}, storesvc {info.version}"
    print_result(info, text, as_json=as_json)


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
    with connection.resolve().open() as client:
        found = client.quotas(namespace)
    absence = f"no quotas apply to {namespace}"
    _QUOTAS.show(found, as_json=as_json, absence=lambda: absence)


def _amount_column(title: str, field: str, zero: str | None = None) -> Column:
    """Returns a column of amounts; `zero` is shown for 0."""

    def cell(quota: "Quota") -> str:
        amount = getattr(quota, field)
        if zero is not None and not amount:
            return zero
        return quota_amount_text(quota.name, amount)

    return Column(title, cell, right=True)


_QUOTAS: Final = Listing(
    Table(
        "quota",
        (
            field_column("QUOTA", "name"),
            Column("OF", lambda each: each.scope or "(anonymous)", shrink=Shrink.END),
            *(_amount_column("USED", "used"), _amount_column("LIMIT", "limit", "none")),
            _amount_column("WARNS AT", "soft_limit", ""),
        ),
    )
)


@click.command()
@json_option
@pass_connection
def whoami(connection: Connection, *, as_json: bool) -> None:
    """Show who you are to a server, and by what.

    \b
    Examples:
      storectl whoami --store ckpt.example:7070
    """
    with connection.resolve().open() as client:
        identity = client.identity()
    if as_json:
        print_json(identity)
        return
    expires = identity.expire_time
    print_fields(
        identity.principal or "(anonymous)",
        [
            ("authenticated by", identity.authentication),
            ("groups", ", ".join(identity.groups) or "none"),
            ("expires", f"{expires:%Y-%m-%d %H:%M:%S} UTC" if expires else "never"),
            (
                "permissions",
                "as the policy of the server says; see storectl auth can-i"
                if identity.is_restricted
                else "all: the server has no policy",
            ),
        ],
    )


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


_parent_argument = click.argument(
    "parent",
    metavar="[RUN|NAMESPACE]",
    required=False,
    shell_complete=complete_path(Part.NAMESPACE, Part.RUN),
)


@auth.command("can-i")
@click.argument("permission", metavar="VERB")
@_parent_argument
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
    with connection.resolve().open() as client:
        is_permitted = client.test_permissions(parent, [asked]) == [asked]
    document = {"permission": asked, "parent": parent, "permitted": is_permitted}
    answer = "yes" if is_permitted else "no"
    text = f"{answer}: {asked} on {parent or 'all runs'}"
    print_result(document, text, as_json=as_json)
    if not is_permitted:
        raise click.exceptions.Exit(1)


@auth.command("list")
@_parent_argument
@json_option
@pass_connection
def list_permissions(
    connection: Connection, *, parent: str | None, as_json: bool
) -> None:
    """List your permissions on a run, a namespace or all runs."""
    with connection.resolve().open() as client:
        found = client.test_permissions(parent)
    if as_json:
        print_json(found)
    elif not found:
        print_note(f"no permissions on {parent or 'all runs'}")
    else:
        for permission in found:
            click.echo(permission)
