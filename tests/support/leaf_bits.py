"""Bits of leaves, by which trees are compared; PRNG keys count as their data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from storesvc_client._pytree.leaves import named_leaves


def key_data(leaf: Any) -> Any:
    """Returns the data of PRNG keys, and any other leaf unchanged."""
    is_key = jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def leaf_bytes(leaf: Any) -> bytes:
    return np.asarray(key_data(leaf)).tobytes()


def leaf_bits(tree: Any) -> dict[str, tuple[Any, bytes]]:
    """Returns dtype, or type, and bytes of each leaf by key."""
    return {
        leaf.key: (
            getattr(leaf.value, "dtype", type(leaf.value)),
            leaf_bytes(leaf.value),
        )
        for leaf in named_leaves(tree)[0]
    }
