"""Plans saves: the leaves of a tree, their chunks, and the source of each chunk's
bytes; and reads these bytes, chunk by chunk, for a snapshot. ``copy_on_devices`` copies
the leaves before.

A plan depends on shapes, dtypes and shardings, never on values, so a tree that is saved
repeatedly is planned once. When the processes of a job save one tree, their plans
differ only in the chunks that each writes.

On CPU devices, the memory of a shard is read in place. Shards of other devices are
transferred to the host first, some leaves ahead.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, assert_never

import jax
import numpy as np
from jax.tree_util import DictKey, tree_flatten_with_path
from numpy.typing import NDArray

from storesvc.format.checksums import DIGEST_BYTES, digest
from storesvc.format.chunks import I64
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid, Region, choose_chunk_shape, whole
from storesvc.format.trees import Leaf, SavedSharding, Tree
from storesvc_client._chunks.memory import Bytes, collector_paused
from storesvc_client._chunks.slabs import SLAB_BYTES, Slab, cut_slabs
from storesvc_client._items.values import PlannedItem
from storesvc_client._job.assignment import (
    Held,
    Holders,
    assign_chunks,
    holders_of_chunks,
    shared_chunk_shape,
)
from storesvc_client._job.job import Job
from storesvc_client._pytree.containers import pack_containers
from storesvc_client._pytree.leaves import (
    ChunkLayout,
    EncodedLeaf,
    NamedLeaf,
    Signature,
    as_array,
    check_values,
    named_leaves,
    permit_jax,
    plan_chunk_layout,
    saved_sharding,
    storable,
    with_encoded,
)
from storesvc_client.errors import UnavailableError
from storesvc_proto.v1 import tree_pb2 as pb

MAX_COMPARED_BYTES: Final = 1 << 20
"""Maximum bytes of a replicated leaf whose digests are compared between processes. Each
process writes other chunks of it, so a comparison needs one more transfer of the leaf
from the devices of every process."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeafPlan:
    """Source of the bytes of a leaf."""

    dtype: "np.dtype[Any]"
    is_key: bool
    """True for an array of PRNG keys; its key data is stored."""
    devices: tuple[jax.Device, ...] | None
    """Devices whose shards are the blocks, without replicas; None: the whole leaf is
    the one block."""
    layout: ChunkLayout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Plan of one tree."""

    tree: Tree
    structure: bytes
    """The caller's document; b"" if none."""
    needs_like: tuple[str, ...]
    """Containers that a restore without ``like=`` returns as dicts or lists; empty if
    the caller gave a document."""
    leaves: tuple[LeafPlan, ...]
    """Plans of the leaves, in the order of ``tree.leaves``."""
    order: tuple[int, ...]
    """Index in the pytree of each leaf of ``tree``."""
    keys: tuple[str, ...]
    own: I64
    """Ordinals of the chunks that this process writes, ascending."""
    slabs: list[Slab]
    """Slabs of the chunks in ``own``."""
    compared: tuple[int, ...]
    """Rows of the leaves that this process and other processes of the job hold in
    full."""
    is_remote: bool
    """True if any leaf is on devices whose memory the host does not share."""
    forms: tuple[tuple[Any, ...], ...]
    """Type, shape, dtype and sharding of each leaf, in the order of the pytree."""
    treedef: Any
    key_types: tuple[type, ...]
    """Types of the dict keys on all paths, if any is not a string. 1 and True are
    equal, so treedefs that hold them compare as equal."""


