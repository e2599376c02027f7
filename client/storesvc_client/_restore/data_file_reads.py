"""Reads of data files, planned and decoded: which ranges of which files to read, and
how the chunks of a range are verified and copied into buffers.

The plan depends on the manifest only, not on the storage.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, ChunkLocations, Read, plan_reads
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.manifests import Manifest
from storesvc_client._chunks.buffer_layout import Bytes
from storesvc_client._chunks.host_memory import collector_paused
from storesvc_client._restore.assembly import Assembly
from storesvc_client.errors import DataLossError

_SHOWN: Final = 3
"""Maximum chunks listed in a message."""


def plan_file_reads(
    manifest: Manifest, *, alone: I64, together: I64, at_most: int, gap_bytes: int
) -> list[Read]:
    """Returns the reads of chunks, leaf by leaf and within a leaf in file order, so
    that few leaves are partly in memory, however many files hold parts of each.

    Args:
        manifest: Manifest of the checkpoint.
        alone: Chunks that are each read by one read.
        together: Chunks that are read together with their neighbours.
        at_most: Maximum bytes of neighbours in one read.
        gap_bytes: Largest gap between two neighbours in one read.
    """
    tree, places = manifest.tree, manifest.places
    reads = list(_apart(places, alone))
    reads += plan_reads(places, together, at_most=at_most, gap_bytes=gap_bytes)
    first = np.array([read.chunks[0] for read in reads], np.int64)
    file, offset = places.file[first], places.offset[first]
    rows, _ = tree.locate_all(first)
    # a leaf is ordered by the place of its first chunk
    by_place = np.lexsort((offset, file))
    ranks = np.full(len(tree.leaves), len(reads))
    np.minimum.at(ranks, rows[by_place], np.arange(len(reads)))
    return [reads[at] for at in np.lexsort((offset, file, ranks[rows])).tolist()]


def describe(manifest: Manifest, read: Read) -> str:
    """Returns the names of a read's chunks, for messages."""
    return ", ".join(map(manifest.tree.describe_chunk, read.chunks[:_SHOWN]))


def _apart(places: ChunkLocations, chunks: I64) -> Iterator[Read]:
    """Yields one read for each chunk."""
    columns = (
        chunks,
        places.file[chunks],
        places.offset[chunks],
        places.length[chunks],
    )
    for chunk, file, offset, length in zip(*(c.tolist() for c in columns), strict=True):
        stop = offset + length
        yield Read(places.files[file], offset, stop, (chunk,), (length,), (offset,))


PIECE_BYTES: Final = 1 << 20
"""Bytes verified and then copied together: half of a core's L2 cache."""

SMALL_BYTES: Final = 64 << 10
"""Size below which all chunks of a read are verified before the first is copied:
reading the clock takes as long as one such chunk."""


Again: TypeAlias = Callable[[int, int], Bytes]
"""Reads the bytes from the first up to the second offset of the data file again."""


def unpack(read: Read, memory: Bytes, assembly: Assembly, again: Again) -> int:
    """Verifies the chunks of a read and copies them into buffers; returns the bytes of
    the buffers handed over.

    A corrupt chunk is read a second time, because the first read may have been
    corrupted in transit.

    Raises:
        DataLossError: A chunk is corrupt in the second read, too.
    """
    begins = [offset - read.start for offset in read.offsets]
    lengths = [length - CHECKSUM_BYTES for length in read.lengths]
    rows = list(zip(read.chunks, begins, lengths, strict=True))
    small = [row for row in rows if row[2] < SMALL_BYTES]
    with collector_paused():
        freed = _unpack_small(read, small, memory, assembly, again)
    for chunk, begin, length in rows:
        if length >= SMALL_BYTES:
            start, stored_bytes = read.start + begin, length + CHECKSUM_BYTES
            stored = memory[begin : begin + stored_bytes]
            second = partial(again, start, start + stored_bytes)
            freed += _unpack_large(chunk, stored, assembly, second)
    return freed


def _unpack_small(
    read: Read,
    rows: list[tuple[int, int, int]],
    memory: Bytes,
    assembly: Assembly,
    again: Again,
) -> int:
    """Verifies all chunks, then copies all."""
    data, second = memory.data, dict[int, Bytes]()
    # 1. Verify: in `memory`, or in a second read of a chunk that is corrupt there.
    with assembly.meter.phase("verify"):
        for chunk, begin, length in rows:
            end = begin + length
            tail = bytes(data[end : end + CHECKSUM_BYTES])
            try:
                assembly.check(chunk, crc32c(data[begin:end]), tail)
            except DataLossError:
                stop = read.start + end + CHECKSUM_BYTES
                second[chunk] = _sound(chunk, again(read.start + begin, stop), assembly)
    # 2. Copy what was verified.
    with assembly.meter.phase("copy"):
        for chunk, begin, length in rows:
            found = second.get(chunk)
            assembly.copy_elements(
                chunk, memory[begin : begin + length] if found is None else found
            )
    # 3. Complete the chunks, which hands over buffers.
    return sum(assembly.finish(chunk) for chunk, _, _ in rows)


def _unpack_large(
    chunk: int, stored: Bytes, assembly: Assembly, again: Callable[[], Bytes]
) -> int:
    elements, tail = stored[:-CHECKSUM_BYTES], bytes(stored[-CHECKSUM_BYTES:])
    step, checksum = PIECE_BYTES, 0
    if not assembly.is_contiguous(chunk):
        step = assembly.piece_bytes(chunk, PIECE_BYTES)
    # Each piece is copied before the chunk is verified, while it is in the cache: no
    # buffer is handed over before `finish`.
    for at in range(0, len(elements), step):
        piece = elements[at : at + step]
        with assembly.meter.phase("verify"):
            checksum = crc32c(piece.data, checksum)
        with assembly.meter.phase("copy"):
            assembly.copy_elements(chunk, piece, at)
    return check_or_read_again(chunk, checksum, tail, assembly, again)


def check_or_read_again(
    chunk: int,
    checksum: int,
    tail: bytes,
    assembly: Assembly,
    again: Callable[[], Bytes],
) -> int:
    """Verifies a copied chunk and marks it as complete; reads it again if it is
    corrupt. Returns the bytes of the buffers handed over.

    Args:
        chunk: Ordinal of the chunk.
        checksum: CRC-32C of its elements.
        tail: The checksum stored after them.
        assembly: Assembly of its buffers.
        again: Reads the stored bytes of the chunk a second time.

    Raises:
        DataLossError: The chunk is corrupt in the second read, too.
    """
    try:
        assembly.check(chunk, checksum, tail)
    except DataLossError:  # the second read overwrites the corrupt elements
        assembly.copy_elements(chunk, _sound(chunk, again(), assembly))
    return assembly.finish(chunk)


def _sound(chunk: int, stored: Bytes, assembly: Assembly) -> Bytes:
    """Returns the verified elements of the second read of a chunk."""
    elements = stored[:-CHECKSUM_BYTES]
    assembly.check(chunk, crc32c(elements.data), bytes(stored[-CHECKSUM_BYTES:]))
    assembly.log_corrupted(chunk)
    return elements
