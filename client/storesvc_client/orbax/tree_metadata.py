"""Metadata of one tree, as ``item_metadata`` of Orbax's managers returns it.

Orbax's own class is private, rejects integer keys and can be unflattened only once, so
this one has its attributes and methods instead, without ``use_zarr3``.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMetadata:
    """A tree of ``ShapeDtypeStruct``, and what the caller saved with it.

    It is a pytree with the leaves and key paths of its tree, and a target of a restore.
    """

    tree: Any
    """The containers as they were saved, with a struct for each array."""
    custom_metadata: Any = None
    """``custom_metadata`` of the argument of the save, a value of JSON; None if it had
    none."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Returns the first level of the tree, and what rebuilds it."""
        found, structure = jax.tree_util.tree_flatten_with_path(
            self.tree, is_leaf=lambda x: x is not self.tree
        )
        below = [(path[0] if path else GetAttrKey("tree"), x) for path, x in found]
        return below, (structure, json.dumps(self.custom_metadata))

    @classmethod
    def tree_unflatten(cls, rest: Any, below: Sequence[Any]) -> "TreeMetadata":
        """Returns the metadata of a first level and ``rest``."""
        structure, text = rest
        return cls(tree=structure.unflatten(below), custom_metadata=json.loads(text))

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tree

    def __len__(self) -> int:
        return len(self.tree)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns what is at a key; ``default`` if nothing is."""
        try:
            return self.tree[key]
        except (KeyError, IndexError):
            return default

    def keys(self) -> Any:
        """Returns the first keys of a tree that is a dict."""
        return self.tree.keys()

    def values(self) -> Any:
        """Returns what is below the first keys of a tree that is a dict."""
        return self.tree.values()

    def items(self) -> Any:
        """Returns the first keys of a tree that is a dict, and what is below them."""
        return self.tree.items()


def plain_tree(tree: Any) -> Any:
    """Returns the tree of metadata; anything else unchanged."""
    return tree.tree if isinstance(tree, TreeMetadata) else tree