def with_items(
    plan: Plan, values: list[Any], items: Sequence[PlannedItem]
) -> tuple[Plan, list[Any]]:
    """Returns a plan, and its values, with items after the leaves of the tree.

    The plan of the tree is not changed, so that the next save can reuse it.
    """
    if not items:
        return plan, values
    rows, plans = [], []
    for item in items:
        shape = (item.size,)
        chunk_shape = choose_chunk_shape(shape, 1, shape)
        rows.append(
            Leaf(
                key=item.name.key,
                path_kinds=item.name.path_kinds,
                kind=item.kind,
                dtype="uint8",
                shape=shape,
                chunk_shape=chunk_shape,
            )
        )
        layout = plan_chunk_layout(Grid(shape, chunk_shape, 1), (whole(shape),))
        dtype = DTYPES["uint8"]
        plans.append(LeafPlan(dtype=dtype, is_key=False, devices=None, layout=layout))
    tree = Tree((*plan.tree.leaves, *rows), plan.tree.structure)
    counts = [grid.count for grid in tree.grids[len(plan.tree.leaves) :]]
    is_own = np.repeat([item.data is not None for item in items], counts)
    own = plan.tree.chunk_count + np.flatnonzero(is_own)
    whole_plan = replace(
        plan,
        tree=tree,
        leaves=(*plan.leaves, *plans),
        own=np.concatenate([plan.own, own]),
        slabs=[*plan.slabs, *cut_slabs(tree, own)],
    )
    # what other processes write is never read here
    data = [np.frombuffer(item.data or b"", np.uint8) for item in items]
    return whole_plan, [*values, *data]


@dataclass(eq=False, repr=False)
class Planner:
    """Plans saves, and caches the last plan."""

    _job: Job | None = None
    """The processes that save each tree together; None: this process alone."""
    _plan: Plan | None = None

    @collector_paused()
    def plan(self, tree: Any, structure: bytes) -> tuple[Plan, list[Any]]:
        """Returns the plan of a pytree, and its leaves in the order of the plan.

        Raises:
            UnsupportedLeafError: A checkpoint cannot hold some leaves; the message
                lists them.
        """
        # 1. A training loop saves trees of one form; their plan is computed once.
        reused = self._reuse_plan(tree, structure)
        if reused is not None:
            return reused
        # 2. Reject everything that cannot be stored before anything is sent.
        named, treedef = named_leaves(tree)
        named = [leaf._replace(value=with_encoded(leaf.value)) for leaf in named]
        numbers = {id(leaf): number for number, leaf in enumerate(named)}
        found = list(storable(named, is_alone=self._job is None))
        # 3. Cut the leaves into chunks. Every process of a job must compute the same
        #    rows, so these depend only on global shapes and shardings.
        cuts = _cuts(found, self._job)
        rows = tuple(
            Leaf(
                key=leaf.key,
                path_kinds=leaf.path_kinds,
                kind=what.kind,
                dtype=what.dtype,
                shape=what.shape,
                chunk_shape=cut.chunk_shape,
                sharding=cut.sharding,
                prng_impl=what.prng_impl,
            )
            for (leaf, what), cut in zip(found, cuts, strict=True)
        )
        document, needs_like = (structure, ()) if structure else pack_containers(tree)
        planned = Tree(rows, document)
        # 4. Select the chunks that this process writes.
        own = _own_chunks(planned, [cut.held for cut in cuts], self._job)
        plan = Plan(
            tree=planned,
            structure=structure,
            needs_like=needs_like,
            leaves=tuple(cut.plan for cut in cuts),
            order=tuple(numbers[id(leaf)] for leaf, _ in found),
            keys=tuple(leaf.key for leaf in rows),
            own=own,
            slabs=cut_slabs(planned, own),
            compared=tuple(
                row
                for row, (leaf, _) in enumerate(found)
                if self._job is not None
                and _is_compared(leaf.value, planned.grids[row].leaf_bytes)
            ),
            is_remote=any(cut.is_remote for cut in cuts),
            forms=_forms([leaf.value for leaf in named]),
            treedef=treedef,
            key_types=_key_types(leaf.keypath for leaf in named),
        )
        self._plan = plan
        return plan, [as_array(leaf.value) for leaf, _ in found]

    def _reuse_plan(self, tree: Any, structure: bytes) -> tuple[Plan, list[Any]] | None:
        """Returns the last plan with a tree's leaves, or None if it does not fit."""
        last = self._plan
        if last is None or last.structure != structure:
            return None
        try:
            values, treedef = jax.tree.flatten(tree)
            has_same_nodes = treedef == last.treedef
        # Static fields or dict keys that cannot be compared, such as arrays, or a tree
        # that named_leaves() rejects.
        except (ValueError, TypeError, RecursionError, SystemError):
            return None
        values = [with_encoded(value) for value in values]
        if not has_same_nodes or _forms(values) != last.forms:
            return None
        # Equal treedefs may have keys 1 and True, which are stored differently.
        if last.key_types:
            paths = (path for path, _ in tree_flatten_with_path(tree)[0])
            if last.key_types != _key_types(paths):
                return None
        ordered = [as_array(values[number]) for number in last.order]
        check_values(last.keys, ordered)
        return last, ordered


