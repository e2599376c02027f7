"""Unpacking: from the bytes of a read to where its chunks go, each of them checked."""

from typing import Final

from storesvc.format.checksums import crc32c
from storesvc.format.reads import Read
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._layouts import Bytes
from storesvc_client._pausing import collector_paused
from storesvc_client._receiving import Assembly

PIECE_BYTES: Final = 1 << 20
"""Checksummed, then copied, before the next: half of a core's own cache."""

SMALL_BYTES: Final = 64 << 10
"""Of chunks below it, many are checksummed before the first is copied: the clock takes
as long as one of them."""


def unpack(read: Read, memory: Bytes, assembly: Assembly) -> int:
    """Checks the chunks of a read, copies each to where it goes, and returns the bytes
    of buffers that were handed over.

    Raises:
        DataLossError: One is not what was saved.
    """
    begins = [offset - read.start for offset in read.offsets]
    lengths = [length - CHECKSUM_BYTES for length in read.lengths]
    rows = list(zip(read.chunks, begins, lengths, strict=True))
    small = [row for row in rows if row[2] < SMALL_BYTES]
    with collector_paused():
        freed = _unpack_small(small, memory, assembly)
    for chunk, begin, length in rows:
        if length >= SMALL_BYTES:
            end = begin + length
            tail = bytes(memory[end : end + CHECKSUM_BYTES])
            freed += _unpack_large(chunk, memory[begin:end], tail, assembly)
    return freed


def _unpack_small(
    rows: list[tuple[int, int, int]], memory: Bytes, assembly: Assembly
) -> int:
    """Does one step after the other with all of them."""
    data = memory.data
    with assembly.meter.phase("verify"):
        for chunk, begin, length in rows:
            end = begin + length
            tail = bytes(data[end : end + CHECKSUM_BYTES])
            assembly.check(chunk, crc32c(data[begin:end]), tail)
    with assembly.meter.phase("copy"):
        for chunk, begin, length in rows:
            assembly.spread(chunk, memory[begin : begin + length])
    return sum(assembly.finish(chunk) for chunk, _, _ in rows)


def _unpack_large(chunk: int, elements: Bytes, tail: bytes, assembly: Assembly) -> int:
    step, checksum = PIECE_BYTES, 0
    if not assembly.is_run(chunk):
        step = assembly.piece_bytes(chunk, PIECE_BYTES)
    for at in range(0, len(elements), step):
        piece = elements[at : at + step]
        with assembly.meter.phase("verify"):
            checksum = crc32c(piece.data, checksum)
        with assembly.meter.phase("copy"):
            assembly.spread(chunk, piece, at)
    assembly.check(chunk, checksum, tail)
    return assembly.finish(chunk)
