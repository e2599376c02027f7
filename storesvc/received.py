"""What was received: the sums of the chunks of a writer, kept beside them.

The sums of a batch are written in one atomic commit with its chunks. So a receipt is
compared with what arrived, and a writer that starts again learns what it need not
send, without that any chunk is read.
"""

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from storesvc.errors import CorruptDataError
from storesvc.format.chunks import InvalidChunksError, Sums, pack_sums, unpack_sums
from storesvc.kvbucket import ASIDE, KeySpace
from storesvc_proto.v1 import tree_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The sums of what a writer sent, for every chunk of the tree."""

    sums: Sums
    certain: NDArray[np.bool_]
    """Whether the chunk was sent, and each time with these sums. Of one that was sent
    with different ones nothing here tells which came last."""


def sums_entry(sums: Sums) -> tuple[str, bytes]:
    """Returns the key and the value that keep the sums of a batch."""
    table = b"".join(part.SerializeToString() for part in pack_sums(sums))
    return ASIDE + uuid.uuid4().hex, table


async def sums_of(space: KeySpace, chunk_count: int) -> Recorded:
    """Returns the sums of what a key space received.

    Raises:
        CorruptDataError: They are damaged.
    """
    entries = await space.read_aside()
    return await asyncio.to_thread(_join, entries, chunk_count)


def _join(entries: Iterable[bytes], chunk_count: int) -> Recorded:
    crc32c = np.zeros(chunk_count, np.uint32)
    digests = np.zeros((chunk_count, 16), np.uint8)
    known = np.zeros(chunk_count, np.bool_)
    differs = np.zeros(chunk_count, np.bool_)
    for entry in entries:
        try:
            sums = unpack_sums(tree_pb2.ChunkTable.FromString(entry))
        except (InvalidChunksError, DecodeError) as e:
            raise CorruptDataError(f"recorded sums are damaged: {e}") from e
        at = sums.ordinal
        if len(at) and at.max() >= chunk_count:
            raise CorruptDataError(
                f"recorded sums are damaged: expected chunks below {chunk_count}, got "
                f"{at.max()}"
            )
        differs[at] |= known[at] & (
            (crc32c[at] != sums.crc32c) | (digests[at] != sums.digests).any(axis=1)
        )
        crc32c[at], digests[at], known[at] = sums.crc32c, sums.digests, True
    all_sums = Sums(ordinal=np.arange(chunk_count), crc32c=crc32c, digests=digests)
    return Recorded(all_sums, known & ~differs)
