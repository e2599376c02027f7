"""Zarr view of a checkpoint: builds an OCDBT key space from its manifest.

Any TensorStore client can open it. Chunks are referenced where they are stored. The
``zarr.json`` of the leaves are stored in the node file, before the nodes; leaves with
the same shape, dtype and chunk shape share one.
"""

from dataclasses import dataclass

import numpy as np

from storesvc.format import ocdbt, zarr
from storesvc.format.chunks import ChunkLocations
from storesvc.format.manifests import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects of an OCDBT key space."""

    nodes: list[bytes]
    """Contents of the node file, in order."""
    root: bytes
    """The OCDBT manifest that references the root node."""


def key_space_of(
    manifest: Manifest, *, node_file: str, uuid: bytes, commit_time_ns: int
) -> View:
    """Returns the key space that shows the leaves of a manifest as Zarr arrays.

    Args:
        manifest: Manifest of the checkpoint.
        node_file: Name of the node file, relative to the pool.
        uuid: Identity of the key space; 16 bytes.
        commit_time_ns: Nanoseconds since the epoch.
    """
    tree, places = manifest.tree, manifest.places
    values: dict[bytes, int] = {}
    """Offset of each distinct ``zarr.json`` in the node file."""
    at = 0
    rows = []
    for leaf in tree.leaves:
        value = zarr.metadata_bytes(leaf.shape, leaf.chunk_shape, leaf.dtype)
        if value not in values:
            values[value] = at
            at += len(value)
        rows.append((node_file, values[value], len(value)))
    keys = [zarr.metadata_key(leaf.key) for leaf in tree.leaves]
    keys += tree.chunk_keys(np.arange(tree.chunk_count))
    metadata = ChunkLocations.of_rows(rows)
    both = ChunkLocations(
        files=(node_file, *places.files),
        file=np.concatenate([metadata.file, places.file + 1]),
        offset=np.concatenate([metadata.offset, places.offset]),
        length=np.concatenate([metadata.length, places.length]),
    )
    order = sorted(range(len(keys)), key=[key.encode() for key in keys].__getitem__)
    encoded = ocdbt.encode(
        [keys[row] for row in order],
        both.take(np.array(order, np.int64)),
        node_file=node_file,
        node_offset=at,
        uuid=uuid,
        commit_time_ns=commit_time_ns,
    )
    return View(nodes=[*values, encoded.nodes], root=encoded.manifest)
