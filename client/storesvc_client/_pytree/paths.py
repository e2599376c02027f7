"""Converts between nested dicts and flat dicts of paths, and between their keys; names
the leaves of JAX trees, and maps, copies and shards trees by leaf name.

The keys of a flat dict are tuples of keys, or the same keys joined as text by a
separator. Both directions guarantee:

* **Unique names.** Two leaves of one name, a leaf above another, and a key that
  contains the separator are rejected, so every flat dict can be unflattened, and a
  name, with a separator, identifies exactly one path of a tree.
* **0 and "0" are different keys.** They are equal only if a caller asks for text, and
  then a mapping that has both is rejected.
* **Inputs are never modified.**

>>> flatten_dict({"a": {0: 1}, "b": 2})
{('a', 0): 1, ('b',): 2}
>>> unflatten_dict({"a.0": 1}, sep=".")
{'a': {'0': 1}}
>>> flatten_tree({"a": [1, {"b": 2}]}, sep=".")
{'a.0': 1, 'a.1.b': 2}
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeAlias, overload

import jax
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

GraphPath: TypeAlias = tuple[Any, ...]
"""Path of a leaf in nested mappings: its keys, integers kept as integers."""

IsLeaf: TypeAlias = Callable[[GraphPath, Any], bool]
"""Returns True if the mapping at a path is to be treated as a leaf."""

_MAX_DIGITS = 18
"""Maximum digits of an integer key; Python limits conversions to some thousand
digits."""


def is_flatten(tree: Mapping[Any, Any]) -> bool:
    """Returns whether a key of the dict is a path, which is a tuple.

    Raises:
        AttributeError: ``tree`` has no keys.
    """
    keys = tree.keys()
    return any(isinstance(key, tuple) for key in keys)


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,  # noqa: FBT001, FBT002 - the order is easydel's
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
    fumap: bool = False,  # noqa: FBT001, FBT002 - the order is easydel's
) -> dict[Any, Any]:
    """Returns the leaves of nested mappings by path.

    Everything except mappings is a leaf, lists too. Tuple keys of ``xs`` are already
    paths.

    Args:
        xs: A dict, an ``nnx.State`` or another mapping.
        keep_empty_nodes: Keep an empty mapping as a leaf, flax's ``empty_node``. An
            empty ``xs`` still gives an empty dict.
        is_leaf: Returns True if the mapping at a path is to be treated as a leaf.
        sep: Separator that joins the keys of a path to text; None: paths are tuples.
        fumap: Accept an ``xs`` that is not a mapping, as a leaf at the empty path.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: Two leaves have one path, one is below another, or, with ``sep``,
            two have one name or a key contains ``sep``.
    """
    if not isinstance(xs, Mapping) and not fumap:
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    leaves = mapping_leaves(xs, is_leaf=is_leaf, keep_empty_nodes=keep_empty_nodes)
    if sep is None:
        return leaves
    paths = [tuple(map(str, path)) for path in leaves]
    return dict(zip(join_names(paths, sep), leaves.values(), strict=True))


def unflatten_dict(xs: Mapping[Any, Any], sep: str | None = None) -> dict[Any, Any]:
    """Returns the nested dict of a flat dict.

    Args:
        xs: Leaves by path. ``empty_node`` becomes an empty dict.
        sep: Separator that splits a path of text; the parts stay text. None: paths are
            tuples.

    Raises:
        TypeError: ``xs`` is not a mapping, or a key is not a path.
        ValueError: A path is empty, occurs twice, or is below another leaf.
    """
    if not isinstance(xs, Mapping):
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    from flax.traverse_util import empty_node

    leaves: dict[GraphPath, Any] = {}
    for key, value in xs.items():
        # Compared by type: a tree map creates another instance.
        leaf = {} if isinstance(value, type(empty_node)) else value
        add_leaves(leaves, [(_split_key(key, sep), leaf)])
    return nest_leaves(leaves)


def _split_key(key: Any, sep: str | None) -> GraphPath:
    if sep is not None and isinstance(key, str):
        return tuple(key.split(sep))
    if sep is None and isinstance(key, tuple):
        return key
    expected = "a tuple" if sep is None else "text"
    raise TypeError(f"key {key!r}: expected {expected}, got {type(key).__name__}")


def int_key_to_string(xs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the dict, nested or flat, with its integer keys converted to text.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: A mapping contains an integer and the same integer as text.
    """
    return _with_keys(xs, _integer_text, ())


