"""Unpacking: from the bytes of a read to where its chunks go, each of them checked."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from storesvc.format.checksums import crc32c
from storesvc.format.reads import Read
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._chunks.buffer_layout import Bytes
from storesvc_client._restore.assembly import Assembly
from storesvc_client._values.gc_pause import collector_paused
from storesvc_client.errors import DataLossError

PIECE_BYTES: Final = 1 << 20
"""Checksummed, then copied, before the next: half of a core's own cache."""

SMALL_BYTES: Final = 64 << 10
"""Of chunks below it, many are checksummed before the first is copied: the clock takes
as long as one of them."""


Again: TypeAlias = Callable[[int, int], Bytes]
"""Reads a part of the data file a second time: from a byte, to the one behind."""


def unpack(read: Read, memory: Bytes, assembly: Assembly, again: Again) -> int:
    """Checks the chunks of a read, copies each to where it goes, and returns the bytes
    of buffers that were handed over.

    A chunk that is damaged is read a second time: the answer may have been corrupted on
    its way.

    Raises:
        DataLossError: One is not what was saved.
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
    """Does one step after the other with all of them."""
    data, second = memory.data, dict[int, Bytes]()
    with assembly.meter.phase("verify"):
        for chunk, begin, length in rows:
            end = begin + length
            tail = bytes(data[end : end + CHECKSUM_BYTES])
            try:
                assembly.check(chunk, crc32c(data[begin:end]), tail)
            except DataLossError:
                stop = read.start + end + CHECKSUM_BYTES
                second[chunk] = _sound(chunk, again(read.start + begin, stop), assembly)
    with assembly.meter.phase("copy"):
        for chunk, begin, length in rows:
            found = second.get(chunk)
            assembly.spread(
                chunk, memory[begin : begin + length] if found is None else found
            )
    return sum(assembly.finish(chunk) for chunk, _, _ in rows)


def _unpack_large(
    chunk: int, stored: Bytes, assembly: Assembly, again: Callable[[], Bytes]
) -> int:
    elements, tail = stored[:-CHECKSUM_BYTES], bytes(stored[-CHECKSUM_BYTES:])
    step, checksum = PIECE_BYTES, 0
    if not assembly.is_run(chunk):
        step = assembly.piece_bytes(chunk, PIECE_BYTES)
    for at in range(0, len(elements), step):
        piece = elements[at : at + step]
        with assembly.meter.phase("verify"):
            checksum = crc32c(piece.data, checksum)
        with assembly.meter.phase("copy"):
            assembly.spread(chunk, piece, at)
    return check_or_read_again(chunk, checksum, tail, assembly, again)


def check_or_read_again(
    chunk: int,
    checksum: int,
    tail: bytes,
    assembly: Assembly,
    again: Callable[[], Bytes],
) -> int:
    """Ends with a chunk whose elements are where they go; where they are damaged, with
    those of a second read. Returns the bytes of buffers that were handed over.

    Args:
        chunk: Its ordinal.
        checksum: Of its elements.
        tail: The checksum behind them.
        assembly: What the buffers are of.
        again: Reads the stored bytes of the chunk a second time.

    Raises:
        DataLossError: The second read is damaged, too.
    """
    try:
        assembly.check(chunk, checksum, tail)
    except DataLossError:
        assembly.spread(chunk, _sound(chunk, again(), assembly))
    return assembly.finish(chunk)


def _sound(chunk: int, stored: Bytes, assembly: Assembly) -> Bytes:
    """The elements of a chunk whose first read was damaged."""
    elements = stored[:-CHECKSUM_BYTES]
    assembly.check(chunk, crc32c(elements.data), bytes(stored[-CHECKSUM_BYTES:]))
    assembly.log_corrupted(chunk)
    return elements
