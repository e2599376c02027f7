"""``storectl whoami``: shows the caller as a server sees it."""

import click

from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_fields, print_json


@click.command()
@json_option
@pass_connection
def whoami(connection: Connection, *, as_json: bool) -> None:
    """Show who you are to a server, and by what.

    \b
    Examples:
      storectl whoami --store ckpt.example:7070
    """
    with connection.resolved().open() as client:
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
