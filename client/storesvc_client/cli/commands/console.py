"""``storectl console``: serves pages about a store to the browser."""

import os
import secrets
from contextlib import closing
from importlib.util import find_spec
from typing import Final

import click

from storesvc_client.cli.arguments import WholeNumber
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import print_note

_NEEDED: Final = ("jinja2", "starlette", "uvicorn")


@click.command()
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=7080,
    show_default=True,
    help="Port on this machine; 0 chooses a free one.",
)
@pass_connection
def console(connection: Connection, *, port: int) -> None:
    """Serve pages about the store to your browser, until Ctrl-C.

    Prints the address to open. Only this machine can connect; from another one, forward
    the port: ssh -L 7080:127.0.0.1:7080 HOST. The pages show and change what you may:
    the console uses the identity of storectl.

    \b
    Examples:
      storectl console
      storectl console --store file:///ckpts --port 0
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"the console needs {', '.join(missing)}, which is not installed: pip "
            "install 'storesvc[console]'"
        )
    resolved = connection.resolve()
    with resolved.open() as client:
        from storesvc_client.console.app import create_app
        from storesvc_client.console.server import HOST, bound_socket, serve

        try:
            listening = bound_socket(port)
        except OSError as e:
            raise Refusal(
                f"{HOST}:{port}: expected a free port, got an error of the system: "
                f"{os.strerror(e.errno or 0)}; give another --port, or 0"
            ) from e
        with closing(listening):
            key = secrets.token_urlsafe(24)
            taken = listening.getsockname()[1]
            click.echo(f"http://{HOST}:{taken}/?key={key}")
            print_note(f"console of {resolved.target}; Ctrl-C ends it")
            serve(create_app(client, key=key, store=resolved.target), listening)
