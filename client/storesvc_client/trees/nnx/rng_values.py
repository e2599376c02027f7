"""The meta values of NNX modules: counts and keys of their RNG streams, made anew.

A fresh value takes the place of one that a checkpoint lacks, or of an abstract one.
It is of the same kind: of the shape of the old one, and a typed key of the same PRNG
implementation or raw key data. Typed keys stay typed, as raw data in their place
would change the dtype of the leaf.

>>> recreate_meta_values({"count": nnx.RngCount(7, tag="dropout")})["count"].get_value()
Array(0, dtype=uint32)
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from storesvc_client._pytree.paths import GraphPath, path_text

__all__ = [
    "MetaValueRecreator",
    "recreate_meta_values",
    "recreated_leaf",
    "stored_value",
]

_RBG_WORDS = 4
"""Trailing dimension of raw ``rbg`` key data; ``threefry2x32`` has 2."""


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
        """Returns the next typed key of a PRNG implementation.

        Raises:
            ValueError: JAX has no implementation of this name.
        """
        if impl not in self._keys:
            self._keys[impl] = jax.random.key(self._seed, impl=impl)
        key: jax.Array
        key, self._keys[impl] = jax.random.split(self._keys[impl])
        return key


def recreate_meta_values(
    values: Mapping[Any, Any], seed: int | None = None
) -> dict[Any, Any]:
    """Returns a dict with fresh counts and keys in the place of those of ``values``.

    Call it on what a checkpoint lacks and on nothing else: of a value it takes the
    shape and the kind of key (typed, of which implementation, or raw key data).

    Args:
        values: ``nnx.RngCount`` and ``nnx.RngKey`` Variables in a State, a nested
            dict, or a flat dict with tuple keys. The result has the same keys.
        seed: Seed of the keys; 42 if not given.

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


def recreated_leaf(leaf: Any, recreator: MetaValueRecreator, path: GraphPath) -> Any:
    """Returns another Variable like the count or key, with a fresh value.

    Raises:
        TypeError: The leaf is neither; the message names its path.
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
    """Returns what a Variable holds, read without its hooks.

    A hook says what a model computes with, such as a dequantised weight: what it
    makes of a value is not to be taken for the value.
    """
    value: Any = variable.get_raw_value()
    return value[...] if variable.get_metadata().get("ref") else value


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
