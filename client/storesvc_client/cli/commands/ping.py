"""``storectl ping``: whether a store answers."""

import click

from storesvc_client.cli.arguments import json_option
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_json, printable


@click.command()
@json_option
@pass_connection
def ping(connection: Connection, *, as_json: bool) -> None:
    """Tell whether a server takes calls, and what it serves.

    It answers without asking its bucket: one that is out of reach is no reason to
    start the server anew.

    \b
    Examples:
      storectl ping
      storectl --store ckpt.example:7070 --timeout 5 ping   as a probe does

    Exit code 1: it does not take calls.
    """
    with connection.open() as client:
        info = client.info()
    if as_json:
        print_json(info)
    else:
        text = f"{connection.target}: store {info.store_uid}, storesvc {info.version}"
        click.echo(printable(text))
