"""Reuse: finds the chunks of an upload that its base or predecessor already stores.

The base is an earlier checkpoint of the run; the predecessor is an unfinished upload
whose step this upload took over.

Two chunks are equal if their leaves have the same key, shape, dtype and grid, and the
recorded CRC-32C, digest and length of the chunks agree. An equal chunk is shared by
reference: the new checkpoint names its location. The bytes are not read again; only the
last byte of each data file is, to detect a missing or truncated file. A damaged base or
predecessor is ignored, because a save can always send all of its chunks.

A receipt claims a chunk by naming it: a chunk that the writer stored itself, or one
that is reused. Claims are not stored. FinishWriter and the commit each compute them,
and only while the slot of the base shows that the base still exists. The upload
reserved its slot before this check, so a purge of the base sees the upload.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from cachetools import TTLCache
from numpy.typing import NDArray

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.slots import CHECKPOINTS, PURGING
from storesvc.concurrency import offload
from storesvc.errors import CorruptDataError, UploadNotFoundError
from storesvc.format.chunks import I64, ChunkLocations, Sums, same_sums
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.format.trees import Tree
from storesvc.save.staging_tables import FRESH_SECONDS, Table, tables_at
from storesvc.save.uploads import OpenUpload, Uploads
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import gather_each

MAX_VERSIONS: Final = 16
"""Maximum versions of one chunk of one writer that can be reused; more are ignored."""

_FILES_AT_ONCE: Final = 64
_MAX_BASES: Final = 64
_POLLS: Final = 50
_POLL_SECONDS: Final = 0.1
"""Delay between reads of the slot of a base that is being purged."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """Stored chunks that an upload may claim, at most one for each ordinal."""

    tree: Tree
    sums: Sums
    """Checksums of the stored chunks, one row each; not of all chunks of the tree,
    which may have millions."""
    places: ChunkLocations
    """Locations of the same chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Chunks that an upload claims from one source."""

    source: Source
    rows: I64
    """Rows of the upload's checksums."""
    found: I64
    """Rows of the source's checksums, in the same order."""


class FileEnd(NamedTuple):
    """A data file, relative to the pool, and the bytes that it must have."""

    file: str
    end: int


