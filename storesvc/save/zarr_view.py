"""Zarr view of a checkpoint: builds an OCDBT key space from its manifest."""

import numpy as np

from storesvc.format.manifests import Manifest
from storesvc.format.ocdbt import View, ZarrArray, view_of_arrays


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
    tree = manifest.tree
    return view_of_arrays(
        [
            ZarrArray(
                name=leaf.key,
                shape=leaf.shape,
                chunk_shape=leaf.chunk_shape,
                dtype=leaf.dtype,
            )
            for leaf in tree.leaves
        ],
        tree.chunk_keys(np.arange(tree.chunk_count)),
        manifest.places,
        node_file=node_file,
        uuid=uuid,
        commit_time_ns=commit_time_ns,
    )
