"""A restore's target: which leaves, where to, and what tree to make of them.

``Target.choose`` compares a checkpoint's leaves with what is asked for, refuses
with every difference at once, and decides a placement for each leaf. It reads
nothing; the caller brings filled buffers to ``place``.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from storesvc.format.grids import Region, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._receiving import Buffer
from storesvc_client._values import path_of
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.flattening import (
    NamedLeaf,
    Signature,
    list_problems,
    named_leaves,
    signature,
)
from storesvc_client.trees.nesting import nest
from storesvc_client.trees.snapshot import region_of
from storesvc_proto.v1 import tree_pb2 as pb

Rules: TypeAlias = Sequence[tuple[str, PartitionSpec]]
Patterns: TypeAlias = Sequence[tuple[re.Pattern[str], PartitionSpec]]
Placement: TypeAlias = Sharding | None
"""None: on the host."""

_DEVICE_KINDS: Final = frozenset({pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_PRNG_KEY})
_ARRAY_KINDS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)
_WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
"""dtypes that jax would narrow without ``jax_enable_x64``."""


@dataclass(eq=False)
class Target:
    """What a restore is to return, and what has arrived of it."""

    tree: Tree
    placements: Sequence[Placement]
    kinds: Sequence["pb.LeafKind.ValueType"]
    """What each leaf becomes."""
    build: Callable[[list[Any]], Any]
    """Makes the tree to return of its leaves, in the order of the leaf table."""
    _regions: dict[int, dict[Region, list[jax.Device]]] = field(default_factory=dict)
    _arrived: dict[int, dict[jax.Device | None, Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _wide: bool = False
    """Whether the caller's jax has 64-bit types."""

    @classmethod
    def choose(
        cls,
        tree: Tree,
        name: str,
        *,
        like: Any,
        mesh: Mesh | None,
        rules: Rules | None,
    ) -> "Target":
        """Returns the target of a restore.

        Args:
            tree: The checkpoint's leaves.
            name: What messages call the checkpoint.
            like: A pytree of the structure to return; None: nested containers.
            mesh: Where to put device arrays.
            rules: How to spread them over the mesh.

        Raises:
            InvalidRequestError: Mesh without rules, or rules without mesh.
            MismatchError: The checkpoint does not fit.
        """
        if (mesh is None) != (rules is None):
            raise InvalidRequestError(
                "restore: expected both mesh= and rules=, or neither; "
                "rules=[('', PartitionSpec())] puts every leaf on each device"
            )
        patterns = None if rules is None else _compiled(rules)
        problems: list[str] = []
        if like is None:
            kinds = [leaf.kind for leaf in tree.leaves]
            wanted: list[Any] = [None] * len(kinds)
            build = _nested(tree)
        else:
            wanted, kinds, build = _match(tree, like, problems)
        placements = []
        if not problems:
            for leaf, kind, value in zip(tree.leaves, kinds, wanted, strict=True):
                try:
                    placements.append(_place(leaf, kind, value, mesh, patterns))
                except ValueError as e:
                    problems.append(f"leaf {leaf.key!r}: {e}")
        if problems:
            raise MismatchError(
                f"{name} does not fit the target: {list_problems(problems)}"
            )
        return cls(tree, placements, kinds, build, _wide=_allows_wide())

    def wanted(self) -> Iterator[tuple[int, Region]]:
        """Yields what to read: rows, and for each the distinct regions of local
        shards; prepares to take them."""
        for row, (leaf, placement) in enumerate(
            zip(self.tree.leaves, self.placements, strict=True)
        ):
            self._arrived[row] = {}
            if placement is None:
                yield row, whole(leaf.shape)
                continue
            regions: dict[Region, list[jax.Device]] = {}
            indices = placement.addressable_devices_indices_map(leaf.shape)
            for device, index in indices.items():
                region = region_of(index or (), leaf.shape)
                regions.setdefault(region, []).append(device)
            self._regions[row] = regions
            for region in regions:
                yield row, region

    def place(self, buffer: Buffer) -> None:
        """Takes a filled buffer, and puts it onto its devices."""
        if self.placements[buffer.row] is None:
            self._arrived[buffer.row][None] = buffer.array
            return
        devices = self._regions[buffer.row][buffer.region]
        placement = self.placements[buffer.row]
        assert placement is not None
        # this thread has settings of its own: without the caller's, 64 bits
        # would become 32
        with jax.enable_x64(self._wide):
            arrays = [
                jax.device_put(
                    buffer.array,
                    SingleDeviceSharding(device, memory_kind=placement.memory_kind),
                )
                for device in devices
            ]
        assert all(array.dtype == buffer.array.dtype for array in arrays)
        with self._lock:
            self._arrived[buffer.row].update(zip(devices, arrays, strict=True))

    def result(self) -> Any:
        """Returns the tree; everything wanted must have arrived."""
        return self.build([self._leaf(row) for row in range(len(self.tree.leaves))])

    def _leaf(self, row: int) -> Any:
        leaf, kind, arrived = self.tree.leaves[row], self.kinds[row], self._arrived[row]
        placement = self.placements[row]
        if placement is None:
            return _host_value(leaf, kind, arrived[None])
        devices = placement.addressable_devices_indices_map(leaf.shape)
        array = jax.make_array_from_single_device_arrays(
            leaf.shape, placement, [arrived[device] for device in devices]
        )
        if kind == pb.LEAF_KIND_PRNG_KEY:
            return jax.random.wrap_key_data(array, impl=leaf.prng_impl)
        return array


