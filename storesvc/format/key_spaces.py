"""Builds OCDBT key spaces that show stored chunks as Zarr arrays.

Any TensorStore client can open one. Chunks are referenced where they are stored. The
``zarr.json`` of the arrays are stored in the node file, before the nodes; arrays with
the same shape, dtype and chunk shape share one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storesvc.format import ocdbt, zarr
from storesvc.format.chunks import ChunkLocations


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects of an OCDBT key space."""

    nodes: list[bytes]
    """Contents of the node file, in order."""
    root: bytes
    """The OCDBT manifest that references the root node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """An array of a key space."""

    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    data_type: str = ""
    """Its name in ``zarr.json``; "": that of the format."""


def view_of_arrays(
    arrays: Sequence[ZarrArray],
    chunk_keys: Sequence[str],
    places: ChunkLocations,
    *,
    node_file: str,
    uuid: bytes,
    commit_time_ns: int,
) -> View:
    """Returns the key space of some arrays.

    Args:
        arrays: The arrays; their names differ.
        chunk_keys: Key of each chunk of all arrays.
        places: Location of each of these chunks, relative to the base of the database.
        node_file: Name of the node file, relative to the base.
        uuid: Identity of the key space; 16 bytes.
        commit_time_ns: Nanoseconds since the epoch.

    Raises:
        ValueError: A value exceeds the limits of the format.
    """
    values: dict[bytes, int] = {}
    """Offset of each distinct ``zarr.json`` in the node file."""
    at = 0
    rows = []
    for array in arrays:
        value = zarr.metadata_bytes(
            array.shape, array.chunk_shape, array.dtype, array.data_type
        )
        if value not in values:
            values[value] = at
            at += len(value)
        rows.append((node_file, values[value], len(value)))
    keys = [zarr.metadata_key(array.name) for array in arrays]
    keys += chunk_keys
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
