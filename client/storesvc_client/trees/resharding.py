"""Moving the leaves of a tree between devices, by their names.

Two states of one model never have equal tree structures: graphdefs hold closures,
which compare by identity. So shardings are matched with leaves by key, never by
structure.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from storesvc_client.errors import MismatchError
from storesvc_client.trees.flattening import list_problems, named_leaves

__all__ = ["gather", "mesh_of_leaves", "reshard", "shardings_by_key"]


def shardings_by_key(tree: Any) -> dict[str, Sharding]:
    """Returns the shardings of a tree by leaf key: those of its arrays, abstract or
    not, or its leaves themselves where they are shardings."""
    leaves, _ = named_leaves(tree)
    found = {}
    for leaf in leaves:
        own = leaf.value
        sharding = own if isinstance(own, Sharding) else getattr(own, "sharding", None)
        if isinstance(sharding, Sharding):
            found[leaf.key] = sharding
    return found


def reshard(tree: Any, shardings: Mapping[str, Sharding]) -> Any:
    """Returns the tree with its leaves on the shardings that are given for them.

    Works inside ``jax.jit`` too, where it constrains instead of moving.

    Raises:
        MismatchError: There is a sharding for a leaf that the tree lacks, or one
            that does not fit its leaf.
    """
    leaves, treedef = named_leaves(tree)
    unknown = sorted(shardings.keys() - {leaf.key for leaf in leaves})
    problems = [f"leaf {key!r}: expected in the tree, got none" for key in unknown]
    moved = []
    for leaf in leaves:
        sharding = shardings.get(leaf.key)
        if sharding is None:
            moved.append(leaf.value)
            continue
        try:
            moved.append(_moved(leaf.value, sharding))
        except ValueError as e:
            problems.append(f"leaf {leaf.key!r}: {e}")
    if problems:
        raise MismatchError(f"shardings do not fit the tree: {list_problems(problems)}")
    return jax.tree.unflatten(treedef, moved)


def gather(tree: Any) -> Any:
    """Returns the tree with each array whole on the host, as ``numpy.ndarray``.

    Typed PRNG keys, which NumPy has no dtype for, are whole on the first device.
    """
    return jax.tree.map(_gathered, tree)


def mesh_of_leaves(tree: Any) -> Mesh | None:
    """Returns the mesh that the arrays of a tree lie on; None where they lie on none,
    or on several."""
    shardings = shardings_by_key(tree).values()
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    concrete = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    return concrete[0] if len(concrete) == 1 else None


def _moved(leaf: Any, sharding: Sharding) -> Any:
    if not hasattr(leaf, "dtype"):  # a Python number lies nowhere
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def _gathered(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return np.asarray(leaf)
