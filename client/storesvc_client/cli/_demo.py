"""``storectl demo``: the main job, end to end."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from storesvc_client.cli._refusal import Refusal

_NEEDED: Final = ("flax", "jax", "optax", "tensorstore")


@click.command()
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the store in DIR, which must be empty or absent.",
)
def demo(*, keep: Path | None) -> None:
    """Train a small language model, kill it, resume it.

    It is resumed from the store as a new process, on a mesh of another shape. Takes
    about a minute. The exit code is 0 if everything that it claims held.

    \b
    Examples:
      storectl demo
      storectl demo --keep /tmp/demo
    """
    # Looked for, not imported: only the processes that train need them.
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"the demo needs {', '.join(missing)}: pip install 'storesvc[server,jax]'"
        )
    import tempfile
    from contextlib import nullcontext

    from storesvc_client.demo.job import run_demo

    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as place:
        code = run_demo(Path(place))
    click.get_current_context().exit(code)
