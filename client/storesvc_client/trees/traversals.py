"""Names, merges and meta values of NNX state trees.

The functions carry the names, arguments and errors of ``easydel.utils.traversals``
and give its results, except where those lose data. Three properties hold
throughout:

* **Inputs stay as they were.** Every result is built of new containers and new
  Variables; arrays, which are immutable, are shared. Running a module made of a
  result never advances a count inside the tree that the result came from.
* **Integer and string keys are different keys.** ``layers[0]`` and
  ``layers["0"]`` are two paths: NNX sorts them differently, and a layer list whose
  keys turned into strings merges as 0, 1, 10, 11, 2, ...
* **Nothing is overwritten.** Two values for one place are refused, never chosen
  from.

>>> merged = refine_graphs({"a": {0: 1}}, {("a", "0"): 2})
>>> merged.raw_mapping
{'a': {0: 1, '0': 2}}
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

__all__ = [
    "GraphPath",
    "GraphState",
    "MetaValueRecreator",
    "graph_leaves",
    "recreate_meta_values",
    "refine_graphs",
    "tree_path_to_string",
]

GraphState: TypeAlias = nnx.State[Any, Any]
"""An NNX state: a mapping, nested, whose leaves are Variables."""

GraphPath: TypeAlias = tuple[Any, ...]
"""Where a leaf stands in an NNX state: its keys, integers kept as integers."""

_RBG_WORDS = 4
"""Trailing dimension of raw ``rbg`` key data; ``threefry2x32`` has 2."""


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


def graph_leaves(graph: Mapping[Any, Any]) -> dict[GraphPath, Any]:
    """Returns the leaves of a State or dict, nested or flat with tuple keys, by path.

    Raises:
        TypeError: ``graph`` is not a mapping.
        ValueError: Two leaves have one path, or one lies below another.
    """
    if not isinstance(graph, Mapping):
        raise TypeError(f"expected a dict or an nnx.State, got {type(graph).__name__}")
    leaves: dict[GraphPath, Any] = {}
    for key, value in graph.items():
        path = key if isinstance(key, tuple) else (key,)
        _add_leaves(leaves, _nested_leaves(path, value))
    return leaves


def _nested_leaves(path: GraphPath, node: Any) -> Iterator[tuple[GraphPath, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _nested_leaves((*path, key), value)
    else:
        yield path, node


def _add_leaves(
    leaves: dict[GraphPath, Any], more: Iterable[tuple[GraphPath, Any]]
) -> None:
    for path, leaf in more:
        if not path:
            raise ValueError("a leaf at the root: expected it below a key")
        if path in leaves:
            raise ValueError(f"two leaves at {_shown(path)}: expected at most one")
        leaves[path] = leaf


def _refuse_leaves_below_leaves(leaves: Mapping[GraphPath, Any]) -> None:
    for path in leaves:
        for length in range(len(path)):
            if path[:length] in leaves:
                raise ValueError(
                    f"a leaf at {_shown(path)} and another at "
                    f"{_shown(path[:length])}, above it"
                )


def _shown(path: GraphPath) -> str:
    """The path as one would index it, which tells 0 from "0"."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


def refine_graphs(*graphs: Mapping[Any, Any]) -> GraphState:
    """Returns one State that holds the leaves of all graphs.

    Args:
        *graphs: States or dicts, nested, or flat with tuple keys.

    Raises:
        TypeError: There is no graph, or one is not a mapping.
        ValueError: Two graphs have a leaf at one path, or one has a leaf below
            another's.
    """
    if not graphs:
        raise TypeError("refine_graphs expected at least one graph, got none")
    leaves: dict[GraphPath, Any] = {}
    for graph in graphs:
        _add_leaves(leaves, graph_leaves(graph).items())
    _refuse_leaves_below_leaves(leaves)
    return nnx.State(_nested({path: _fresh(leaf) for path, leaf in leaves.items()}))


def _fresh(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, nnx.Variable) else leaf


def _nested(leaves: Mapping[GraphPath, Any]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


class MetaValueRecreator:
    """A source of counts and keys, the same ones for the same seed.

    Counts are 0, 1, 2, ...; keys are successive splits of the seed's key, a stream
    of its own for each PRNG implementation.
    """

    def __init__(self, seed: int = 42) -> None:
        self._seed = seed
        self._count = 0
        self._keys: dict[Hashable, jax.Array] = {}

    def get_count(self) -> jax.Array:
        """Returns the next count, a ``uint32`` scalar."""
        count = jnp.asarray(self._count, jnp.uint32)
        self._count += 1
        return count

    def get_rng(self, impl: Hashable = "threefry2x32") -> jax.Array:
        """Returns the next typed key of a PRNG implementation."""
        if impl not in self._keys:
            self._keys[impl] = jax.random.key(self._seed, impl=impl)
        key: jax.Array
        key, self._keys[impl] = jax.random.split(self._keys[impl])
        return key


@overload
def recreate_meta_values(values: GraphState, seed: int | None = None) -> GraphState: ...
@overload
def recreate_meta_values(
    values: dict[Any, Any], seed: int | None = None
) -> dict[Any, Any]: ...
def recreate_meta_values(
    values: GraphState | dict[Any, Any], seed: int | None = None
) -> GraphState | dict[Any, Any]:
    """Returns fresh counts and keys in the place of those of ``values``.

    Call it on what a checkpoint lacks and on nothing else: of a value it takes the
    shape and the kind of key (typed, of which implementation, or raw key data).

    Args:
        values: ``nnx.RngCount`` and ``nnx.RngKey`` Variables in a State, a nested
            dict, or a flat dict with tuple keys. The result is of the same kind.
        seed: Seed of the keys; 42 if not given.

    Raises:
        TypeError: A leaf is neither a count nor a key.
    """
    recreator = MetaValueRecreator() if seed is None else MetaValueRecreator(seed)

    def recreated(node: Any, path: GraphPath) -> Any:
        if isinstance(node, Mapping):
            return {key: recreated(at, (*path, key)) for key, at in node.items()}
        return _recreated_leaf(node, recreator, path)

    fresh = recreated(values, ())
    return nnx.State(fresh) if isinstance(values, nnx.State) else fresh


def _recreated_leaf(
    variable: Any, recreator: MetaValueRecreator, path: GraphPath
) -> Any:
    match variable:
        case nnx.RngCount():
            shape = _shape(variable.get_value())
            return variable.replace(jnp.broadcast_to(recreator.get_count(), shape))
        case nnx.RngKey():
            return variable.replace(_like_key(variable.get_value(), recreator))
        case _:
            raise TypeError(
                f"leaf {_shown(path)}: expected RngCount or RngKey, "
                f"got {type(variable).__name__}"
            )


def _like_key(value: Any, recreator: MetaValueRecreator) -> jax.Array:
    """A new key, or array of keys, as ``value`` is: typed, or raw key data."""
    if value is None:
        return recreator.get_rng()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _keys(recreator.get_rng(_key_impl(value)), _shape(value))
    # Raw data does not tell its implementation, only its width.
    impl = "rbg" if value.shape[-1] == _RBG_WORDS else "threefry2x32"
    return jax.random.key_data(_keys(recreator.get_rng(impl), value.shape[:-1]))


def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(key, shape) if shape else key


def _key_impl(value: jax.Array | jax.ShapeDtypeStruct) -> Hashable:
    """The implementation of typed keys, of abstract ones too: ``key_impl`` refuses
    a ShapeDtypeStruct, but not the tracer that stands for one."""
    seen: list[Hashable] = []
    jax.eval_shape(lambda keys: seen.append(jax.random.key_impl(keys)), value)
    return seen[0]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
