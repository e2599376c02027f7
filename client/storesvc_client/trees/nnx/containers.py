"""Lists the containers of a pytree, which leaf names do not show.

Two optimizers may have leaves with the same names and different meanings; their
NamedTuples differ. A container without leaves, such as ``optax.EmptyState`` or
``None``, appears only here.

>>> containers({"a": (1.0, None)}, "opt_state")
{'opt_state': 'dict', 'opt_state/a': 'tuple', 'opt_state/a/1': 'None'}
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from flax import nnx

from storesvc.format.keys import escape_part

__all__ = ["containers"]


def containers(tree: Any, name: str) -> dict[str, str]:
    """Returns the type names of a tree's containers by key, in the tree's order.

    NNX states are listed but not entered: their leaves have names of their own.

    Args:
        tree: Any pytree.
        name: Key of the root.
    """
    return dict(_walk(tree, name))


def _walk(node: Any, key: str) -> Iterator[tuple[str, str]]:
    children = _children(node)
    if children is None:
        return
    yield key, "None" if node is None else type(node).__name__
    for part, child in children:
        yield from _walk(child, f"{key}/{escape_part(str(part))}")


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the parts of a container by name, or None for a leaf."""
    if node is None or isinstance(node, (nnx.State, nnx.Variable)):
        return ()
    if isinstance(node, Mapping):
        return sorted(node.items(), key=lambda item: str(item[0]))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return zip(node._fields, node, strict=True)
    if isinstance(node, (list, tuple)):
        return enumerate(node)
    if is_dataclass(node) and not hasattr(node, "shape"):
        return ((field.name, getattr(node, field.name)) for field in fields(node))
    return None
