"""Casts trees to another floating-point dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from storesvc.format.dtypes import DTYPES
from storesvc_client._pytree.matching import cast_name
from storesvc_client._pytree.placement import would_narrow
from storesvc_client.errors import InvalidRequestError

__all__ = ["cast_floating"]


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Returns the tree with its floating-point arrays, concrete or abstract, cast.

    Host arrays stay on the host. Python numbers, integers, complex numbers and PRNG
    keys are unchanged.

    Raises:
        InvalidRequestError: ``dtype`` is not a floating-point dtype of the format, or
            jax would narrow it on a device.
    """
    name = cast_name(dtype)
    if name is None:
        raise InvalidRequestError(
            "dtype of the cast: expected a floating-point dtype such as "
            "'bfloat16', got None"
        )
    to = DTYPES[name]

    def cast(leaf: Any) -> Any:
        found = getattr(leaf, "dtype", None)
        if found is None or not jnp.issubdtype(found, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, to, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array) and would_narrow(name):
            raise InvalidRequestError(
                f"dtype of the cast: jax would narrow {name} on a device; set "
                "jax_enable_x64"
            )
        return leaf.astype(to)

    return jax.tree.map(cast, tree)
