"""JAX trees by name: names of leaves, maps with names, copies, shardings.

A name is the path of a leaf as text. Given a separator it is one string, and then it
stands for one path: keys that hold the separator and leaves of one name are refused.

>>> flatten_tree({"a": [1, {"b": 2}]}, sep=".")
{'a.0': 1, 'a.1.b': 2}
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload

import jax
from flax import nnx
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

    Joining is not injective when a part holds ``sep``; the keys of the store escape
    each part first (``storesvc.format.keys``).
    """
    parts = tuple(_part_text(part) for part in path)
    return parts if sep is None else sep.join(parts)


def _part_text(part: Any) -> str:
    match part:
        case SequenceKey(idx=name) | GetAttrKey(name=name):
            return str(name)
        case DictKey(key=name) | FlattenedIndexKey(key=name):
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
        is_leaf: Whether a node is a leaf.
        sep: Joins the parts of a name; none: names are tuples of text.

    Raises:
        ValueError: Two leaves have one name, a key holds ``sep``, or JAX cannot sort
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
        f: What is called for each leaf.
        tree: The tree.
        *rest: Trees of the same structure, or with ``tree``'s as a prefix: the
            others.
        is_leaf: Whether a node is a leaf.
        sep: Joins the parts of a name; none: names are tuples of text.

    Raises:
        ValueError: Another tree is of another structure, two leaves have one name, or
            a key holds ``sep``.
    """
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]
    # Maps go through the leaves in the order that flattening lists them in.
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
            raise ValueError(f"two leaves of the name {name}: expected at most one")
        seen.add(name)
    return parts


def tree_apply(fns: Any, tree: Any) -> Any:
    """Returns the tree with each function applied to what stands in its place.

    Args:
        fns: Functions, in a tree that ``tree`` has as a prefix.
        tree: The tree.

    Raises:
        ValueError: The trees are of different structures.
    """
    # Some callables, jax.tree_util.Partial for one, are trees themselves.
    return jax.tree.map(lambda fn, x: fn(x), fns, tree, is_leaf=callable)


def deepcopy_model(model: Any) -> Any:
    """Returns a copy of a module or tree that shares no array or Variable with it.

    Variables that a module holds in two places are one Variable in the copy as well.
    """
    leaves, structure = jax.tree.flatten(model, is_leaf=_is_module)
    copies = [_copied_module(leaf) for leaf in leaves if _is_module(leaf)]
    # All at once, so that a leaf that is there twice is copied once.
    others = deepcopy([None if _is_module(leaf) else leaf for leaf in leaves])
    modules = iter(copies)
    copied = [
        next(modules) if _is_module(leaf) else other
        for leaf, other in zip(leaves, others, strict=True)
    ]
    return jax.tree.unflatten(structure, copied)


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Pytree)


def _copied_module(module: Any) -> Any:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(deepcopy, state))


def specs_to_name_sharding(tree: Any, mesh: Mesh | None = None) -> Any:
    """Returns the tree with a NamedSharding for each PartitionSpec.

    Args:
        tree: PartitionSpecs; None stays None.
        mesh: The mesh; that of the context if not given.

    Raises:
        TypeError: A leaf is no PartitionSpec.
        ValueError: There is no mesh, or it lacks an axis; the message names the leaf.
    """
    over = _context_mesh() if mesh is None else mesh
    if over.empty:
        raise ValueError("expected a mesh, given or of the context, got none")

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

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _context_mesh() -> Mesh:
    """The mesh of ``with mesh:``, or of ``jax.set_mesh``."""
    with warnings.catch_warnings():
        # Deprecated as ``with mesh:`` is, and the only way to see that one.
        warnings.simplefilter("ignore", DeprecationWarning)
        threads = getattr(pxla, "thread_resources", None)
    mesh: Mesh | None = None if threads is None else threads.env.physical_mesh
    return jax.sharding.get_mesh() if mesh is None or mesh.empty else mesh
