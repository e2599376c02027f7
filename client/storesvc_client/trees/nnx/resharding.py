"""Moves the leaves of a tree between devices, by leaf key.

Two states of one model never have equal tree structures: graphdefs contain closures,
which compare by identity. Therefore shardings are matched with leaves by key, not by
structure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from storesvc_client._pytree.leaves import list_problems, named_leaves, signature
from storesvc_client._pytree.partition_rules import check_mesh
from storesvc_client.errors import InvalidRequestError, MismatchError

__all__ = [
    "follow_parameters",
    "gather",
    "mesh_of_leaves",
    "required_shardings",
    "reshard",
    "shardings_by_key",
]


def shardings_by_key(tree: Any) -> dict[str, Sharding]:
    """Returns the shardings of a tree's leaves by key.

    A leaf is an array, concrete or abstract, or itself a sharding.
    """
    leaves, _ = named_leaves(tree)
    found = ((leaf.key, _sharding(leaf.value)) for leaf in leaves)
    return {key: sharding for key, sharding in found if sharding is not None}


def _sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of an array, or the leaf itself if it is a sharding."""
    found = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
    return found if isinstance(found, Sharding) else None


def required_shardings(tree: Any) -> dict[str, Sharding]:
    """Returns the shardings of a tree that must contain some.

    Raises:
        InvalidRequestError: It contains none, or leaves that cannot have one, such as a
            ``PartitionSpec``, which does not name devices.
    """
    leaves, _ = named_leaves(tree)
    problems = [
        f"leaf {leaf.key!r}: expected a Sharding, or an array that has one, "
        f"got {leaf.value!r}"
        for leaf in leaves
        if not _may_have_sharding(leaf.value)
    ]
    if problems:
        raise InvalidRequestError(list_problems(problems))
    found = shardings_by_key(tree)
    if not found:
        raise InvalidRequestError(
            "expected shardings, or arrays that have them, got none in a "
            f"{type(tree).__name__}; pass a tree such as state.shardings"
        )
    return found


def _may_have_sharding(leaf: Any) -> bool:
    """Returns whether a leaf is a sharding or a possible leaf of a state.

    States have arrays, some without a sharding, and Python numbers.
    """
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if type(leaf) in (str, bytes):  # a spec by mistake, rather than a text of a state
        return False
    return is_array or isinstance(leaf, Sharding) or signature(leaf) is not None


def follow_parameters(
    opt_state: Any, parameters: Any, mesh: Mesh | None = None
) -> dict[str, Sharding]:
    """Returns the shardings, by leaf key, of an optimizer state placed like its
    parameters.

    A moment is matched with its parameter by name: ``opt_state/0/mu/fc1/kernel/value``
    gets the sharding of ``fc1/kernel/value`` if the shapes are equal. If several names
    match, the longest one applies. Other leaves, such as counts, are replicated on the
    mesh.

    Args:
        opt_state: The optimizer state; its leaves may be abstract.
        parameters: The ``graphstate``, whose leaves have shardings.
        mesh: The mesh for other leaves. None: the mesh of the parameters, if they are
            all on one; otherwise the result omits these leaves.

    Raises:
        InvalidRequestError: ``mesh`` is not a mesh.
    """
    if mesh is not None:
        check_mesh(mesh)
    over = mesh or mesh_of_leaves(parameters)
    whole = None if over is None else NamedSharding(over, PartitionSpec())
    leaves = jax.tree.leaves(parameters)
    if whole is None and not any(map(_sharding, leaves)):
        return {}
    own_shardings: dict[str, Sharding] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in named_leaves(parameters)[0]:
        own = _sharding(leaf.value)
        if own is not None:
            own_shardings[leaf.key] = own
            shapes[leaf.key] = _shape(leaf.value)
    found: dict[str, Sharding] = {}
    for leaf in named_leaves({"opt_state": opt_state})[0]:
        shape = _shape(leaf.value)
        names = (name for name in _suffixes(leaf.key) if name in own_shardings)
        fits = (own_shardings[name] for name in names if shapes[name] == shape)
        sharding = next(fits, whole)
        if sharding is not None:
            found[leaf.key] = sharding
    return found


def _suffixes(key: str) -> Iterator[str]:
    """Yields a key without its first part, without its first two, and so on."""
    at = key.find("/")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find("/", at + 1)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def reshard(tree: Any, shardings: Mapping[str, Sharding]) -> Any:
    """Returns the tree with its leaves moved to the given shardings.

    Also works inside ``jax.jit``, where it constrains shardings instead of moving.

    Raises:
        MismatchError: A sharding is for a leaf that the tree lacks, or does not fit its
            leaf.
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
    """Returns the tree with each array complete on the host, as ``numpy.ndarray``.

    Typed PRNG keys, for which NumPy has no dtype, are complete on the first device.
    """
    return jax.tree.map(_gathered, tree)


def mesh_of_leaves(tree: Any) -> Mesh | None:
    """Returns the mesh of a tree's arrays, or None if they have none or several."""
    shardings = {_sharding(leaf) for leaf in jax.tree.leaves(tree)}
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    concrete = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    return concrete[0] if len(concrete) == 1 else None


def _moved(leaf: Any, sharding: Sharding) -> Any:
    if not hasattr(leaf, "dtype"):  # a Python number has no device
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
