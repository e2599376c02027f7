"""Decides the devices of each restored leaf.

The placement follows partition rules on a mesh, the sharding of the leaf in ``like``,
or the sharding that the checkpoint recorded. It never changes values.
"""

import math
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from storesvc.format.dtypes import DTYPES
from storesvc.format.trees import Leaf, SavedSharding
from storesvc_client._pytree.matching import Wanted
from storesvc_client._pytree.partition_rules import (
    RECORDED,
    Partitioner,
    Rules,
    axis_names,
)
from storesvc_client._values.options import Indivisible
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import tree_pb2 as pb

Placement: TypeAlias = Sharding | None
"""Sharding on devices, or None for the host."""

_DEVICE_KINDS: Final = frozenset({pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_PRNG_KEY})
_WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
"""dtypes that jax narrows unless ``jax_enable_x64`` is set."""


class Placer:
    """Decides the placements of the leaves of one restore."""

    def __init__(
        self,
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        indivisible: Indivisible = "error",
    ) -> None:
        """Prepares the rules on the mesh.

        Raises:
            InvalidRequestError: A mesh without rules, rules without a mesh, or a rule
                that is not usable.
        """
        if (mesh is None) != (rules is None):
            raise InvalidRequestError(
                "restore: expected both mesh= and rules=, or neither; rules=[('', "
                "PartitionSpec())] replicates every leaf, rules='recorded' uses the "
                "saved shardings"
            )
        if rules is None and indivisible != "error":
            raise InvalidRequestError(
                "restore: expected indivisible= with mesh= and rules=, got neither; "
                "leave it out"
            )
        self._recorded = rules == RECORDED
        self._partitioner: Partitioner | None = None
        if mesh is not None and rules is not None:
            ordered = () if isinstance(rules, str) else rules
            if isinstance(rules, str) and not self._recorded:
                raise InvalidRequestError(
                    f"restore: expected rules= a list or 'recorded', got {rules!r}"
                )
            self._partitioner = Partitioner(mesh, ordered, indivisible)

    def placement(self, leaf: Leaf, wanted: Wanted) -> Placement:
        """Returns the placement of a leaf.

        Raises:
            ValueError: The leaf cannot be placed; the message says why.
        """
        if wanted.kind not in _DEVICE_KINDS:
            return None
        is_key = wanted.kind == pb.LEAF_KIND_PRNG_KEY
        shape = leaf.shape[:-1] if is_key else leaf.shape
        placement = self._chosen(leaf, wanted, shape)
        if placement is None:
            return None
        if would_narrow(wanted.dtype):
            raise ValueError(
                f"jax would narrow {wanted.dtype} on a device; set jax_enable_x64, or "
                "give a numpy array in like="
            )
        placement.shard_shape(shape)  # raises if the axes do not divide the shape
        if is_key and not isinstance(placement, (NamedSharding, SingleDeviceSharding)):
            raise ValueError(
                f"PRNG keys cannot be placed by a {type(placement).__name__}; give a "
                "NamedSharding"
            )
        return placement

    def kept_value(self, leaf: Leaf, wanted: Wanted) -> Any:
        """Returns the value that ``like`` has for a leaf, moved to its placement.

        Raises:
            ValueError: The leaf cannot be placed; the message says why.
        """
        value = wanted.value
        if self._partitioner is None and wanted.dtype == leaf.dtype:
            return value
        placement = self.placement(leaf, wanted)
        with jax.transfer_guard("allow"):  # the caller asked for it
            if wanted.dtype != leaf.dtype:
                value = value.astype(DTYPES[wanted.dtype])
            if self._partitioner is None or placement is None:
                return value
            return _put(value, placement)

    @property
    def advice(self) -> str:
        """Names the option that would accept the leaves that the rules do not fit."""
        return "" if self._partitioner is None else self._partitioner.advice

    def report(self) -> None:
        """Logs the axes that the rules dropped."""
        if self._partitioner is not None:
            self._partitioner.report()

    def _chosen(self, leaf: Leaf, wanted: Wanted, shape: tuple[int, ...]) -> Placement:
        if self._partitioner is not None:
            if self._recorded:
                return self._partitioner.recorded(leaf.key, shape, leaf.sharding)
            return self._partitioner.sharding(leaf.key, shape)
        if wanted.value is not None:
            sharding = getattr(wanted.value, "sharding", None)
            if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
                return _on_ambient_mesh(sharding)
            if sharding is None and not jax.sharding.get_mesh().empty:
                # as jax places an array that is created now
                return NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
            return sharding or default_device()
        return saved_placement(leaf.sharding, wanted.dtype)


def _on_ambient_mesh(sharding: Any) -> NamedSharding:
    """Returns a sharding of an abstract mesh on the mesh of ``jax.set_mesh``.

    Raises:
        ValueError: There is none, or it lacks an axis of the sharding.
    """
    named = [a for axes in sharding.spec for a in axis_names(axes)]
    ambient = jax.sharding.get_mesh()
    if not ambient.empty and ambient.shape.keys() >= set(named):
        return NamedSharding(ambient, sharding.spec, memory_kind=sharding.memory_kind)
    has = "none" if ambient.empty else f"one of {', '.join(map(repr, ambient.shape))}"
    raise ValueError(
        f"its sharding is on an abstract mesh of {', '.join(map(repr, named))}: "
        f"expected a mesh with these axes from jax.set_mesh, got {has}; restore within "
        "jax.set_mesh(mesh), or give mesh= and rules="
    )


def _put(value: jax.Array, placement: Sharding) -> jax.Array:
    """Moves a local or global value to its placement."""
    if placement.is_fully_addressable or not value.is_fully_addressable:
        moved: jax.Array = jax.device_put(value, placement)
        return moved
    # device_put would compare the values of all processes, and so block until every
    # process restores.
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(value) if is_key else value)
    put = jax.make_array_from_callback(
        data.shape, placement, lambda at: data[at], dtype=data.dtype
    )
    if not is_key:
        return put
    keys: jax.Array = jax.random.wrap_key_data(put, impl=jax.random.key_impl(value))
    return keys


def allows_wide() -> bool:
    """Returns whether 64-bit types are enabled in the caller's jax."""
    config: Any = jax.config  # its options have no types
    return bool(config.jax_enable_x64)


def would_narrow(dtype: str) -> bool:
    """Returns whether jax would narrow a dtype."""
    return dtype in _WIDE and not allows_wide()


def default_device() -> Sharding:
    """Returns the sharding of a whole array on the default device."""
    config: Any = jax.config  # its options have no types
    device = config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):  # a platform
        device = jax.local_devices(backend=device)[0]
    return SingleDeviceSharding(device)


def saved_placement(saved: SavedSharding | None, dtype: str) -> Placement:
    """Returns the saved sharding on this process's devices, or None if it does not
    fit."""
    if would_narrow(dtype):
        return None
    if saved is None:
        return default_device()
    devices = jax.devices()
    if math.prod(saved.axis_sizes) != len(devices):
        return None
    grid = np.array(devices).reshape(saved.axis_sizes)
    mesh = Mesh(grid, saved.axis_names)
    return NamedSharding(mesh, PartitionSpec(*(s or None for s in saved.spec)))
