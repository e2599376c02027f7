"""``storectl ping``: checks that a store answers."""

import click

from storesvc_client._values.texts import printable
from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_json


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
    connection = connection.resolved()
    with connection.open() as client:
        info = client.info()
    if as_json:
        print_json(info)
    else:
        text = f"{connection.target}: store {info.store_uid}, storesvc {info.version}"
        click.echo(printable(text))
