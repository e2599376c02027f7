"""Casts trees to another floating-point dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from storesvc.format.dtypes import DTYPES
from storesvc_client._pytree.restore_target import would_narrow
from storesvc_client._values.arguments import checked_cast
from storesvc_client.errors import InvalidRequestError

__all__ = ["cast_floating"]


def cast_floating(tree: Any, dtype: Any, place: str = "cast=") -> Any:
    """Returns the tree with its floating-point arrays, concrete or abstract, cast.

    Host arrays stay on the host. Python numbers, integers, complex numbers and PRNG
    keys are unchanged.

    Args:
        tree: The tree.
        dtype: The dtype, or its name.
        place: The argument, for messages.

    Raises:
        InvalidRequestError: ``dtype`` is not a floating-point dtype of the format, or
            jax would narrow it on a device.
    """
    name = str(checked_cast(place, dtype))
    to = DTYPES[name]

    def cast(leaf: Any) -> Any:
        found = getattr(leaf, "dtype", None)
        if found is None or not jnp.issubdtype(found, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, to, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array) and would_narrow(name):
            raise InvalidRequestError(
                f"{place}: jax would narrow {name} on a device; set jax_enable_x64"
            )
        return leaf.astype(to)

    return jax.tree.map(cast, tree)
