"""``storectl demo``: runs the main job, end to end."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from storesvc_client.cli.arguments import store_target
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client.demo.job import Served

_NEEDED: Final = ("flax", "jax", "optax", "tensorstore")


@click.command()
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the store in DIR, which must be empty or absent.",
)
@click.option(
    "--store",
    "-s",
    type=store_target,
    metavar="HOST:PORT",
    help="Train on the store of this server, as a new run; not on a store of its own.",
)
@pass_connection
def demo(connection: Connection, *, keep: Path | None, store: str | None) -> None:
    """Train a small language model, kill it, resume it.

    A new process resumes it from the store, on a mesh of another shape. Takes about a
    minute. The exit code is 0 if every claim holds.

    \b
    Examples:
      storectl demo
      storectl demo --keep /tmp/demo
      storectl demo --store ckpt.example:7070 --ca ca.pem
    """
    if keep and store:
        raise click.UsageError(
            "expected --keep or --store, not both: --keep keeps the demo's own store"
        )
    # find_spec imports nothing: only the training processes need them.
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"the demo needs {', '.join(missing)}: pip install 'storesvc[server,jax]'"
        )
    import tempfile
    from contextlib import nullcontext

    from storesvc_client.demo.job import run_demo

    served = _served(connection.to_store(store)) if store else None
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as place:
        code = run_demo(Path(place), served)
    click.get_current_context().exit(code)


def _served(connection: Connection) -> "Served":
    """Returns the server for the demo, after a successful connection."""
    from storesvc_client.demo.job import Served

    connection.open().close()
    reaching = ["--insecure"] if connection.insecure else []
    for option in ("ca", "cert", "key", "token_file"):
        if file := getattr(connection, option):
            reaching += [f"--{option.replace('_', '-')}", str(file)]
    return Served(address=connection.target, reaching=tuple(reaching))
