"""``storectl login`` and ``storectl logout``: tokens of people."""

from typing import TYPE_CHECKING

import click

from storesvc_client._values.texts import printable
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client.cli.device_login import Prompt
    from storesvc_proto.v1.access_service_pb2 import LoginOption


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
    from storesvc_client.cli.device_login import log_in
    from storesvc_client.cli.logins import keep_login

    resolved = connection.resolved()
    if out:
        keep_login(resolved.target, None)
        click.echo(printable(f"logged out of {resolved.target}"))
        return
    chosen = _chosen(resolved.login_options(), issuer, resolved.target)
    found = log_in(
        issuer=chosen.issuer,
        client_id=chosen.client_id,
        audience=chosen.audience,
        scopes=tuple(chosen.scopes),
        show=_show,
    )
    keep_login(resolved.target, found)
    with resolved.open() as client:
        identity = client.identity()
    click.echo(printable(f"logged in to {resolved.target} as {identity.principal}"))


def _show(prompt: "Prompt") -> None:
    click.echo(printable(f"open {prompt.url} and confirm the code {prompt.code}"))


def _chosen(
    options: "list[LoginOption]", issuer: str | None, target: str
) -> "LoginOption":
    """Returns the issuer to log in at.

    Raises:
        Refusal: There is none, or several to choose from.
    """
    found = [each for each in options if issuer in (None, each.issuer)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(each.issuer for each in options) or "none"
    raise Refusal(
        f"{target}: expected one issuer to log in at, got {len(found)}; the server "
        f"lists: {known}; name one with --issuer, or use --token-file"
    )
