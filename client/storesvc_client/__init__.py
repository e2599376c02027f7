"""Save training state to a checkpoint store, and restore it.

>>> import storesvc_client as store
>>> with store.connect("memory://") as client:
...     run = client.run("docs/example")
...     run.save(0, {"weights": [1.0, 2.0]}).result().leaf_count
2
"""

import ast
from importlib import import_module
from pathlib import Path

_HOMES = {
    each.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for each in node.names
}
"""Module of each public name: the stub, which type checkers read, has all of them."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that storectl starts without gRPC."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted(_HOMES)
