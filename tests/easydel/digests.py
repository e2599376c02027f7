"""States as text: type and digest of each leaf."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path


def digests(tree: Any) -> dict[str, str]:
    """Returns type, dtype, shape and digest of each leaf, by jax's ``keystr``.

    Unlike the keys of a store, ``keystr`` distinguishes ``[0]`` from ``['0']``.
    """
    return {keystr(path): digest(leaf) for path, leaf in tree_leaves_with_path(tree)}


def digest(leaf: Any) -> str:
    """Returns type, dtype, shape and digest of a leaf."""
    if isinstance(leaf, (bool, int, float)):
        return f"{type(leaf).__name__} {leaf!r}"
    what = f"{type(leaf).__name__} {leaf.dtype} {leaf.shape}"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        what = f"{what} {jax.random.key_impl(leaf)}"
        leaf = jax.random.key_data(leaf)
    return f"{what} {hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]}"
