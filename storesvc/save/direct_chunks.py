"""Direct chunks: validates the locations that a direct writer reports.

A direct writer puts data files into the pool itself and sends only their tables. A
table is accepted only if its chunks belong to the leaf table, have the length that
their leaf gives them, are in data files of this upload, and do not overlap.
"""

import numpy as np

from storesvc.errors import InvalidChunkError
from storesvc.format.chunks import (
    ChunkLocations,
    InvalidChunksError,
    Sums,
    unpack_places,
    unpack_sums,
)
from storesvc.save.uploads import OpenUpload
from storesvc_proto.v1 import tree_pb2


def check_direct_chunks(
    upload: OpenUpload, table: tree_pb2.ChunkTable
) -> tuple[Sums, ChunkLocations]:
    """Returns the checksums and the locations of the chunks of a table.

    Raises:
        InvalidChunkError: The table breaks a rule of ``WriteChunksRequest.placed``.
    """
    try:
        sums, places = unpack_sums(table), unpack_places(table)
    except InvalidChunksError as e:
        raise InvalidChunkError(f"placed: {e}") from e
    tree = upload.tree
    if len(sums) and sums.ordinal[-1] >= tree.chunk_count:
        raise InvalidChunkError(
            f"placed: the tree has {tree.chunk_count} chunks, got {sums.ordinal[-1]}"
        )
    prefix = upload.places.data_prefix(upload.name.upload)
    for file in places.files:
        if not file.startswith(prefix):
            raise InvalidChunkError(
                f"placed: expected data files of this upload, called {prefix}ID, got "
                f"{file!r}"
            )
    wrong = np.flatnonzero(places.length != tree.lengths[sums.ordinal])
    if len(wrong):
        row = int(wrong[0])
        chunk = int(sums.ordinal[row])
        raise InvalidChunkError(
            f"placed: {tree.describe_chunk(chunk)}: expected "
            f"{tree.lengths[chunk]} bytes, got {places.length[row]}"
        )
    _check_overlaps(places)
    return sums, places


def _check_overlaps(places: ChunkLocations) -> None:
    """Rejects chunks that overlap, and files without any chunk."""
    order = np.lexsort((places.offset, places.file))
    file, offset = places.file[order], places.offset[order]
    stop = offset + places.length[order]
    over = (file[1:] == file[:-1]) & (offset[1:] < stop[:-1])
    if over.any():
        at = int(np.flatnonzero(over)[0])
        raise InvalidChunkError(
            f"placed: two chunks overlap at byte {offset[at + 1]} of "
            f"{places.files[int(file[at])]}"
        )
    if len(np.unique(file)) != len(places.files):
        raise InvalidChunkError("placed: a data file is listed that holds no chunk")