def _host_value(leaf: Leaf, kind: int, array: Any) -> Any:
    if kind == pb.LEAF_KIND_PYTHON_SCALAR:
        return array.item()
    if kind == pb.LEAF_KIND_HOST_SCALAR:
        return array[()]
    if kind == pb.LEAF_KIND_PRNG_KEY:
        return jax.random.wrap_key_data(array, impl=leaf.prng_impl)
    return array


def _nested(tree: Tree) -> Callable[[list[Any]], Any]:
    def build(values: list[Any]) -> Any:
        rows = zip(tree.leaves, values, strict=True)
        return nest((path_of(leaf), leaf.path_kinds, value) for leaf, value in rows)

    return build


def _match(
    tree: Tree, like: Any, problems: list[str]
) -> tuple[list[Any], list["pb.LeafKind.ValueType"], Callable[[list[Any]], Any]]:
    """Finds the leaf of ``like`` for each row, and lists what does not fit."""
    named, treedef = named_leaves(like)
    by_key = {leaf.key: leaf for leaf in named}
    problems += [
        f"leaf {leaf.key!r} is missing from it: expected {_describe(leaf)}"
        for leaf in named
        if leaf.key not in tree.by_key
    ]
    wanted, kinds = [], []
    for row in tree.leaves:
        leaf = by_key.get(row.key)
        if leaf is None:
            problems.append(f"leaf {row.key!r} is not expected: got {_saved(row)}")
            continue
        found = signature(leaf.value)
        if found is None or not _fits(row, found):
            problems.append(
                f"leaf {row.key!r}: expected {_describe(leaf)}, got {_saved(row)}"
            )
            continue
        wanted.append(leaf.value)
        kinds.append(found.kind)

    def build(values: list[Any]) -> Any:
        rows = tree.by_key
        return jax.tree.unflatten(treedef, [values[rows[leaf.key]] for leaf in named])

    return wanted, kinds, build


def _fits(row: Leaf, found: Signature) -> bool:
    """Whether a saved leaf can become what is wanted, bit by bit.

    Where an array lies is not part of what it is: device and host arrays stand
    for each other. Python numbers and PRNG keys stand for nothing else.
    """
    same_kind = row.kind == found.kind or {row.kind, found.kind} <= _ARRAY_KINDS
    return (
        same_kind
        and row.dtype == found.dtype
        and row.shape == found.shape
        and row.prng_impl == found.prng_impl
    )


