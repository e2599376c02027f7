"""The data files of an Orbax checkpoint: hard links into the store, or copies.

A stored chunk is a chunk of Zarr with its CRC-32C, which Orbax verifies when it reads.
So a checkpoint on the disk of the target is exported by links and a small index; where
that cannot be, chunks are read, verified, and written to new files in the same form.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import ChunkLocations
from storesvc.format.dtypes import CHECKSUM_BYTES, DTYPES, chunk_key
from storesvc.storage import rooted_files
from storesvc.storage.rooted_files import sync_directory
from storesvc_client._export.elements import (
    Piece,
    cast_array,
    raw_bytes,
    read_in_order,
)
from storesvc_client._export.orbax_documents import OrbaxLeaf
from storesvc_client._export.source import Source
from storesvc_client._export.target import NewFile, Target, make_directory, translated
from storesvc_client._values.progress import Meter
from storesvc_client.errors import DataLossError

DATA: Final = "d/"
"""Folder of the data files in an item, as TensorStore names it."""

DATA_FILE_BYTES: Final = 1 << 30
"""Size from which the next chunk begins a new data file."""

_NOT_LINKABLE: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}
)
"""Errors of a link to another disk, or on a disk without hard links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """The data files of an item, and the chunks in them."""

    places: ChunkLocations
    """Location of each chunk, relative to the item."""
    linked_bytes: int = 0
    """Bytes of the files that are hard links."""
    copied_bytes: int = 0
    """Bytes of the files that the bucket copied itself."""


def chunk_keys(source: Source, leaves: Sequence[OrbaxLeaf]) -> list[str]:
    """Returns the key of each chunk of the leaves."""
    return [
        chunk_key(leaf.name, grid.index(at))
        for leaf, grid in ((leaf, source.tree.grids[leaf.row]) for leaf in leaves)
        for at in range(grid.count)
    ]


def is_stored_as_exported(source: Source, leaves: Sequence[OrbaxLeaf]) -> bool:
    """Returns whether the data files can be taken as they are: no leaf is cast, and
    none is left out, whose bytes a file would still hold."""
    is_cast = any(leaf.dtype != source.leaf(leaf.row).dtype for leaf in leaves)
    return source.is_whole and not is_cast


def with_names(places: ChunkLocations) -> ChunkLocations:
    """Returns the locations of chunks in data files that are taken as they are, with
    the names of the files in an item."""
    names = tuple(DATA + name.replace("/", "-") for name in places.files)
    return replace(places, files=names)


def link_data(
    source: Source, leaves: Sequence[OrbaxLeaf], target: Target, item: str
) -> DataFiles | None:
    """Links the data files that hold the leaves; returns None, without a link left, if
    a leaf is cast or left out, or the files cannot be linked.

    Raises:
        DataLossError: A data file is missing or too short.
    """
    folder = target.local
    if folder is None or source.pool is None:
        return None
    if not is_stored_as_exported(source, leaves):
        return None
    places = source.places.take(source.ordinals([leaf.row for leaf in leaves]))
    links = with_names(places)
    used, ends = np.unique(places.file), places.ends
    size = 0
    with translated(f"{folder / item}"):
        make_directory(folder / item / DATA)
        for file in used.tolist():
            source_path = source.pool / places.files[file]
            link = folder / item / links.files[file]
            size += _checked_size(source, places.files[file], int(ends[file]))
            try:
                os.link(source_path, link, follow_symlinks=False)
            except OSError as e:
                if e.errno not in _NOT_LINKABLE:
                    raise
                target.remove(f"{item}/{DATA.rstrip('/')}")
                return None
        sync_directory(folder / item / DATA)
    return DataFiles(places=links, linked_bytes=size)


def _checked_size(source: Source, name: str, end: int) -> int:
    """Returns the size of a data file that holds `end` bytes or more.

    Raises:
        DataLossError: It is missing or too short.
    """
    assert source.pool is not None
    try:
        descriptor = rooted_files.open_file(source.pool, name)
    except FileNotFoundError:
        size = -1
    else:
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
    if size < end:
        got = "no file" if size < 0 else f"{size} bytes"
        raise DataLossError(
            f"export of {source.name}: data file {source.pool / name}: expected at "
            f"least {end} bytes, got {got}; export another checkpoint",
            reason="CORRUPT_DATA",
        )
    return size


def copy_data(
    source: Source,
    leaves: Sequence[OrbaxLeaf],
    target: Target,
    item: str,
    meter: Meter,
) -> DataFiles:
    """Writes the chunks of the leaves to new data files.

    Raises:
        StoreError: Stored bytes are damaged, a cast exceeds the range, or the target
            cannot be written.
    """
    rows: list[tuple[str, int, int]] = []
    with ExitStack() as stack:
        file: NewFile | None = None
        name, at = "", 0
        for data in _chunks(source, leaves, meter):
            if file is None or at >= DATA_FILE_BYTES:
                stack.close()  # completes the previous file
                name, at = f"{DATA}{uuid4().hex}", 0
                file = stack.enter_context(target.create(f"{item}/{name}"))
            tail = struct.pack("<I", crc32c(data))
            with meter.phase("write"):
                file.write(data)
                file.write(tail)
            rows.append((name, at, len(data) + CHECKSUM_BYTES))
            at += len(data) + CHECKSUM_BYTES
            meter.add(len(data) + CHECKSUM_BYTES)
    return DataFiles(places=ChunkLocations.of_rows(rows))


def _chunks(
    source: Source, leaves: Sequence[OrbaxLeaf], meter: Meter
) -> Iterator[memoryview]:
    """Yields the elements of each chunk, as Zarr stores them: those at the far edges
    are padded with zeros."""
    grids = [source.tree.grids[leaf.row] for leaf in leaves]
    pieces = (
        Piece(leaf.row, grid.region(at))
        for leaf, grid in zip(leaves, grids, strict=True)
        for at in range(grid.count)
    )
    arrays = read_in_order(source, pieces, meter)
    for leaf, grid in zip(leaves, grids, strict=True):
        for _ in range(grid.count):
            array = cast_array(next(arrays), leaf.dtype, source.describe(leaf.row))
            yield raw_bytes(_padded(array, leaf.chunk_shape, leaf.dtype))


def _padded(array: NDArray[Any], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    if array.shape == shape:
        return array
    padded = np.zeros(shape, DTYPES[dtype])
    padded[tuple(map(slice, array.shape))] = array
    return padded
