"""Plans saves: the leaves of a tree, their chunks, and the source of each chunk's
bytes.

A plan depends on shapes, dtypes and shardings, never on values, so a tree that is saved
repeatedly is planned once. When the processes of a job save one tree, their plans
differ only in the chunks that each writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import jax
import numpy as np
from jax.tree_util import DictKey, tree_flatten_with_path

from storesvc.format.chunks import I64
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid, Region, choose_chunk_shape, whole
from storesvc.format.trees import Leaf, SavedSharding, Tree
from storesvc_client._chunks.host_memory import collector_paused
from storesvc_client._chunks.slabs import Slab, slabs_of
from storesvc_client._job.assignment import (
    Held,
    Holders,
    assigned,
    holders_of_chunks,
    shared_chunk_shape,
)
from storesvc_client._job.job import Job
from storesvc_client._pytree.chunk_layout import Layout, layout_of
from storesvc_client._pytree.encoded_leaves import (
    EncodedLeaf,
    as_array,
    encoded_chunks,
    with_encoded,
)
from storesvc_client._pytree.leaves import (
    NamedLeaf,
    Signature,
    check_values,
    named_leaves,
    saved_sharding,
    storable,
)
from storesvc_client._pytree.plain_containers import pack_containers
from storesvc_client._values.item_values import PlannedItem
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
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Plan of one tree."""

    tree: Tree
    structure: bytes
    """The caller's document; b"" if none."""
    foreign: tuple[str, ...]
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

    Args:
        plan: Plan of a tree.
        values: The leaves of the tree, in the order of the plan.
        items: Items of all processes of the job, in the order of their keys.
    """
    if not items:
        return plan, values
    rows, plans = [], []
    for item in items:
        chunk_shape, layout = encoded_chunks(item.size)
        rows.append(
            Leaf(
                key=item.name.key,
                path_kinds=item.name.path_kinds,
                kind=item.kind,
                dtype="uint8",
                shape=(item.size,),
                chunk_shape=chunk_shape,
            )
        )
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
        slabs=[*plan.slabs, *slabs_of(tree, own)],
    )
    # what other processes write is never read here
    data = [np.frombuffer(item.data or b"", np.uint8) for item in items]
    return whole_plan, [*values, *data]


class Planner:
    """Plans saves, and caches the last plan."""

    def __init__(self, job: Job | None = None) -> None:
        """Creates a planner without a cached plan.

        Args:
            job: The processes that save each tree together; None: this process alone.
        """
        self._job = job
        self._plan: Plan | None = None

    @collector_paused()
    def plan(self, tree: Any, structure: bytes) -> tuple[Plan, list[Any]]:
        """Returns the plan of a pytree, and its leaves in the order of the plan.

        Raises:
            UnsupportedLeafError: A checkpoint cannot hold some leaves; the message
                lists them.
        """
        # 1. A training loop saves trees of one form; their plan is computed once.
        reused = self._reused(tree, structure)
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
            _row(leaf, what, cut) for (leaf, what), cut in zip(found, cuts, strict=True)
        )
        document, foreign = (structure, ()) if structure else pack_containers(tree)
        planned = Tree(rows, document)
        # 4. Select the chunks that this process writes.
        own = _own_chunks(planned, [cut.held for cut in cuts], self._job)
        plan = Plan(
            tree=planned,
            structure=structure,
            foreign=foreign,
            leaves=tuple(cut.plan for cut in cuts),
            order=tuple(numbers[id(leaf)] for leaf, _ in found),
            keys=tuple(leaf.key for leaf in rows),
            own=own,
            slabs=slabs_of(planned, own),
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

    def _reused(self, tree: Any, structure: bytes) -> tuple[Plan, list[Any]] | None:
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
    """Returns type, shape, dtype and sharding of each value; for encoded ones their
    kind and size."""
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
    dtype, held = DTYPES[found.dtype], _held(value, found, job)
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
        layout=layout_of(Grid(found.shape, chunk_shape, dtype.itemsize), blocks),
    )
    return _Cut(
        held=held,
        chunk_shape=chunk_shape,
        sharding=saved_sharding(value),
        plan=plan,
        is_remote=is_remote(value),
    )


def _row(leaf: NamedLeaf, found: Signature, cut: _Cut) -> Leaf:
    return Leaf(
        key=leaf.key,
        path_kinds=leaf.path_kinds,
        kind=found.kind,
        dtype=found.dtype,
        shape=found.shape,
        chunk_shape=cut.chunk_shape,
        sharding=cut.sharding,
        prng_impl=found.prng_impl,
    )


def _shard_shape(value: Any, found: Signature) -> tuple[int, ...]:
    if not isinstance(value, jax.Array):
        return found.shape
    own = value.sharding.shard_shape(value.shape)
    return own + found.shape[len(own) :]  # key data has one more dimension


def _held(value: Any, found: Signature, job: Job | None) -> Held | None:
    """Returns which processes hold which part of a leaf, or None for a local leaf.

    A leaf is local if it is on the host or on devices of one process. Every process
    then has its own copy, and process 0 writes it after the copies were found equal.
    """
    if job is None or not isinstance(value, jax.Array):
        return None
    holders = _holders(value.sharding, value.shape)
    if holders is None:
        return None
    shard_shape = _shard_shape(value, found)
    counts = tuple(
        -(-n // max(1, shard)) or 1
        for n, shard in zip(found.shape, shard_shape, strict=True)
    )
    return Held(shard_shape=shard_shape, counts=counts, holders=holders)


def _is_compared(value: Any, size_bytes: int) -> bool:
    """Returns whether this process holds all of a leaf that other processes hold,
    too."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return True
    is_held = value.is_fully_replicated and bool(value.sharding.addressable_devices)
    return is_held and size_bytes <= MAX_COMPARED_BYTES


