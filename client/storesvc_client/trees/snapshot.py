"""A snapshot: a tree whose bytes stay as they are while it is sent.

Every shard is copied to the host once, replicas not; then the caller may donate
or overwrite its arrays.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import Buffer
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, choose_chunk_shape, part, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._pausing import collector_paused
from storesvc_client.trees.flattening import (
    NamedLeaf,
    Signature,
    named_leaves,
    saved_sharding,
    storable,
)
from storesvc_proto.v1 import tree_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of a leaf on the host, in C order, little-endian."""

    region: Region
    array: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TreeSnapshot:
    """See ``storesvc_client._sending.Snapshot``."""

    tree: Tree
    blocks: tuple[tuple[Block, ...], ...]
    """Of each leaf: blocks that cover it, none overlapping."""

    def chunk(self, ordinal: int) -> Buffer:
        """Returns the elements of a chunk, padded with zeros past the shape."""
        row, within = self.tree.locate(ordinal)
        grid = self.tree.grids[row]
        region = grid.region(within)
        for block in self.blocks[row]:
            held = part(block.array, block.region, region)
            if held.nbytes == grid.chunk_bytes:
                return _bytes(np.ascontiguousarray(held))
        chunk = np.zeros(grid.chunk_shape, DTYPES[self.tree.leaves[row].dtype])
        for block in self.blocks[row]:
            into = part(chunk, region, block.region)
            into[...] = part(block.array, block.region, region)
        return _bytes(chunk)


@collector_paused()
def take_snapshot(tree: Any, structure: bytes = b"") -> TreeSnapshot:
    """Returns a snapshot of a pytree, and of the document about it.

    Raises:
        UnsupportedLeafError: A checkpoint cannot hold it; names every leaf.
    """
    named, _ = named_leaves(tree)
    leaves = list(storable(named))
    for leaf, _ in leaves:
        if isinstance(leaf.value, jax.Array) and _on_accelerator(leaf.value):
            leaf.value.copy_to_host_async()
    rows, blocks = [], []
    for leaf, found in leaves:
        rows.append(_row(leaf, found))
        blocks.append(tuple(_blocks(leaf.value, found)))
    return TreeSnapshot(Tree(tuple(rows), structure), tuple(blocks))


def _row(leaf: NamedLeaf, found: Signature) -> Leaf:
    shard_shape = found.shape
    if isinstance(leaf.value, jax.Array):
        own = leaf.value.sharding.shard_shape(leaf.value.shape)
        shard_shape = own + found.shape[len(own) :]
    return Leaf(
        key=leaf.key,
        path_kinds=leaf.path_kinds,
        kind=found.kind,
        dtype=found.dtype,
        shape=found.shape,
        chunk_shape=choose_chunk_shape(
            found.shape, DTYPES[found.dtype].itemsize, shard_shape
        ),
        sharding=saved_sharding(leaf.value),
        prng_impl=found.prng_impl,
    )


def _blocks(value: Any, found: Signature) -> list[Block]:
    if not isinstance(value, jax.Array):
        array = np.array(value, DTYPES[found.dtype], order="C")  # a copy, always
        return [Block(whole(found.shape), array)]
    if found.kind == pb.LEAF_KIND_PRNG_KEY:
        value = jax.random.key_data(value)
    if value.is_fully_replicated:
        return [_block(whole(found.shape), value.addressable_data(0))]
    blocks: dict[Region, Block] = {}
    for shard in value.addressable_shards:
        region = region_of(shard.index, found.shape)
        if region not in blocks:  # the others are replicas
            blocks[region] = _block(region, shard.data)
    return list(blocks.values())


def _block(region: Region, data: jax.Array) -> Block:
    host = np.asarray(data)
    # on CPU that is a view of memory that the array may give away
    own = host if host.flags.owndata else host.copy()
    return Block(region, np.ascontiguousarray(own))


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Returns the region that a shard's index means."""
    bounds = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _on_accelerator(value: jax.Array) -> bool:
    return all(device.platform != "cpu" for device in value.devices())
