"""Names the leaves of JAX trees, and maps, copies and shards trees by leaf name.

A name is the path of a leaf as text. With a separator it is one string that identifies
exactly one path: keys that contain the separator and duplicate names are rejected.

>>> flatten_tree({"a": [1, {"b": 2}]}, sep=".")
{'a.0': 1, 'a.1.b': 2}
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload

import jax
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from storesvc_client._pytree.paths import join_names, path_text

__all__ = [
    "deepcopy_model",
    "flatten_tree",
    "named_tree_map",
    "specs_to_name_sharding",
    "tree_apply",
    "tree_path_to_string",
]


@overload
def tree_path_to_string(path: tuple[Any, ...], sep: None = None) -> tuple[str, ...]: ...
@overload
def tree_path_to_string(path: tuple[Any, ...], sep: str) -> str: ...
def tree_path_to_string(
    path: tuple[Any, ...], sep: str | None = None
) -> str | tuple[str, ...]:
    """Returns the parts of a JAX tree path as text, joined by ``sep`` if given.

    Joined parts are ambiguous when a part contains ``sep``; the keys of the store
    therefore escape each part first (``storesvc.format.keys``).
    """
    parts = tuple(map(part_text, path))
    return parts if sep is None else sep.join(parts)


def part_text(part: Any) -> str:
    """Returns one part of a JAX tree path as text."""
    match part:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=name) | GetAttrKey(name=name):
            return str(name)
        case _:
            return str(part)


def flatten_tree(
    xs: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Returns the leaves of a JAX tree by name.

    Args:
        xs: The tree.
        is_leaf: Returns True for nodes to treat as leaves.
        sep: Separator between the parts of a name; None: names are tuples of text.

    Raises:
        ValueError: Two leaves have one name, a key contains ``sep``, or JAX cannot sort
            the keys of a dict.
    """
    leaves = jax.tree_util.tree_leaves_with_path(xs, is_leaf=is_leaf)
    names = _names([path for path, _ in leaves], sep)
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def named_tree_map(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Returns the tree with each leaf replaced by ``f(name, leaf, *others)``.

    Args:
        f: Called for each leaf.
        tree: The tree.
        *rest: Other trees with the structure of ``tree``, or with that structure as a
            prefix.
        is_leaf: Returns True for nodes to treat as leaves.
        sep: Separator between the parts of a name; None: names are tuples of text.

    Raises:
        ValueError: Another tree has a different structure, two leaves have one name, or
            a key contains ``sep``.
    """
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]
    # tree.map visits the leaves in the order in which flattening lists them.
    names = iter(_names(paths, sep))
    return jax.tree.map(
        lambda *leaves: f(next(names), *leaves), tree, *rest, is_leaf=is_leaf
    )


def _names(paths: list[Any], sep: str | None) -> list[Any]:
    parts = [tree_path_to_string(path) for path in paths]
    if sep is not None:
        return join_names(parts, sep)
    seen: set[tuple[str, ...]] = set()
    for name in parts:
        if name in seen:
            raise ValueError(f"two leaves have the name {name}: expected unique names")
        seen.add(name)
    return parts


def tree_apply(fns: Any, tree: Any) -> Any:
    """Returns the tree with each function applied to the node at its position.

    Args:
        fns: Functions, in a tree whose structure is a prefix of ``tree``'s.
        tree: The tree.

    Raises:
        ValueError: The trees have different structures.
    """
    # Some callables, for example jax.tree_util.Partial, are pytrees themselves.
    return jax.tree.map(lambda fn, x: fn(x), fns, tree, is_leaf=callable)


def deepcopy_model(model: Any) -> Any:
    """Returns a copy of a module or tree that shares no array or Variable with it.

    A Variable that a module holds in two places is one Variable in the copy, too.
    """
    from flax import nnx  # it takes ten times as long to import as this module

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    def copied_module(module: Any) -> Any:
        graphdef, state = nnx.split(module)
        return nnx.merge(graphdef, jax.tree.map(deepcopy, state))

    leaves, structure = jax.tree.flatten(model, is_leaf=is_module)
    copies = [copied_module(leaf) for leaf in leaves if is_module(leaf)]
    # One deepcopy call for all, so that a leaf that occurs twice is copied once.
    others = deepcopy([None if is_module(leaf) else leaf for leaf in leaves])
    modules = iter(copies)
    copied = [
        next(modules) if is_module(leaf) else other
        for leaf, other in zip(leaves, others, strict=True)
    ]
    return jax.tree.unflatten(structure, copied)


def specs_to_name_sharding(tree: Any, mesh: Mesh | None = None) -> Any:
    """Returns the tree with a NamedSharding for each PartitionSpec.

    Args:
        tree: A tree of PartitionSpecs; None stays None.
        mesh: The mesh; by default the mesh of the context.

    Raises:
        TypeError: A leaf is not a PartitionSpec.
        ValueError: There is no mesh, or it lacks an axis; the message names the leaf.
    """
    over = _context_mesh() if mesh is None else mesh
    if over.empty:
        raise ValueError(
            "expected mesh= or a mesh in the context, got none; pass mesh= or use "
            "jax.set_mesh"
        )

    def sharding(path: tuple[Any, ...], spec: Any) -> NamedSharding:
        place = path_text(tree_path_to_string(path))
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"leaf {place}: expected a PartitionSpec, got {type(spec).__name__}"
            )
        try:
            return NamedSharding(over, spec)
        except ValueError as e:
            raise ValueError(f"leaf {place}: {e}") from e

    return jax.tree_util.tree_map_with_path(
        sharding, tree, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def _context_mesh() -> Mesh:
    """Returns the mesh of ``with mesh:``, or of ``jax.set_mesh``."""
    with warnings.catch_warnings():
        # Deprecated like ``with mesh:``, but the only access to that mesh.
        warnings.simplefilter("ignore", DeprecationWarning)
        threads = getattr(pxla, "thread_resources", None)
    mesh: Mesh | None = None if threads is None else threads.env.physical_mesh
    return jax.sharding.get_mesh() if mesh is None or mesh.empty else mesh