@lru_cache(maxsize=1024)  # a tree has many leaves but few shardings
def _holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[Holders, ...] | None:
    """Returns the processes that hold each shard, in C order; None if only one does."""
    indices: dict[Any, Any] = {**sharding.devices_indices_map(shape)}
    if len({device.process_index for device in indices}) == 1:
        return None
    found: dict[tuple[int, ...], set[int]] = {}
    for device, index in indices.items():
        region = region_of(index or (slice(None),) * len(shape), shape)
        starts = tuple(start for start, _ in region)
        found.setdefault(starts, set()).add(device.process_index)
    return tuple(frozenset(found[starts]) for starts in sorted(found))


def _own_chunks(tree: Tree, held: Sequence[Held | None], job: Job | None) -> I64:
    """Returns the ordinals of the chunks that this process writes."""
    if job is None:
        return np.arange(tree.chunk_count)
    holders: list[Holders] = []
    for grid, of in zip(tree.grids, held, strict=True):
        first = (frozenset({0}),) * grid.count
        holders += first if of is None else holders_of_chunks(grid, of)
    sizes = tree.stored_lengths.tolist()
    writers = assigned(holders, sizes, count=job.count)
    return np.flatnonzero(writers == job.index)


def _blocks(
    value: Any, found: Signature
) -> tuple[tuple[jax.Device, ...] | None, tuple[Region, ...]]:
    """Returns the devices that together hold each part of a leaf once, and these
    parts."""
    if not isinstance(value, jax.Array):
        return None, (whole(found.shape),)
    rank = len(value.shape)  # key data has one more dimension
    indices = value.sharding.addressable_devices_indices_map(value.shape)
    regions: dict[Region, jax.Device] = {}
    for device, index in indices.items():
        held = region_of(index or (slice(None),) * rank, value.shape)
        regions.setdefault(held + whole(found.shape[rank:]), device)
    return tuple(regions.values()), tuple(regions)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Returns the region of a shard's index."""
    bounds = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)
