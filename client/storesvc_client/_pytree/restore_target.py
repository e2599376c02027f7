"""Target of a restore: the leaves to read, their placements, and the tree to build.

``Target.choose`` compares a checkpoint's leaves with the requested ones, rejects all
differences in one error, and decides a placement for each leaf: partition rules on a
mesh, the sharding of the leaf in ``like``, or the sharding that the checkpoint
recorded. A placement never changes values. It reads no data; the caller passes filled
buffers to ``place``.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Final, Literal, Self, TypeAlias, TypeGuard

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
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, whole
from storesvc.format.keys import ENCODED_KINDS
from storesvc.format.trees import Leaf, SavedSharding, Tree
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._chunks.memory import allocate, collector_paused
from storesvc_client._items.values import Container, decode_value
from storesvc_client._job.assignment import Holders
from storesvc_client._pytree.leaves import list_problems, permit_jax
from storesvc_client._pytree.matching import (
    LIKE,
    Build,
    Match,
    Wanted,
    match_all,
    match_like,
)
from storesvc_client._pytree.partition_rules import (
    RECORDED,
    Partitioner,
    Rules,
    axis_names,
)
from storesvc_client._pytree.save_plan import find_holders, index_region
from storesvc_client._values.arguments import checked_cast
from storesvc_client._values.options import Indivisible, RestoreRequest
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_proto.v1 import tree_pb2 as pb

_log = logging.getLogger("storesvc_client")

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
        """Prepares the rules on the mesh."""
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
        """Returns the placement of a leaf."""
        if wanted.kind not in _DEVICE_KINDS:
            return None
        is_key = wanted.kind == pb.LEAF_KIND_PRNG_KEY
        shape = leaf.shape[:-1] if is_key else leaf.shape
        placement = self._choose_placement(leaf, wanted, shape)
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
        """Returns the value that ``like`` has for a leaf, moved to its placement."""
        value = wanted.value
        if self._partitioner is None and wanted.dtype == leaf.dtype:
            return value
        placement = self.placement(leaf, wanted)
        with permit_jax():  # the caller asked for it
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

    def _choose_placement(
        self, leaf: Leaf, wanted: Wanted, shape: tuple[int, ...]
    ) -> Placement:
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
    """Returns a sharding of an abstract mesh on the mesh of ``jax.set_mesh``."""
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


_SHOWN: Final = 5
"""Maximum keys that a log line names."""


@dataclass(frozen=True, slots=True, eq=False)
class _LocalRegions:
    """Devices and regions that leaves of one shape and placement share."""

    devices: dict[Region, list[jax.Device]]
    """Local devices that hold each region."""
    regions: tuple[Region, ...]
    by_start: dict[tuple[int | None, ...], Region]
    """Regions by the start indices of jax's slices, which are unique because all shards
    of a leaf have one shape."""
    on_accelerator: bool

    @classmethod
    def from_placement(cls, placement: Sharding, shape: tuple[int, ...]) -> Self:
        """Returns the devices and regions of a placement, for a leaf of a shape."""
        devices: dict[Region, list[jax.Device]] = {}
        by_start: dict[tuple[int | None, ...], Region] = {}
        indices: dict[Any, Any] = {**placement.addressable_devices_indices_map(shape)}
        for device, index in indices.items():
            region = index_region(index or (), shape)
            devices.setdefault(region, []).append(device)
            by_start[tuple(s.start for s in index or ())] = region
        if placement.is_fully_replicated:
            by_start[(None,) * len(shape)] = whole(shape)
        return cls(
            devices=devices,
            regions=tuple(devices),
            by_start=by_start,
            on_accelerator=any(device.platform != "cpu" for device in indices),
        )


@dataclass(slots=True, eq=False)
class _PendingLeaf:
    """A requested leaf, and the parts of it that have arrived."""

    wanted: Wanted
    leaf: Leaf
    placement: Placement
    local: _LocalRegions | None = None
    """None: the leaf stays on the host."""
    arrays: dict[jax.Device, jax.Array] | None = None
    """Arrived parts by device, if the leaf arrives in parts."""
    value: Any = None
    """The whole leaf, after it arrived."""


def _decide_placements(
    tree: Tree, match: Match, placer: Placer
) -> tuple[list[_PendingLeaf], dict[int, Any], Sequence[str]]:
    """Returns the placements of matched leaves, the values that are kept, by row, and
    the problems of one kind: of the match, or else of the placements."""
    pending, kept, problems = list[_PendingLeaf](), dict[int, Any](), list[str]()
    if match.problems:
        return pending, kept, match.problems
    for wanted in match.wanted:
        leaf = tree.leaves[wanted.row]
        try:
            pending.append(_PendingLeaf(wanted, leaf, placer.placement(leaf, wanted)))
        except ValueError as e:
            problems.append(f"leaf {leaf.key!r}: {e}")
    for leaf, wanted in () if problems else match.kept:
        try:
            kept[wanted.row] = placer.kept_value(leaf, wanted)
        except ValueError as e:
            problems.append(f"leaf {leaf.key!r}: {e}")
    return pending, kept, problems


class Target:
    """The leaves that a restore returns, and the parts that have arrived."""

    def __init__(
        self, pending: Sequence[_PendingLeaf], build: Build, kept: Mapping[int, Any]
    ) -> None:
        self._pending = {item.wanted.row: item for item in pending}
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
        request: RestoreRequest,
        *,
        rows: Sequence[int],
        containers: Sequence[Container] = (),
        has_text_keys: bool = False,
    ) -> "Target":
        """Returns the target of a restore.

        Args:
            request: What to restore; ``rows`` are what it selects.
            containers: Containers that the leaves do not show; used without ``like``.
            has_text_keys: As for ``match_like``.

        Raises:
            InvalidRequestError: Mesh without rules, rules without mesh, a rule or dtype
                that is not usable, or "keep" without ``like``.
            MismatchError: The checkpoint does not match; the message lists all
                differences.
        """
        # 1. Check the arguments.
        like, cast = request.like, request.cast
        _check_missing(request.missing, like)
        placer = Placer(request.mesh, request.rules, request.indivisible)
        follows = like is not None and isinstance(cast, str) and cast == LIKE
        dtype = LIKE if follows else checked_cast(f"restore of {name}: cast=", cast)
        # 2. Match the leaves by key; without problems, decide their placements. All
        #    problems of one kind go into one error.
        if like is None:
            match = match_all(tree, rows, cast=dtype, containers=containers)
        else:
            keeping = request.missing == "keep"
            match = match_like(
                tree,
                like,
                rows,
                cast=dtype,
                keeping=keeping,
                has_text_keys=has_text_keys,
            )
        pending, kept, problems = _decide_placements(tree, match, placer)
        if problems:
            raise MismatchError(
                f"{name} does not fit the target: {list_problems(problems)}"
                f"{placer.advice}{match.advice}",
                metadata={"hints": match.advice, "unfit": "\n".join(match.unfit)},
            )
        # 3. Log the differences that are not errors.
        placer.report()
        _report(name, match.kept)
        return cls(pending, match.build, kept)

    def regions(self) -> Iterator[tuple[int, Sequence[Region]]]:
        """Yields each row to read with the distinct regions of its local shards.

        Also prepares the leaves to receive them.
        """
        known: dict[tuple[Sharding, tuple[int, ...]], _LocalRegions] = {}
        for row, item in self._pending.items():
            shape = item.leaf.shape
            if item.placement is None:
                yield row, (_whole(shape),)
                continue
            key = (item.placement, shape)
            if key not in known:
                known[key] = _LocalRegions.from_placement(item.placement, shape)
            item.local = known[key]
            yield row, item.local.regions

    def iterate_needed(
        self, count: int
    ) -> Iterator[tuple[int, Mapping[Region, Holders]]]:
        """Yields each row that the processes of a job need, with regions and their
        holders.

        A leaf for the host, or for devices of one process, is needed whole by every
        process.
        """
        everyone = frozenset(range(count))
        for row, item in self._pending.items():
            shape, held = item.leaf.shape, None
            if item.placement is not None:
                held = find_holders(item.placement, shape)
            yield row, {whole(shape): everyone} if held is None else held

    def place(self, buffers: Sequence[Buffer]) -> None:
        """Moves filled buffers to their devices; returns after these hold the data.

        The caller may then reuse the memory of the buffers.
        """
        with ExitStack() as settings:
            if any(self._pending[buffer.row].local for buffer in buffers):
                # jax settings are per thread. Without the caller's setting, 64-bit
                # types would become 32-bit. In the caller's thread, its guard would
                # reject what it asked.
                settings.enter_context(jax.enable_x64(self._wide))
                settings.enter_context(permit_jax())
            moving = [*filter(None, map(self._place, buffers))]
        if moving:
            jax.block_until_ready(moving)

    def _place(self, buffer: Buffer) -> Sequence[jax.Array]:
        """Begins to move a buffer; returns what to wait for, which is none on a CPU."""
        item, arrays = self._pending[buffer.row], buffer.arrays
        if item.wanted.dtype != item.leaf.dtype:
            arrays = [_cast(array, item.wanted.dtype) for array in arrays]
        if item.local is None:
            (item.value,) = arrays
            return ()
        if len(arrays) == len(item.local.regions):
            placed = [_place_whole(item, buffer, arrays)]
            (item.value,) = placed
        else:
            parts = _place_parts(item, item.local, buffer, arrays)
            placed = [*parts.values()]
            with self._lock:
                item.arrays = {**(item.arrays or {}), **parts}
        return placed if item.local.on_accelerator else ()

    @collector_paused()
    def result(self) -> Any:
        """Returns the tree; every requested leaf must have arrived."""
        with permit_jax():  # of key data
            arrived = {row: _finish_value(x) for row, x in self._pending.items()}
        return self._build({**arrived, **self._kept})


_whole = lru_cache(maxsize=1024)(whole)  # a tree has many leaves, and few shapes


def _check_missing(missing: object, like: object) -> None:
    if missing not in ("error", "keep"):
        raise InvalidRequestError(
            f"restore: expected missing= 'error' or 'keep', got {missing!r}"
        )
    if missing == "keep" and like is None:
        raise InvalidRequestError(
            "restore: expected like= with missing='keep', got None; pass like= with "
            "values for the leaves that the checkpoint lacks"
        )


def _report(name: str, kept: Sequence[tuple[Leaf, Wanted]]) -> None:
    """Logs the leaves that keep the values of ``like``, if any."""
    if kept:
        keys = [leaf.key for leaf, _ in kept[:_SHOWN]]
        _log.info(
            "%s: %d leaves that it lacks or select= leaves out keep the values of "
            "like=: %s%s",
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


def _place_whole(
    item: _PendingLeaf, buffer: Buffer, arrays: Sequence[NDArray[Any]]
) -> jax.Array:
    """Builds a leaf whose parts all arrived, with one call for all devices."""
    assert item.local is not None
    assert item.placement is not None
    by_start = item.local.by_start
    by_region = dict(zip(buffer.regions, arrays, strict=True))
    placed = jax.make_array_from_callback(
        item.leaf.shape,
        item.placement,
        lambda index: by_region[by_start[tuple([s.start for s in index or ()])]],
    )
    assert placed.dtype == arrays[0].dtype
    return placed


def _place_parts(
    item: _PendingLeaf,
    local: _LocalRegions,
    buffer: Buffer,
    arrays: Sequence[NDArray[Any]],
) -> dict[jax.Device, jax.Array]:
    """Moves parts of a leaf to their devices."""
    assert item.placement is not None
    memory = item.placement.memory_kind
    placed = {
        device: jax.device_put(array, SingleDeviceSharding(device, memory_kind=memory))
        for region, array in zip(buffer.regions, arrays, strict=True)
        for device in local.devices[region]
    }
    assert all(put.dtype == arrays[0].dtype for put in placed.values())
    return placed


def _finish_value(item: _PendingLeaf) -> Any:
    """Returns a leaf that has arrived, as the kind that is wanted."""
    kind, value = item.wanted.kind, item.value
    if item.placement is not None and value is None:
        devices = item.placement.addressable_devices_indices_map(item.leaf.shape)
        value = jax.make_array_from_single_device_arrays(
            item.leaf.shape,
            item.placement,
            [(item.arrays or {})[device] for device in devices],
            # needed if no device of this process holds a part
            dtype=DTYPES[item.wanted.dtype],
        )
    if kind in ENCODED_KINDS:
        return decode_value(item.leaf.key, kind, value.tobytes())
    match kind:
        case pb.LEAF_KIND_PYTHON_SCALAR:
            return value.item()
        case pb.LEAF_KIND_HOST_SCALAR:
            return value[()]
        case pb.LEAF_KIND_PRNG_KEY:
            return jax.random.wrap_key_data(value, impl=item.leaf.prng_impl)
        case pb.LEAF_KIND_ARRAY | pb.LEAF_KIND_HOST_ARRAY:
            return value
        case _:
            raise AssertionError(kind)


def is_function(init: object) -> TypeGuard[Callable[[], Any]]:
    """Returns whether a value makes a state, rather than being one. Modules are
    callable pytrees."""
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(init))
    return is_leaf and callable(init)


def make_target(init: Callable[[], Any]) -> Any:
    """Returns a state as ``init`` makes it, without the values of its arrays.

    A function compiled by ``jax.jit`` with ``out_shardings`` is not run. Another one is
    run, because only its result shows where it places arrays; that result is dropped.
    """
    if hasattr(init, "eval_shape"):
        target = init.eval_shape()
        if all(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(target)):
            return target
    return without_values(init())


def without_values(state: Any) -> Any:
    """Returns a state with the shapes and placements of its arrays, not the arrays."""

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        weak = getattr(leaf, "weak_type", False)  # PRNG keys have none
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak
        )

    return jax.tree.map(abstract, state)