def _saved(row: Leaf) -> Signature:
    return Signature(row.kind, row.dtype, row.shape, row.prng_impl)


def _describe(leaf: NamedLeaf) -> str:
    found = signature(leaf.value)
    return type(leaf.value).__name__ if found is None else str(found)


def _place(
    leaf: Leaf, kind: int, value: Any, mesh: Mesh | None, rules: Patterns | None
) -> Placement:
    """Decides where a leaf goes.

    Raises:
        ValueError: It cannot go there; says why.
    """
    if kind not in _DEVICE_KINDS:
        return None
    shape = leaf.shape[:-1] if kind == pb.LEAF_KIND_PRNG_KEY else leaf.shape
    placement: Placement
    if mesh is not None and rules is not None:
        placement = _by_rules(leaf.key, shape, mesh, rules)
    elif value is not None:
        placement = getattr(value, "sharding", None) or _default_device()
    else:
        placement = _as_saved(leaf)
    if placement is None:
        return None
    if _would_narrow(leaf.dtype):
        raise ValueError(
            f"jax would narrow {leaf.dtype} on a device; set jax_enable_x64, or give "
            "a numpy array in like="
        )
    mesh_of = getattr(placement, "mesh", None)
    if isinstance(mesh_of, AbstractMesh):
        problem = "its sharding is on an abstract mesh"
        raise ValueError(f"{problem}; give mesh= and rules=")  # noqa: TRY004 - a misfit
    placement.shard_shape(shape)  # raises where the axes do not divide it
    if kind == pb.LEAF_KIND_PRNG_KEY and not isinstance(
        placement, (NamedSharding, SingleDeviceSharding)
    ):
        raise ValueError(
            f"PRNG keys cannot be placed by a {type(placement).__name__}; give a "
            "NamedSharding"
        )
    return placement


def _compiled(rules: Rules) -> Patterns:
    try:
        return [(re.compile(pattern), spec) for pattern, spec in rules]
    except re.error as e:
        raise InvalidRequestError(
            f"restore: rule {e.pattern!r} is not a regular expression: {e}"
        ) from e


def _by_rules(
    key: str, shape: tuple[int, ...], mesh: Mesh, rules: Patterns
) -> NamedSharding:
    if not shape:  # nothing to split, so every rule means the same
        return NamedSharding(mesh, PartitionSpec())
    for pattern, spec in rules:
        if pattern.search(key):
            if len(spec) > len(shape):
                raise ValueError(
                    f"rule {pattern.pattern!r} splits {len(spec)} dimensions with "
                    f"{spec}, but its shape is {shape}"
                )
            return NamedSharding(mesh, spec)
    raise ValueError("no rule matches; end the rules with ('', PartitionSpec())")


def _as_saved(leaf: Leaf) -> Placement:
    """The saved sharding on the devices of this process, where it fits."""
    if _would_narrow(leaf.dtype):
        return None
    if leaf.sharding is None:
        return _default_device()
    devices = jax.devices()
    if int(np.prod(leaf.sharding.axis_sizes)) != len(devices):
        return None
    grid = np.array(devices).reshape(leaf.sharding.axis_sizes)
    mesh = Mesh(grid, leaf.sharding.axis_names)
    return NamedSharding(mesh, PartitionSpec(*(s or None for s in leaf.sharding.spec)))


def _allows_wide() -> bool:
    config: Any = jax.config  # its options have no types
    return bool(config.jax_enable_x64)


def _would_narrow(dtype: str) -> bool:
    return dtype in _WIDE and not _allows_wide()


def _default_device() -> Sharding:
    config: Any = jax.config  # its options have no types
    device = config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):  # a platform
        device = jax.local_devices(backend=device)[0]
    return SingleDeviceSharding(device)
