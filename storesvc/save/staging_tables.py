"""Staging tables: record which chunks the writers of an upload have stored so far.

A staging table is written once, after the data file that holds its chunks is durable.
So a chunk in a table is durable, and a chunk in no table was never acknowledged. A
receipt is compared with the tables, and a writer that restarts learns from them what it
need not send again; no chunk is read for either.
"""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final, TypeAlias

from cachetools import LRUCache
from google.protobuf.message import DecodeError

from storesvc.catalog.records import read_record
from storesvc.clock import Clock
from storesvc.concurrency import offload
from storesvc.errors import CorruptDataError
from storesvc.format.chunks import (
    ChunkLocations,
    InvalidChunksError,
    Sums,
    merge,
    pack_placed,
    unpack_places,
    unpack_sums,
)
from storesvc.format.layout import RunPaths
from storesvc.format.names import UploadName
from storesvc.format.seal import seal
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import gather_each
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2

Table: TypeAlias = tuple[Sums, ChunkLocations]
"""Checksums and locations of stored chunks, ascending by ordinal."""

MAX_OWN_BYTES: Final = 32 << 20
"""Memory for the tables that this process wrote (an estimate)."""

FRESH_SECONDS: Final = 60.0
"""Time for which the data files of a table that this process wrote need not be checked
again, while the upload is live."""

_AT_ONCE: Final = 64

_ROW_BYTES: Final = 64
"""Memory of a row of a table."""

_FILE_BYTES: Final = 512
"""Memory of a table and of the name of one data file."""


@dataclass(frozen=True, slots=True, eq=False)
class NewTable:
    """A staging table that this process writes."""

    place: str
    """Its path in the bucket."""
    table: Table
    at: float
    """``Clock.elapsed`` before its data files were checked."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes (an estimate)."""
        sums, places = self.table
        return _ROW_BYTES * len(sums) + _FILE_BYTES * len(places.files)


class OwnTables:
    """Staging tables that this process wrote, which it need not read again: a staging
    table is never changed, and its name is random."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._tables: LRUCache[str, NewTable] = LRUCache(
            MAX_OWN_BYTES, getsizeof=attrgetter("size_bytes")
        )

    def new(self, name: UploadName, writer: int, table: Table) -> NewTable:
        """Returns a table for ``write`` and ``keep``."""
        place = RunPaths(name.run).staged(name.upload, writer, uuid.uuid4().hex)
        return NewTable(place, table, self._clock.elapsed())

    async def write(self, bucket: TensorStoreBucket, new: NewTable) -> None:
        """Records that chunks are stored; the record is durable on return."""
        await bucket.write(new.place, seal(pack_table(*new.table), place=new.place))

    def keep(self, new: NewTable) -> None:
        """Remembers a table that is durable, as are its data files."""
        with suppress(ValueError):  # larger than the cache
            self._tables[new.place] = new

    def below(self, prefix: str) -> dict[str, Table]:
        """Returns the remembered tables whose paths begin with a prefix, by path."""
        return {new.place: new.table for new in self._below(prefix)}

    def are_fresh(self, prefix: str) -> bool:
        """Returns whether there are such tables, and the data files of all of them were
        checked a short time ago."""
        since = self._clock.elapsed() - FRESH_SECONDS
        found = self._below(prefix)
        return bool(found) and all(new.at >= since for new in found)

    def _below(self, prefix: str) -> list[NewTable]:
        places = sorted(place for place in self._tables if place.startswith(prefix))
        return [self._tables[place] for place in places]


async def tables_at(
    bucket: TensorStoreBucket,
    places: Sequence[str],
    *,
    chunk_count: int,
    known: Mapping[str, Table] = MappingProxyType({}),
) -> Table:
    """Returns the chunks in some staging tables, ascending by ordinal.

    A chunk that was stored several times has several rows.

    Args:
        known: Tables by path that need not be read.

    Raises:
        CorruptDataError: A staging table is damaged.
    """

    async def table(place: str) -> Table | None:
        if place in known:
            return known[place]
        found = await read_record(bucket, place, pb.Receipt)
        return None if found is None else unpack_table(place, found[0], chunk_count)

    tables = [
        t for t in await gather_each(table, places, at_once=_AT_ONCE) if t is not None
    ]
    return await offload(sum(len(sums) for sums, _ in tables), merge, tables)


def pack_table(sums: Sums, places: ChunkLocations) -> pb.Receipt:
    """Returns stored chunks as the message of a staging table or a receipt."""
    parts = pack_placed(sums, places, with_ordinals=True)
    return pb.Receipt(chunks=b"".join(part.SerializeToString() for part in parts))


def unpack_table(place: str, receipt: pb.Receipt, chunk_count: int) -> Table:
    """Returns the stored chunks of a staging table or a receipt."""
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
