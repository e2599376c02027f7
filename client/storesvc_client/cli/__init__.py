"""storectl: the checkpoint store at the command line.

``storectl --help`` shows how to use it. It starts fast: slow imports (click, gRPC,
NumPy, rich, the server) happen when they are needed, most of them inside the commands.
No command imports jax or flax. Begin with `group.py`, whose table names the module
of each command in `commands/`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storesvc_client.cli.group import main

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storesvc_client.cli.group import main

    return main
