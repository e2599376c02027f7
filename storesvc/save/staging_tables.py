"""Staging: what the writers of an upload have stored so far, in tables.

A table is written once, after the data file that it tells of: a chunk that a table
names is durable, and what no table names was never acknowledged. So a receipt is
compared with what arrived, and a writer that starts again learns what it need not send,
without that any chunk is read.
"""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from storesvc.catalog.records import read_record
from storesvc.errors import CorruptDataError
from storesvc.format.chunks import (
    InvalidChunksError,
    Places,
    Sums,
    merge,
    pack_placed,
    unpack_places,
    unpack_sums,
)
from storesvc.format.layout import RunPlaces
from storesvc.format.names import UploadName
from storesvc.format.seal import seal
from storesvc.storage.bounded_gather import each
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2

Table: TypeAlias = tuple[Sums, Places]
"""Chunks, and where they lie; ascending."""

_AT_ONCE: Final = 64


async def stage(
    bucket: KvBucket, name: UploadName, writer: int, sums: Sums, places: Places
) -> None:
    """Writes down that chunks are stored; durable when it returns."""
    place = RunPlaces(name.run).staged(name.upload, writer, uuid.uuid4().hex)
    await bucket.write(place, seal(pack_table(sums, places), place=place))


async def staged(
    bucket: KvBucket, name: UploadName, writer: int, *, chunk_count: int
) -> Table:
    """Returns what a writer has stored, ascending; a chunk that was stored several
    times several times.

    Raises:
        CorruptDataError: A table is damaged.
    """
    places = await bucket.list(RunPlaces(name.run).staging(name.upload, writer))
    return await tables_at(bucket, places, chunk_count=chunk_count)


async def staged_places(bucket: KvBucket, name: UploadName) -> Mapping[int, list[str]]:
    """Returns the places of the tables of an upload, by writer.

    By one list: an upload may promise very many writers of which few store anything.
    """
    places, found = RunPlaces(name.run), defaultdict[int, list[str]](list)
    for place in await bucket.list(places.staging_of(name.upload)):
        found[places.staged_writer_of(place)].append(place)
    return found


async def tables_at(
    bucket: KvBucket, places: Sequence[str], *, chunk_count: int
) -> Table:
    """Returns the stored chunks that tables name, as ``staged`` does.

    Raises:
        CorruptDataError: A table is damaged.
    """

    async def table(place: str) -> Table | None:
        found = await read_record(bucket, place, pb.Receipt)
        return None if found is None else unpack_table(place, found[0], chunk_count)

    tables = [t for t in await each(table, places, at_once=_AT_ONCE) if t is not None]
    return await asyncio.to_thread(merge, tables)


def pack_table(sums: Sums, places: Places) -> pb.Receipt:
    """Returns the record of stored chunks."""
    parts = pack_placed(sums, places, with_ordinals=True)
    return pb.Receipt(chunks=b"".join(part.SerializeToString() for part in parts))


def unpack_table(place: str, receipt: pb.Receipt, chunk_count: int) -> Table:
    """Returns the stored chunks of a record.

    Raises:
        CorruptDataError: It contradicts itself, or names chunks that the tree does
            not have.
    """
    try:
        table = tree_pb2.ChunkTable.FromString(receipt.chunks)
        sums, places = unpack_sums(table), unpack_places(table)
    except (DecodeError, InvalidChunksError) as e:
        raise CorruptDataError(f"{place} is damaged: {e}") from e
    if len(sums) and sums.ordinal[-1] >= chunk_count:
        raise CorruptDataError(
            f"{place} is damaged: expected chunks below {chunk_count}, got "
            f"{sums.ordinal[-1]}"
        )
    return sums, places
