"""The standard view of a checkpoint: its key space, made of its manifest.

Chunks are named where they lie. The ``zarr.json`` of leaves lie in the file of the
nodes, before them; leaves of one shape share one.
"""

from dataclasses import dataclass

import numpy as np

from storesvc.format import ocdbt, zarr
from storesvc.format.chunks import Places
from storesvc.format.manifests import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects of a key space."""

    nodes: list[bytes]
    """What the file of its nodes holds, one after another."""
    root: bytes


def key_space_of(
    manifest: Manifest, *, node_file: str, uuid: bytes, commit_time_ns: int
) -> View:
    """Returns the key space that shows what a manifest holds.

    Args:
        manifest: Of the checkpoint.
        node_file: The name of the file for its nodes, relative to the pool.
        uuid: Of the key space; 16 bytes.
        commit_time_ns: Since the epoch.
    """
    tree, places = manifest.tree, manifest.places
    values: dict[bytes, int] = {}
    """Where each ``zarr.json`` begins in the file of the nodes."""
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
    metadata = Places.of_rows(rows)
    both = Places(
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