def string_key_to_int(xs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the dict, nested or flat, with keys that spell an integer converted.

    Only the results of ``str`` for 0, 1, 2, ... are converted: "007", "-1" and "²" stay
    text.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: A mapping contains an integer and the same integer as text.
    """
    return _with_keys(xs, parse_integer, ())


def _integer_text(key: Any) -> Any:
    is_integer = isinstance(key, int) and not isinstance(key, bool)
    return str(key) if is_integer else key


def parse_integer(key: Any) -> Any:
    """Returns the integer that a key spells, or the key itself."""
    if not isinstance(key, str) or len(key) > _MAX_DIGITS:
        return key
    # isdigit alone accepts superscripts, which int rejects.
    spells_one = key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")
    return int(key) if spells_one else key


def _with_keys(
    xs: Mapping[Any, Any], convert: Callable[[Any], Any], above: GraphPath
) -> dict[Any, Any]:
    if not isinstance(xs, Mapping):
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    result: dict[Any, Any] = {}
    for key, value in xs.items():
        is_path = isinstance(key, tuple) and not above
        new = tuple(map(convert, key)) if is_path else convert(key)
        if new in result:
            raise ValueError(
                f"two keys become {new!r} in {path_text(above)}: expected at most one"
            )
        nested = isinstance(value, Mapping)
        result[new] = _with_keys(value, convert, (*above, key)) if nested else value
    return result


def mapping_leaves(
    xs: Any, *, is_leaf: IsLeaf | None = None, keep_empty_nodes: bool = False
) -> dict[GraphPath, Any]:
    """Returns the leaves of nested mappings, or of one flat with tuple keys, by path.

    Raises:
        ValueError: Two leaves have one path, or one is below another.
    """
    leaves: dict[GraphPath, Any] = {}

    def walk(path: GraphPath, node: Any) -> Iterator[tuple[GraphPath, Any]]:
        if not isinstance(node, Mapping) or (is_leaf and is_leaf(path, node)):
            yield path, node
            return
        for key, value in node.items():
            # A tuple is a path only at the top level; below, it is an ordinary key.
            below = key if not path and isinstance(key, tuple) else (*path, key)
            yield from walk(below, value)
        if keep_empty_nodes and path and not node:
            from flax.traverse_util import empty_node

            yield path, empty_node

    add_leaves(leaves, walk((), xs))
    if isinstance(xs, Mapping) and is_flatten(xs):
        _refuse_leaves_below_leaves(leaves)
    return leaves


def add_leaves(
    leaves: dict[GraphPath, Any], more: Iterable[tuple[GraphPath, Any]]
) -> None:
    """Adds leaves to a dict of leaves.

    Raises:
        ValueError: Two leaves have one path.
    """
    for path, leaf in more:
        if path in leaves:
            raise ValueError(
                f"two leaves have the path {path_text(path)}: expected at most one"
            )
        leaves[path] = leaf


def nest_leaves(leaves: Mapping[GraphPath, Any]) -> dict[Any, Any]:
    """Returns the nested dict of leaves given by path.

    Raises:
        ValueError: A leaf is at the root, or below another leaf.
    """
    if () in leaves:
        raise ValueError("expected every leaf below a key, got a leaf at the root")
    _refuse_leaves_below_leaves(leaves)
    root: dict[Any, Any] = {}
    nodes: dict[GraphPath, dict[Any, Any]] = {(): root}
    for path, leaf in leaves.items():
        above = path[:-1]
        if above not in nodes:
            for length in range(1, len(path)):
                if path[:length] not in nodes:
                    nodes[path[:length]] = nodes[path[: length - 1]].setdefault(
                        path[length - 1], {}
                    )
        nodes[above][path[-1]] = leaf
    return root


def _refuse_leaves_below_leaves(leaves: Mapping[GraphPath, Any]) -> None:
    seen: set[GraphPath] = set()
    for path in leaves:
        above = path[:-1]
        # Siblings share all paths above them; each is looked up once.
        while above and above not in seen:
            if above in leaves:
                raise ValueError(
                    f"expected no leaf above another, got {path_text(path)} below "
                    f"{path_text(above)}"
                )
            seen.add(above)
            above = above[:-1]


def join_names(paths: Iterable[tuple[str, ...]], sep: str) -> list[str]:
    """Returns the joined names of paths.

    Raises:
        ValueError: A part contains ``sep``, or two paths have one name.
    """
    names: dict[str, tuple[str, ...]] = {}
    for path in paths:
        name = sep.join(path)
        # Splitting also detects parts that together form a separator of several
        # characters.
        if sep and path and name.split(sep) != list(path):
            raise ValueError(
                f"leaf {path_text(path)}: expected keys without the separator {sep!r}"
            )
        if name in names:
            raise ValueError(
                f"two leaves have the name {name!r}: {path_text(names[name])} and "
                f"{path_text(path)}; expected unique names"
            )
        names[name] = path
    return list(names)


def path_text(path: GraphPath) -> str:
    """Returns the path in index notation, which distinguishes 0 from "0"."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


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
