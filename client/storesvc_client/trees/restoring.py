"""A restore's target: which leaves, where to, and what tree to make of them.

``Target.choose`` compares a checkpoint's leaves with what is asked for, refuses
with every difference at once, and decides a placement for each leaf. It reads
nothing; the caller brings filled buffers to ``place``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._pausing import collector_paused
from storesvc_client._receiving import Buffer
from storesvc_client.errors import MismatchError
from storesvc_client.trees.flattening import list_problems
from storesvc_client.trees.matching import (
    Build,
    Wanted,
    cast_name,
    match_all,
    match_like,
)
from storesvc_client.trees.partitioning import Rules
from storesvc_client.trees.placing import Placement, Placer, allows_wide
from storesvc_client.trees.snapshot import region_of
from storesvc_proto.v1 import tree_pb2 as pb


@dataclass(slots=True, eq=False)
class _Arriving:
    """A leaf that is wanted, and what has come of it."""

    wanted: Wanted
    leaf: Leaf
    placement: Placement
    devices: dict[Region, list[jax.Device]] = field(default_factory=dict)
    """The local devices that hold each region."""
    arrays: dict[jax.Device | None, Any] = field(default_factory=dict)
    """What has come, by device; None: the host."""


class Target:
    """What a restore is to return, and what has arrived of it."""

    def __init__(self, arriving: Sequence[_Arriving], build: Build) -> None:
        self._arriving = {item.wanted.row: item for item in arriving}
        self._build = build
        self._lock = Lock()
        self._wide = allows_wide()

    @classmethod
    @collector_paused()
    def choose(
        cls,
        tree: Tree,
        name: str,
        *,
        rows: Sequence[int],
        like: Any,
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        cast: Any,
    ) -> "Target":
        """Returns the target of a restore.

        Args:
            tree: The checkpoint's leaves.
            name: What messages call the checkpoint.
            rows: The leaves that are selected.
            like: A pytree of the structure to return; None: nested containers.
            mesh: Where to put device arrays.
            rules: How to spread them over the mesh.
            cast: A floating-point dtype for floating-point leaves.

        Raises:
            InvalidRequestError: Mesh without rules, rules without mesh, a rule or
                a dtype that is not usable.
            MismatchError: The checkpoint does not fit.
        """
        placer, dtype = Placer(mesh, rules), cast_name(cast)
        if like is None:
            match = match_all(tree, rows, cast=dtype)
        else:
            match = match_like(tree, like, rows, cast=dtype)
        problems = list(match.problems)
        arriving = []
        for wanted in () if problems else match.wanted:
            leaf = tree.leaves[wanted.row]
            try:
                arriving.append(_Arriving(wanted, leaf, placer.place(leaf, wanted)))
            except ValueError as e:
                problems.append(f"leaf {leaf.key!r}: {e}")
        if problems:
            raise MismatchError(
                f"{name} does not fit the target: {list_problems(problems)}"
            )
        placer.report()
        return cls(arriving, match.build)

    def regions(self) -> Iterator[tuple[int, Region]]:
        """Yields what to read: rows, and for each the distinct regions of local
        shards; prepares to take them."""
        for row, item in self._arriving.items():
            if item.placement is None:
                yield row, whole(item.leaf.shape)
                continue
            indices = item.placement.addressable_devices_indices_map(item.leaf.shape)
            for device, index in indices.items():
                region = region_of(index or (), item.leaf.shape)
                item.devices.setdefault(region, []).append(device)
            for region in item.devices:
                yield row, region

    def place(self, buffer: Buffer) -> None:
        """Takes a filled buffer, and puts it onto its devices."""
        item = self._arriving[buffer.row]
        array = buffer.array
        if item.wanted.dtype != item.leaf.dtype:
            array = array.astype(DTYPES[item.wanted.dtype])
        if item.placement is None:
            item.arrays[None] = array
            return
        devices = item.devices[buffer.region]
        memory = item.placement.memory_kind
        # this thread has settings of its own: without the caller's, 64 bits
        # would become 32
        with jax.enable_x64(self._wide):
            arrays = [
                jax.device_put(array, SingleDeviceSharding(device, memory_kind=memory))
                for device in devices
            ]
        assert all(put.dtype == array.dtype for put in arrays)
        with self._lock:
            item.arrays.update(zip(devices, arrays, strict=True))

    @collector_paused()
    def result(self) -> Any:
        """Returns the tree; everything wanted must have arrived."""
        return self._build({row: _value(x) for row, x in self._arriving.items()})


def _value(item: _Arriving) -> Any:
    if item.placement is None:
        return _host_value(item, item.arrays[None])
    devices = item.placement.addressable_devices_indices_map(item.leaf.shape)
    array = jax.make_array_from_single_device_arrays(
        item.leaf.shape, item.placement, [item.arrays[device] for device in devices]
    )
    if item.wanted.kind == pb.LEAF_KIND_PRNG_KEY:
        return jax.random.wrap_key_data(array, impl=item.leaf.prng_impl)
    return array


def _host_value(item: _Arriving, array: Any) -> Any:
    match item.wanted.kind:
        case pb.LEAF_KIND_PYTHON_SCALAR:
            return array.item()
        case pb.LEAF_KIND_HOST_SCALAR:
            return array[()]
        case pb.LEAF_KIND_PRNG_KEY:
            return jax.random.wrap_key_data(array, impl=item.leaf.prng_impl)
    return array
