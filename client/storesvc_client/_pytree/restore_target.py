"""A restore's target: which leaves, where to, and what tree to make of them.

``Target.choose`` compares a checkpoint's leaves with what is asked for, refuses
with every difference at once, and decides a placement for each leaf. It reads
nothing; the caller brings filled buffers to ``place``.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffer import Buffer
from storesvc_client._chunks.buffer_layout import allocate
from storesvc_client._job.assignment import Holders
from storesvc_client._pytree.leaves import list_problems
from storesvc_client._pytree.matching import (
    Build,
    Wanted,
    cast_name,
    match_all,
    match_like,
)
from storesvc_client._pytree.partition_rules import Rules
from storesvc_client._pytree.placement import Placement, Placer, allows_wide
from storesvc_client._pytree.plain_containers import Container
from storesvc_client._pytree.save_plan import region_of
from storesvc_client._values.gc_pause import collector_paused
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_proto.v1 import tree_pb2 as pb

_SHOWN: Final = 5
"""Keys that a log line names."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """Where the parts of a leaf go; shared by leaves that go to the same places."""

    devices: dict[Region, list[jax.Device]]
    """The local devices that hold each region."""
    regions: tuple[Region, ...]
    by_start: dict[tuple[int | None, ...], Region]
    """The regions by the starts of jax's indices: the shards of a leaf are of one
    shape, so these tell them apart."""
    on_accelerator: bool

    @classmethod
    def of(cls, placement: Sharding, shape: tuple[int, ...]) -> Self:
        """Returns where a placement puts a leaf of a shape."""
        devices: dict[Region, list[jax.Device]] = {}
        by_start: dict[tuple[int | None, ...], Region] = {}
        indices = placement.addressable_devices_indices_map(shape)
        for device, index in indices.items():
            region = region_of(index or (), shape)
            devices.setdefault(region, []).append(device)
            by_start[tuple(s.start for s in index or ())] = region
        if placement.is_fully_replicated:
            by_start[(None,) * len(shape)] = whole(shape)
        return cls(
            devices=devices,
            regions=tuple(devices),
            by_start=by_start,
            on_accelerator=any(map(_is_accelerator, indices)),
        )


@dataclass(slots=True, eq=False)
class _Arriving:
    """A leaf that is wanted, and what has come of it."""

    wanted: Wanted
    leaf: Leaf
    placement: Placement
    spread: _Spread | None = None
    """None: it stays on the host."""
    arrays: dict[jax.Device, jax.Array] = field(default_factory=dict)
    """What has come, by device, where it comes in parts."""
    value: Any = None
    """All of it, once it has come."""


class Target:
    """What a restore is to return, and what has arrived of it."""

    def __init__(
        self, arriving: Sequence[_Arriving], build: Build, kept: Mapping[int, Any]
    ) -> None:
        self._arriving = {item.wanted.row: item for item in arriving}
        self._build = build
        self._kept = kept
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
        containers: Sequence[Container] = (),
        like: Any,
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        cast: Any,
        missing: Literal["error", "keep"] = "error",
    ) -> "Target":
        """Returns the target of a restore.

        Args:
            tree: The checkpoint's leaves.
            name: What messages call the checkpoint.
            rows: The leaves that are selected.
            containers: What these do not show of the tree, without ``like``.
            like: A pytree of the structure to return; None: nested containers.
            mesh: Where to put device arrays.
            rules: How to spread them over the mesh.
            cast: A floating-point dtype for floating-point leaves.
            missing: Whether leaves of ``like`` that the checkpoint lacks are an
                error, or keep the value that ``like`` has.

        Raises:
            InvalidRequestError: Mesh without rules, rules without mesh, a rule or
                a dtype that is not usable; values to keep of no tree.
            MismatchError: The checkpoint does not fit.
        """
        _check_missing(missing, like)
        placer, dtype = Placer(mesh, rules), cast_name(cast)
        if like is None:
            match = match_all(tree, rows, cast=dtype, containers=containers)
        else:
            keeping = missing == "keep"
            match = match_like(tree, like, rows, cast=dtype, keeping=keeping)
        problems = list(match.problems)
        arriving, kept = [], {}
        for wanted in () if problems else match.wanted:
            leaf = tree.leaves[wanted.row]
            try:
                arriving.append(_Arriving(wanted, leaf, placer.place(leaf, wanted)))
            except ValueError as e:
                problems.append(f"leaf {leaf.key!r}: {e}")
        for leaf, wanted in () if problems else match.kept:
            try:
                kept[wanted.row] = placer.keep(leaf, wanted)
            except ValueError as e:
                problems.append(f"leaf {leaf.key!r}: {e}")
        if problems:
            hints = f" ({'; '.join(match.hints)})" if match.hints else ""
            raise MismatchError(
                f"{name} does not fit the target: {list_problems(problems)}{hints}"
            )
        placer.report()
        _report(name, match.kept)
        return cls(arriving, match.build, kept)

    def regions(self) -> Iterator[tuple[int, Sequence[Region]]]:
        """Yields what to read: rows, and for each the distinct regions of local
        shards; prepares to take them."""
        spreads: dict[tuple[Sharding, tuple[int, ...]], _Spread] = {}
        for row, item in self._arriving.items():
            shape = item.leaf.shape
            if item.placement is None:
                yield row, (whole(shape),)
                continue
            key = (item.placement, shape)
            if key not in spreads:
                spreads[key] = _Spread.of(item.placement, shape)
            item.spread = spreads[key]
            yield row, item.spread.regions

    def needed(self, count: int) -> Iterator[tuple[int, Mapping[Region, Holders]]]:
        """Yields what the processes of a job need: rows, and for each the distinct
        regions, with the processes that hold them.

        What goes to the host, or to devices of one process, each process has for
        itself, whole.

        Args:
            count: Of processes.
        """
        everyone = frozenset(range(count))
        known: dict[tuple[Sharding, tuple[int, ...]], Mapping[Region, Holders]] = {}
        for row, item in self._arriving.items():
            shape = item.leaf.shape
            if item.placement is None:
                yield row, {whole(shape): everyone}
                continue
            key = (item.placement, shape)
            if key not in known:
                known[key] = _needed(item.placement, shape, everyone)
            yield row, known[key]

    def place(self, buffer: Buffer) -> None:
        """Takes a filled buffer, and puts it onto its devices; returns once they hold
        it, so that its memory can be counted as free."""
        item = self._arriving[buffer.row]
        arrays = buffer.arrays
        if item.wanted.dtype != item.leaf.dtype:
            arrays = [_cast(array, item.wanted.dtype) for array in arrays]
        if item.spread is None or item.placement is None:
            (item.value,) = arrays
            return
        # this thread has settings of its own: without the caller's, 64 bits
        # would become 32
        with jax.enable_x64(self._wide):
            if len(arrays) == len(item.spread.regions):
                placed: Any = _placed_whole(item, item.placement, buffer, arrays)
                item.value = placed
            else:
                placed = _placed_parts(item, item.spread, buffer, arrays)
                with self._lock:
                    item.arrays.update(placed)
        if item.spread.on_accelerator:
            jax.block_until_ready(placed)

    @collector_paused()
    def result(self) -> Any:
        """Returns the tree; everything wanted must have arrived."""
        arrived = {row: _value(x) for row, x in self._arriving.items()}
        return self._build({**arrived, **self._kept})


def _needed(
    placement: Sharding, shape: tuple[int, ...], everyone: Holders
) -> Mapping[Region, Holders]:
    """The regions of a leaf that any process needs, and which processes do."""
    indices: dict[Any, Any] = {**placement.devices_indices_map(shape)}
    if len({device.process_index for device in indices}) == 1:
        return {whole(shape): everyone}
    found: dict[Region, set[int]] = {}
    for device, index in indices.items():
        region = region_of(index or (), shape)
        found.setdefault(region, set()).add(device.process_index)
    return {region: frozenset(of) for region, of in found.items()}


def _check_missing(missing: object, like: object) -> None:
    if missing not in ("error", "keep"):
        raise InvalidRequestError(
            f"restore: expected missing= 'error' or 'keep', got {missing!r}"
        )
    if missing == "keep" and like is None:
        raise InvalidRequestError(
            "restore: expected like= with missing='keep', got None; its values stand "
            "in for what the checkpoint lacks"
        )


def _report(name: str, kept: Sequence[tuple[Leaf, Wanted]]) -> None:
    """Logs what did not come from the checkpoint, if anything."""
    if kept:
        keys = [leaf.key for leaf, _ in kept[:_SHOWN]]
        _log.info(
            "%s lacks %d of the leaves asked for, which keep the values of like=: %s%s",
            name,
            len(kept),
            ", ".join(keys),
            ", ..." if len(kept) > _SHOWN else "",
        )


def _cast(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    memory = allocate(array.size * DTYPES[dtype].itemsize)
    cast: NDArray[Any] = memory.view(DTYPES[dtype]).reshape(array.shape)
    np.copyto(cast, array, casting="unsafe")
    return cast


def _is_accelerator(device: Any) -> bool:
    return bool(device.platform != "cpu")


def _placed_whole(
    item: _Arriving,
    placement: Sharding,
    buffer: Buffer,
    arrays: Sequence[NDArray[Any]],
) -> jax.Array:
    """A leaf of which all parts have come at once: one call for all devices."""
    assert item.spread is not None
    by_start = item.spread.by_start
    by_region = dict(zip(buffer.regions, arrays, strict=True))
    placed = jax.make_array_from_callback(
        item.leaf.shape,
        placement,
        lambda index: by_region[by_start[tuple([s.start for s in index or ()])]],
    )
    assert placed.dtype == arrays[0].dtype
    return placed


def _placed_parts(
    item: _Arriving,
    spread: _Spread,
    buffer: Buffer,
    arrays: Sequence[NDArray[Any]],
) -> dict[jax.Device, jax.Array]:
    """Parts of a leaf on their devices."""
    assert item.placement is not None
    memory = item.placement.memory_kind
    placed = {
        device: jax.device_put(array, SingleDeviceSharding(device, memory_kind=memory))
        for region, array in zip(buffer.regions, arrays, strict=True)
        for device in spread.devices[region]
    }
    assert all(put.dtype == arrays[0].dtype for put in placed.values())
    return placed


def _value(item: _Arriving) -> Any:
    if item.placement is None:
        return _host_value(item, item.value)
    array = item.value
    if array is None:
        devices = item.placement.addressable_devices_indices_map(item.leaf.shape)
        array = jax.make_array_from_single_device_arrays(
            item.leaf.shape,
            item.placement,
            [item.arrays[device] for device in devices],
            dtype=DTYPES[item.wanted.dtype],  # of which no device here may have any
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
        case pb.LEAF_KIND_ARRAY | pb.LEAF_KIND_HOST_ARRAY:
            return array
        case kind:
            raise AssertionError(kind)
