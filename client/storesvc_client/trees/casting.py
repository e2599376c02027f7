"""Trees in another floating-point dtype."""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["cast_floating"]


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Returns the tree with its floating-point arrays, real or abstract, in a dtype."""

    def cast(leaf: Any) -> Any:
        found = getattr(leaf, "dtype", None)
        if found is None or not jnp.issubdtype(found, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            sharding = leaf.sharding
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
        return leaf.astype(dtype)

    return jax.tree.map(cast, tree)
