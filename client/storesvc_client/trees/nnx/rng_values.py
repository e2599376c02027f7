"""Recreates the counts and keys of RNG streams in NNX modules.

A new value replaces one that a checkpoint lacks, or an abstract one. It has the same
shape and kind: a typed key with the same PRNG implementation, or raw key data. Typed
keys stay typed, because raw data would change the dtype of the leaf.

>>> recreate_meta_values({"count": nnx.RngCount(7, tag="dropout")})["count"].get_value()
Array(0, dtype=uint32)
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from storesvc_client._pytree.paths import GraphPath, nest_leaves, path_text
from storesvc_client.trees.nnx.graphs import GraphState, graph_leaves

__all__ = [
    "MetaValueRecreator",
    "fill_rng_values",
    "is_abstract_rng",
    "recreate_meta_values",
    "recreated_leaf",
    "stored_value",
]

_RBG_WORDS = 4
"""Trailing dimension of raw ``rbg`` key data; ``threefry2x32`` has 2."""


class MetaValueRecreator:
    """Generates counts and keys that depend on the seed only.

    Counts are 0, 1, 2, ...; keys are successive splits of the seed's key, with a
    separate stream for each PRNG implementation.
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

    def get_rng(self) -> jax.Array:
        """Returns the next key as raw key data, as EasyDeL does."""
        return jax.random.key_data(self.get_key())

    def get_key(self, impl: Hashable = "threefry2x32") -> jax.Array:
        """Returns the next typed key of a PRNG implementation.

        Raises:
            ValueError: JAX has no implementation with this name.
        """
        if impl not in self._keys:
            self._keys[impl] = jax.random.key(self._seed, impl=impl)
        key: jax.Array
        key, self._keys[impl] = jax.random.split(self._keys[impl])
        return key


def recreate_meta_values(
    values: Mapping[Any, Any], seed: int | None = None
) -> dict[Any, Any]:
    """Returns a dict of ``values`` with new counts and keys.

    Call it only for values that a checkpoint lacks: only the shape of a value and its
    kind of key (typed with an implementation, or raw key data) are kept.

    Args:
        values: ``nnx.RngCount`` and ``nnx.RngKey`` Variables in a State, a nested
            dict, or a flat dict with tuple keys. The result has the same keys.
        seed: Seed of the keys; 42 by default.

    Raises:
        TypeError: A leaf is neither a count nor a key, or ``values`` is not a
            mapping.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"expected a dict or an nnx.State, got {type(values).__name__}")
    recreator = MetaValueRecreator() if seed is None else MetaValueRecreator(seed)

    def recreated(node: Mapping[Any, Any], path: GraphPath) -> dict[Any, Any]:
        return {
            key: recreated(at, (*path, key))
            if isinstance(at, Mapping)
            else recreated_leaf(at, recreator, (*path, key))
            for key, at in node.items()
        }

    return recreated(values, ())


def fill_rng_values(state: GraphState) -> GraphState:
    """Returns a State with new values for its abstract counts and keys.

    EasyDeL's quantization leaves such counts and keys in its layers.
    """
    leaves = graph_leaves(state)
    abstract = {path: leaf for path, leaf in leaves.items() if is_abstract_rng(leaf)}
    if not abstract:
        return state
    return nnx.State(nest_leaves({**leaves, **recreate_meta_values(abstract)}))


def is_abstract_rng(leaf: Any) -> bool:
    """Returns whether a leaf is a count or a key without a value."""
    return isinstance(leaf, nnx.RngState) and isinstance(
        stored_value(leaf), jax.ShapeDtypeStruct
    )


def recreated_leaf(leaf: Any, recreator: MetaValueRecreator, path: GraphPath) -> Any:
    """Returns a Variable like the given count or key, with a new value.

    Raises:
        TypeError: The leaf is neither; the message has its path.
    """
    match leaf:
        case nnx.RngCount():
            shape = _shape(stored_value(leaf))
            return leaf.replace(jnp.broadcast_to(recreator.get_count(), shape))
        case nnx.RngKey():
            return leaf.replace(_like_key(stored_value(leaf), recreator))
        case _:
            raise TypeError(
                f"leaf {path_text(path)}: expected RngCount or RngKey, "
                f"got {type(leaf).__name__}"
            )


def stored_value(variable: "nnx.Variable[Any]") -> Any:
    """Returns the value of a Variable, read without its hooks.

    A hook computes the value that a model uses, such as a dequantised weight; the
    stored value is a different one.
    """
    value: Any = variable.get_raw_value()
    return value[...] if variable.get_metadata().get("ref") else value


def _like_key(value: Any, recreator: MetaValueRecreator) -> jax.Array:
    """Returns a new key, or array of keys, of the same kind: typed, or raw key data."""
    if value is None:
        return recreator.get_key()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _keys(recreator.get_key(_key_impl(value)), _shape(value))
    # Raw data has no implementation; only its width identifies it.
    impl = "rbg" if value.shape[-1] == _RBG_WORDS else "threefry2x32"
    return jax.random.key_data(_keys(recreator.get_key(impl), value.shape[:-1]))


def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(key, shape) if shape else key


def _key_impl(value: jax.Array | jax.ShapeDtypeStruct) -> Hashable:
    """Returns the implementation of typed keys, also abstract ones.

    ``key_impl`` rejects a ShapeDtypeStruct, but accepts the tracer that stands for one.
    """
    seen: list[Hashable] = []
    jax.eval_shape(lambda keys: seen.append(jax.random.key_impl(keys)), value)
    return seen[0]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
