"""Computes one digest of a whole state: equal digests mean bitwise equal states.

The digest is saved in a label of the checkpoint, independent of the path of the leaves,
and computed again from what a restore returns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental.multihost_utils import process_allgather

from storesvc_client.trees.traversals import tree_path_to_string

__all__ = ["digest_of"]


def digest_of(tree: Any) -> str:
    """Returns a hexadecimal digest of the name, dtype, shape and bytes of each leaf."""
    digest = xxhash.xxh3_128()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = repr(tree_path_to_string(path))
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        digest.update(_whole(array).tobytes())
    return digest.hexdigest()


def _whole(array: Any) -> Any:
    """Returns a whole array as a host array. If other processes hold parts of it, all
    processes must call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return process_allgather(array, tiled=True)
    return np.asarray(array)