def _forms(values: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Returns type, shape, dtype and sharding of each value, or kind and size."""
    return tuple(
        (type(value), value.kind, value.array.shape)
        if type(value) is EncodedLeaf
        else (
            type(value),
            getattr(value, "shape", None),
            getattr(value, "dtype", None),
            getattr(value, "sharding", None),
        )
        for value in values
    )


def _key_types(paths: Iterable[tuple[Any, ...]]) -> tuple[type, ...]:
    """Returns the types of dict keys, in order, or () if all are strings."""
    parts = (part for path in paths for part in path if isinstance(part, DictKey))
    types = tuple(type(part.key) for part in parts)
    return () if all(found is str for found in types) else types


def is_remote(value: Any) -> bool:
    """Returns whether a leaf is on devices whose memory the host does not share."""
    return isinstance(value, jax.Array) and all(
        device.platform != "cpu" for device in value.devices()
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Cut:
    """The part of a plan that leaves of one signature and sharding share."""

    held: Held | None
    chunk_shape: tuple[int, ...]
    sharding: SavedSharding | None
    plan: LeafPlan
    is_remote: bool


def _cuts(found: Iterable[tuple[NamedLeaf, Signature]], job: Job | None) -> list[_Cut]:
    """Returns the cut of each leaf; a tree has many leaves, and few cuts."""
    known: dict[tuple[Signature, Any], _Cut] = {}
    cuts = []
    for leaf, what in found:
        value = leaf.value
        form = what, value.sharding if isinstance(value, jax.Array) else None
        cut = known.get(form)
        if cut is None:
            cut = known[form] = _cut(value, what, job)
        cuts.append(cut)
    return cuts


def _cut(value: Any, found: Signature, job: Job | None) -> _Cut:
    dtype, held = DTYPES[found.dtype], _find_held(value, found, job)
    if held is None:
        shard_shape = _shard_shape(value, found)
        chunk_shape = choose_chunk_shape(found.shape, dtype.itemsize, shard_shape)
    else:
        chunk_shape = shared_chunk_shape(found.shape, dtype.itemsize, held)
    devices, blocks = _blocks(value, found)
    plan = LeafPlan(
        dtype=dtype,
        is_key=found.kind == pb.LEAF_KIND_PRNG_KEY,
        devices=devices,
        layout=plan_chunk_layout(
            Grid(found.shape, chunk_shape, dtype.itemsize), blocks
        ),
    )
    return _Cut(
        held=held,
        chunk_shape=chunk_shape,
        sharding=saved_sharding(value),
        plan=plan,
        is_remote=is_remote(value),
    )


def _shard_shape(value: Any, found: Signature) -> tuple[int, ...]:
    if not isinstance(value, jax.Array):
        return found.shape
    own = value.sharding.shard_shape(value.shape)
    return own + found.shape[len(own) :]  # key data has one more dimension


def _find_held(value: Any, found: Signature, job: Job | None) -> Held | None:
    """Returns which processes hold which part of a leaf, or None for a local leaf.

    A leaf is local if it is on the host or on devices of one process. Every process
    then has its own copy, and process 0 writes it after the copies were found equal.
    """
    if job is None or not isinstance(value, jax.Array):
        return None
    held = find_holders(value.sharding, value.shape)
    if held is None:
        return None
    shard_shape = _shard_shape(value, found)
    counts = tuple(
        -(-n // max(1, shard)) or 1
        for n, shard in zip(found.shape, shard_shape, strict=True)
    )
    # in C order
    holders = tuple(held[region] for region in sorted(held))
    return Held(shard_shape=shard_shape, counts=counts, holders=holders)


def _is_compared(value: Any, size_bytes: int) -> bool:
    """Returns whether this process and others hold all of a leaf."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return True
    is_held = value.is_fully_replicated and bool(value.sharding.addressable_devices)
    return is_held and size_bytes <= MAX_COMPARED_BYTES


@lru_cache(maxsize=1024)  # a tree has many leaves but few shardings
def find_holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Mapping[Region, Holders] | None:
    """Returns the processes that hold each shard; None if one process holds all."""
    indices: dict[Any, Any] = {**sharding.devices_indices_map(shape)}
    if len({device.process_index for device in indices}) == 1:
        return None
    found: dict[Region, set[int]] = {}
    for device, index in indices.items():
        region = index_region(index or (slice(None),) * len(shape), shape)
        found.setdefault(region, set()).add(device.process_index)
    return {region: frozenset(processes) for region, processes in found.items()}


def _own_chunks(tree: Tree, held: Sequence[Held | None], job: Job | None) -> I64:
    """Returns the ordinals of the chunks that this process writes."""
    if job is None:
        return np.arange(tree.chunk_count)
    holders: list[Holders] = []
    for grid, of in zip(tree.grids, held, strict=True):
        first = (frozenset({0}),) * grid.count
        holders += first if of is None else holders_of_chunks(grid, of)
    sizes = tree.stored_lengths.tolist()
    writers = assign_chunks(holders, sizes, count=job.count)
    return np.flatnonzero(writers == job.index)


def _blocks(
    value: Any, found: Signature
) -> tuple[tuple[jax.Device, ...] | None, tuple[Region, ...]]:
    """Returns the devices that hold each part of a leaf once, and these parts."""
    if not isinstance(value, jax.Array):
        return None, (whole(found.shape),)
    rank = len(value.shape)  # key data has one more dimension
    indices = value.sharding.addressable_devices_indices_map(value.shape)
    regions: dict[Region, jax.Device] = {}
    for device, index in indices.items():
        held = index_region(index or (slice(None),) * rank, value.shape)
        regions.setdefault(held + whole(found.shape[rank:]), device)
    return tuple(regions.values()), tuple(regions)


def index_region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Returns the region of a shard's index."""
    bounds = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


AHEAD_BYTES: Final = 256 << 20
"""Bytes of the leaves that are being transferred ahead from devices."""


class _ReadLeaves(threading.local):
    """The leaves that a thread has read last: all of one slab, or one larger leaf."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Sequence[NDArray[Any]], bool]] = {}
        """Blocks by row, and whether they are in the tree's own memory."""
        self.size_bytes = 0


class TreeSource:
    """A tree to copy; implements ``_save.snapshot.Source``."""

    def __init__(self, plan: Plan, values: Sequence[Any]) -> None:
        self._plan = plan
        self._values = values
        self._read = _ReadLeaves()
        self._lock = threading.Lock()
        self._in_flight: dict[int, list[Any]] = {}
        """Transfers in flight or complete, by row."""
        self._own: frozenset[int] = frozenset(
            self.tree.locate_all(plan.own)[0].tolist() if plan.is_remote else ()
        )
        """Rows of the leaves of which this process writes chunks."""

    @property
    def tree(self) -> Tree:
        return self._plan.tree

    def reading(self) -> AbstractContextManager[None]:
        """Returns a context that permits copies, as the thread may be the caller's.

        It is entered once a thread: to enter it takes longer than to copy a small leaf.
        """
        return permit_jax()

    def copy(self, ordinal: int, into: Bytes) -> None:
        """Copies the elements of a chunk, padded with zeros past the shape."""
        row, within = self.tree.locate(ordinal)
        plan, grid = self._plan.leaves[row], self.tree.grids[row]
        blocks, _ = self._leaf(row)
        if plan.layout.is_joined:
            np.concatenate([b.reshape(-1) for b in blocks], out=into.view(plan.dtype))
            return
        if plan.layout.is_padded[within]:
            into[...] = 0
        for piece in plan.layout.pieces[within]:
            if piece.span is not None:
                start, at, length = piece.span
                flat = _flat(blocks[piece.block])
                into[at : at + length] = flat[start : start + length]
                continue
            chunk = into.view(plan.dtype).reshape(grid.chunk_shape)
            chunk[piece.target] = blocks[piece.block][piece.source]

    def spans(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the memory of a chunk if it can be sent without a copy, else None.

        The pieces must be contiguous ranges in order, in the tree's own memory on the
        host.
        """
        if self._plan.is_remote:
            return None
        found, is_own = self._find_spans(ordinal)
        return found if is_own else None

    def leaf_digests(self) -> bytes:
        """Returns the digests of the leaves that other processes hold, too.

        They are in the order of the rows, zeros for the other leaves; b"" if there are
        none.
        """
        rows = self._plan.compared
        if not rows:
            return b""
        # Start all transfers before waiting for the first.
        wholes = _to_host([self._whole(row) for row in rows])
        digests = bytearray(len(self.tree.leaves) * DIGEST_BYTES)
        for row, values in zip(rows, wholes, strict=True):
            array = np.asarray(values, self._plan.leaves[row].dtype, order="C")
            at = row * DIGEST_BYTES
            digests[at : at + DIGEST_BYTES] = digest(_flat(array).data)
        return bytes(digests)

    def _whole(self, row: int) -> Any:
        """Returns a leaf of which this process holds all elements."""
        value = self._values[row]
        if self._plan.leaves[row].is_key:
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value.addressable_data(0)  # it is replicated
        return value

    def in_order(self, ordinal: int) -> "Sequence[Bytes] | None":
        """Returns the elements of a chunk if they can be read without a copy."""
        return self._find_spans(ordinal)[0]

    def _find_spans(self, ordinal: int) -> "tuple[Sequence[Bytes] | None, bool]":
        """Returns them, and whether they are in the tree's own memory."""
        row, within = self.tree.locate(ordinal)
        pieces = self._plan.leaves[row].layout.contiguous_pieces(within)
        if pieces is None:
            return None, False
        (blocks, is_own), found = self._leaf(row), []
        for piece in pieces:
            assert piece.span is not None
            start, _, length = piece.span
            found.append(_flat(blocks[piece.block])[start : start + length])
        return found, is_own

    def _leaf(self, row: int) -> tuple[Sequence[NDArray[Any]], bool]:
        """Returns the blocks of a leaf on the host, and whether they are in the tree's
        own memory."""
        read = self._read
        if row not in read.found:
            with self._lock:
                shards = (
                    self._transfer_blocks(row)
                    if self._plan.is_remote
                    else self._shards(row)
                )
            dtype = self._plan.leaves[row].dtype
            blocks = [np.asarray(shard, dtype, order="C") for shard in shards]
            is_own = all(
                isinstance(shard, jax.Array) or np.may_share_memory(shard, block)
                for shard, block in zip(shards, blocks, strict=True)
            )
            if read.size_bytes > SLAB_BYTES:
                read.found.clear()
                read.size_bytes = 0
            read.found[row] = blocks, is_own
            read.size_bytes += self.tree.grids[row].leaf_bytes
        return read.found[row]

    def _transfer_blocks(self, row: int) -> list[Any]:
        """Returns the blocks of a leaf; starts transfers of the next leaves."""
        ahead = 0
        for later in range(row, len(self._values)):
            if later not in self._own:
                continue
            if later not in self._in_flight:
                self._in_flight[later] = _to_host(self._shards(later))
            ahead += self.tree.grids[later].leaf_bytes
            if ahead > AHEAD_BYTES:
                break
        # Another thread may still read the row before this one.
        for past in [known for known in self._in_flight if known < row - 1]:
            del self._in_flight[past]
        return self._in_flight[row]

    def _shards(self, row: int) -> list[Any]:
        """Returns the blocks of a leaf where they are, on the host or on devices.

        Called by one thread at a time: when several threads ask for the shards of an
        array for the first time at once, jax lists some twice and omits others.
        """
        value, plan = self._values[row], self._plan.leaves[row]
        if plan.is_key:
            value = jax.random.key_data(value)
        if plan.devices is None:
            return [value]
        # Not addressable_shards, which takes five times as long.
        count = len(value.sharding.addressable_devices)
        indices = range(1 if value.is_fully_replicated else count)
        held: dict[jax.Device, Any] = {}
        try:
            held |= ((one.device, one) for one in map(value.addressable_data, indices))
            return [held[device] for device in plan.devices]
        except (IndexError, KeyError) as e:
            raise UnavailableError(
                f"leaf {self.tree.leaves[row].key!r}: expected shards on "
                f"{len(plan.devices)} devices, got {len(held)} from jax, because "
                "another thread used the array for the first time during the save; "
                "save a copy of the array"
            ) from e


def _to_host(shards: Sequence[Any]) -> list[Any]:
    """Returns the shards on a CPU device, with the transfers in flight.

    NumPy would also transfer them, but would cache the copy with the device array.
    """
    host = jax.local_devices(backend="cpu")[0]
    return [
        jax.device_put(shard, host) if isinstance(shard, jax.Array) else shard
        for shard in shards
    ]


def _flat(block: NDArray[Any]) -> Bytes:
    return block.reshape(-1).view(np.uint8)


SPARE_FRACTION: Final = 0.1
"""Fraction of a device's memory that mode "auto" leaves free."""


def copy_on_devices(
    values: Sequence[Any], mode: Literal["host", "device", "auto", "none"]
) -> list[Any] | None:
    """Returns copies of the leaves, device arrays on their devices, or None for no
    copy.

    A save then blocks only until the copies start: they are dispatched, not waited for.
    Later operations on the arrays, including donation, are ordered after them by jax.

    Args:
        mode: "device" always copies, "host" and "none" never do, "auto" does if all
            devices report enough free memory.
    """
    match mode:
        case "host" | "none":
            return None
        case "device":
            return [_copy(value) for value in values]
        case "auto":
            return [_copy(value) for value in values] if _fits(values) else None
        case _:
            assert_never(mode)


def _copy(value: Any) -> Any:
    if isinstance(value, jax.Array):
        if value.is_fully_addressable:
            return _copy_array(value)
        # all shards are on devices of other processes
        if not value.addressable_shards:
            return value
        # Copied shard by shard: copying the whole array would run on all processes.
        copies = [_copy_array(shard.data) for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            value.shape, value.sharding, copies
        )
    return value.copy() if isinstance(value, np.ndarray) else value


def _copy_array(array: jax.Array) -> jax.Array:
    # Array.copy would be a computation, in the caller's context: on its mesh, on its
    # default device, and rejected by its checks, such as for NaN.
    with permit_jax():
        copy: jax.Array = jax.device_put(array, array.sharding, may_alias=False)
    return copy


def _fits(values: Sequence[Any]) -> bool:
    """Returns whether a copy fits into the free memory of the devices."""
    arrays = [value for value in values if isinstance(value, jax.Array)]
    shardings = {id(array.sharding): array.sharding for array in arrays}
    devices = set().union(*(s.addressable_devices for s in shardings.values()))
    free = {device: _free(device) for device in devices}
    if not arrays or min(free.values(), default=0) <= 0:
        return False
    needed = dict.fromkeys(devices, 0)
    for array in arrays:
        for shard in array.addressable_shards:
            needed[shard.device] += shard.data.nbytes
    return all(free[device] > size for device, size in needed.items())


def _free(device: jax.Device) -> float:
    """Returns the free bytes of a device; 0 for CPUs, which do not report them."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return float((1 - SPARE_FRACTION) * limit - stats.get("bytes_in_use", limit))
