"""Manifests: the tree of a checkpoint, and the location of each of its chunks.

A record has the size and digest of its manifest, so a reader needs to trust nothing but
the record. Its parts concatenate (``tree.proto``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from storesvc.format.checksums import digest
from storesvc.format.chunks import (
    ChunkLocations,
    InvalidChunksError,
    Sums,
    pack_placed,
    unpack_places,
    unpack_sums,
)
from storesvc.format.keys import InvalidItemError
from storesvc.format.trees import InvalidTreeError, Tree, pack_leaves, unpack_leaves
from storesvc_proto.v1 import tree_pb2 as pb


class CorruptManifestError(ValueError):
    """The bytes are not the manifest that was committed."""


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The tree of a checkpoint, and its chunks in the order of their ordinals."""

    tree: Tree
    sums: Sums
    places: ChunkLocations

    @property
    def memory_bytes(self) -> int:
        """Approximate bytes in memory."""
        return self.tree.memory_bytes + self.sums.nbytes + self.places.nbytes


def pack_manifest(manifest: Manifest) -> Iterator[bytes]:
    """Yields the serialised parts of a manifest."""
    for leaves in pack_leaves(manifest.tree):
        yield pb.Manifest(leaves=pb.LeafTable.FromString(leaves)).SerializeToString(
            deterministic=True
        )
    for chunks in pack_placed(manifest.sums, manifest.places, with_ordinals=False):
        yield pb.Manifest(chunks=chunks).SerializeToString(deterministic=True)


def unpack_manifest(data: bytes, *, size_bytes: int, expected: bytes) -> Manifest:
    """Verifies and parses the manifest that a record names."""
    if len(data) != size_bytes or digest(data) != expected:
        raise CorruptManifestError(
            f"manifest: expected {size_bytes} bytes with digest {expected.hex()}, "
            f"got {len(data)} bytes with digest {digest(data).hex()}"
        )
    try:
        message = pb.Manifest.FromString(data)
        tree = unpack_leaves(message.leaves)
        sums = unpack_sums(message.chunks, count=tree.chunk_count)
        places = unpack_places(message.chunks)
    except (DecodeError, InvalidTreeError, InvalidItemError, InvalidChunksError) as e:
        raise CorruptManifestError(f"manifest: {e}") from e
    # Each chunk must have the length that the shape of its leaf requires.
    wrong = np.flatnonzero(places.length != tree.lengths.all())
    if wrong.size:
        chunk = int(wrong[0])
        raise CorruptManifestError(
            f"manifest: {tree.describe_chunk(chunk)}: expected "
            f"{tree.lengths[chunk]} bytes by its shape, got "
            f"{places.length[chunk]}"
        )
    return Manifest(tree, sums, places)