class Reuse:
    """Finds the stored chunks that uploads may claim."""

    def __init__(
        self, bucket: TensorStoreBucket, catalog: Catalog, uploads: Uploads
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._uploads = uploads
        self._whole: TTLCache[UploadName, NDArray[np.bool_]]
        self._whole = TTLCache(_MAX_BASES, FRESH_SECONDS)
        """For each data file of the base of an upload, whether it was intact a short
        time ago. A save looks chunks up, finishes and commits, and on a bucket it would
        make three requests for each file."""

    async def sources(self, upload: OpenUpload) -> list[Source]:
        """Returns the chunks that an upload may claim: the chunks of its
        predecessor, and the chunks of its base while the base exists."""
        found: list[Source] = []
        if upload.record.predecessor:
            name = UploadName(upload.name.run, upload.record.predecessor)
            found += await self._predecessor_sources(name)
        if upload.record.base:
            found += await self._base_sources(upload)
        return found

    async def _base_sources(self, upload: OpenUpload) -> list[Source]:
        run, step = upload.name.run, upload.record.base_step
        try:
            # The upload reserved its slot before this read, so a purge of the base that
            # is not seen here sees the upload. One that is seen spares the base: wait
            # for it to roll back.
            for _ in range(_POLLS):
                found = await self._catalog.slot(run, step)
                slot = found and found[0]
                if slot is None or slot.state != PURGING:
                    break
                await asyncio.sleep(_POLL_SECONDS)
            if (
                slot is None
                or slot.state not in CHECKPOINTS - {PURGING}
                or slot.upload != upload.record.base
            ):
                return []
            manifest = await self._catalog.manifest(run, slot)
            whole = self._whole.get(upload.name)
            if whole is None or self._bucket.has_files:
                whole = await self._whole_files(run, manifest.places)
                self._whole[upload.name] = whole
        except CorruptDataError as e:
            _log.warning("%s@%d is not used as a base: %s", run, step, e)
            return []
        sums, places = manifest.sums, manifest.places
        if not whole.all():
            kept = np.flatnonzero(whole[places.file])
            sums, places = sums.take(kept), places.take(kept)
        return [Source(tree=manifest.tree, sums=sums, places=places)]

    async def _whole_files(
        self,
        run: RunName,
        places: ChunkLocations,
        known: Mapping[FileEnd, bool] = MappingProxyType({}),
    ) -> NDArray[np.bool_]:
        """Returns for each data file whether it exists and is not truncated."""
        ends = places.ends
        numbers = np.flatnonzero(ends).tolist()
        needed = [
            FileEnd(places.files[number], int(ends[number])) for number in numbers
        ]
        left = [one for one in needed if one not in known]
        found = {**known, **await self._check_files(run, left)}
        whole = np.zeros(len(places.files), np.bool_)
        whole[numbers] = [found[one] for one in needed]
        return whole

    async def checked(
        self, run: RunName, tables: Iterable[Table]
    ) -> dict[FileEnd, bool]:
        """Returns for each data file of some staging tables whether it exists and is
        not truncated, for ``table_sources``."""
        return await self._check_files(run, file_ends(tables))

    async def _check_files(
        self, run: RunName, files: Sequence[FileEnd]
    ) -> dict[FileEnd, bool]:
        async def is_whole(one: FileEnd) -> bool:
            place = RunPaths(run).data_file(one.file)
            try:
                await self._bucket.read_range(place, one.end - 1, one.end)
            except CorruptDataError as e:
                _log.warning("%s: a data file is not reused: %s", run, e)
                return False
            return True

        found = await gather_each(is_whole, files, at_once=_FILES_AT_ONCE)
        return dict(zip(files, found, strict=True))

    async def _predecessor_sources(self, name: UploadName) -> list[Source]:
        """Returns the chunks that the writers of an unfinished upload had stored."""
        try:
            record = await self._uploads.record(name)
            tree = await self._uploads.tree(name, record)
        except UploadNotFoundError:
            return []
        except CorruptDataError as e:
            _log.warning("%s: its chunks are not reused: %s", name, e)
            return []
        opened = OpenUpload(name, record, tree)
        # One list call serves all writers: an upload may expect many writers, of which
        # few store anything.
        places, by_writer = opened.places, defaultdict[int, list[str]](list)
        for place in await self._bucket.list(places.staging_prefix(name.upload)):
            by_writer[places.parse_staged_writer(place)].append(place)

        async def list_stored(writer: int) -> list[Source]:
            return await self._sources_in(opened, by_writer[writer])

        found = await gather_each(list_stored, sorted(by_writer))
        return [source for sources in found for source in sources]

    async def writer_sources(self, upload: OpenUpload, writer: int) -> list[Source]:
        """Returns the chunks that a writer stored; nothing if a staging table is
        damaged, so that the writer sends its chunks again."""
        staging = upload.places.staging(upload.name.upload, writer)
        return await self._sources_in(upload, await self._bucket.list(staging))

    async def _sources_in(
        self, upload: OpenUpload, tables: Sequence[str]
    ) -> list[Source]:
        """Returns the chunks in staging tables of a writer; none if one is damaged."""
        try:
            table = await tables_at(
                self._bucket, tables, chunk_count=upload.tree.chunk_count
            )
        except CorruptDataError as e:
            _log.warning("%s: chunks of a writer are not reused: %s", upload.name, e)
            return []
        return await self.table_sources(upload, table)

    async def table_sources(
        self,
        upload: OpenUpload,
        table: Table,
        known: Mapping[FileEnd, bool] = MappingProxyType({}),
    ) -> list[Source]:
        """Returns the chunks of a staging table whose data files are intact."""
        sums, places = table
        whole = await self._whole_files(upload.name.run, places, known)
        kept = np.flatnonzero(whole[places.file])
        return await offload(
            len(sums), _sources, upload.tree, sums.take(kept), places.take(kept)
        )


def file_ends(tables: Iterable[Table]) -> list[FileEnd]:
    """Returns the data files of some staging tables."""
    ends: dict[str, int] = {}
    for _, places in tables:
        for file, end in zip(places.files, places.ends.tolist(), strict=True):
            ends[file] = max(end, ends.get(file, 0))
    return [FileEnd(*each) for each in ends.items()]


def _sources(tree: Tree, sums: Sums, places: ChunkLocations) -> list[Source]:
    """Returns stored chunks as sources: as many as the most versions of one chunk."""
    rows = _distinct(sums)
    sums, places = sums.take(rows), places.take(rows)
    nth = np.arange(len(sums)) - np.searchsorted(sums.ordinal, sums.ordinal)
    found = []
    for n in range(min(int(nth.max(initial=-1)) + 1, MAX_VERSIONS)):
        rows = np.flatnonzero(nth == n)
        found.append(Source(tree=tree, sums=sums.take(rows), places=places.take(rows)))
    return found


def _distinct(sums: Sums) -> I64:
    """Returns the rows of chunks without duplicate versions, ascending by ordinal."""
    words = sums.digests.view(np.uint64).reshape(-1, 2)
    order = np.lexsort((words[:, 0], words[:, 1], sums.crc32c, sums.ordinal))
    columns = (sums.ordinal, sums.crc32c, words[:, 0], words[:, 1])
    differs = np.ones(len(order), np.bool_)
    differs[1:] = np.any(
        [column[order][1:] != column[order][:-1] for column in columns], axis=0
    )
    return order[differs]


def find_claims(tree: Tree, sums: Sums, sources: Sequence[Source]) -> list[Claims]:
    """Returns the chunks that each source has; a chunk that several sources have is
    claimed from the first.

    Args:
        sources: Where to look, in order of preference.
    """
    left = np.ones(len(sums), np.bool_)
    found = []
    for source in sources:
        other = _counterparts(tree, source.tree, sums.ordinal)
        at = np.searchsorted(source.sums.ordinal, other)
        rows = np.flatnonzero(left & (at < len(source.sums)))
        rows = rows[source.sums.ordinal[at[rows]] == other[rows]]
        rows = rows[same_sums(sums.take(rows), source.sums, at[rows])]
        left[rows] = False
        found.append(Claims(source, rows, at[rows]))
    return found


def claimed_places(claims: Claims) -> ChunkLocations:
    """Returns the locations of claimed chunks, in the order of ``Claims.rows``."""
    return claims.source.places.take(claims.found)


def _counterparts(tree: Tree, other: Tree, chunks: I64) -> I64:
    """Returns the ordinals of chunks in another leaf table; -1: not in it."""
    if tree is other:
        return chunks
    rows, within = tree.locate_all(chunks)
    first = np.full(len(tree.leaves), -1, np.int64)
    for row in np.unique(rows).tolist():
        leaf = tree.leaves[row]
        there = other.by_key.get(leaf.key)
        if there is not None and leaf.is_cut_as(other.leaves[there]):
            first[row] = other.first_chunk[there]
    return np.where(first[rows] < 0, -1, first[rows] + within)
