"""Reuse: which chunks of an upload are stored already, by its base or predecessor.

A chunk is the same where the leaf has the same key, shape, dtype and grid, and the
chunk the same CRC-32C, digest and length, by what was written down of it. It is then
shared by reference: the new checkpoint names its place. Its bytes are not read: of data
files only the ends are looked at. A base or a predecessor that is damaged is none: a
save that can reuse nothing is a save all the same.

A claim is nothing that is kept: it is found again by whoever needs it, FinishWriter
and the commit alike, and only while the base's slot says that it still stands. The
upload's own reservation is older than that look, so a purge of the base sees it.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storesvc.catalog.slots import CHECKPOINTS, PURGING
from storesvc.errors import CorruptDataError, UploadNotFoundError
from storesvc.format.chunks import I64, Places, Sums, same_sums
from storesvc.format.layout import RunPlaces
from storesvc.format.names import RunName, UploadName
from storesvc.format.trees import Tree
from storesvc.save.staging_tables import Table, staged_places, tables_at
from storesvc.save.uploads import OpenUpload, Uploads
from storesvc.storage.bounded_gather import each
from storesvc.storage.tensorstore_bucket import KvBucket

MAX_VERSIONS: Final = 16
"""Of a chunk that one writer stored; others are as if they were not stored."""

_FILES_AT_ONCE: Final = 64
_LOOKS: Final = 50
_LOOK_SECONDS: Final = 0.1
"""Between looks at a base that is looked at for what uses it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """Stored chunks that an upload may claim, of each chunk of a tree one at most."""

    tree: Tree
    sums: Sums
    """Of the chunks that are stored, as the places: a tree may have millions of chunks
    of which a client stored one."""
    places: Places


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """What an upload claims of one source."""

    source: Source
    rows: I64
    """Rows of the sums that were asked about."""
    found: I64
    """Beside them, the rows of the source."""


class Reuse:
    """Finds what uploads may claim."""

    def __init__(self, bucket: KvBucket, uploads: Uploads) -> None:
        self._bucket = bucket
        self._uploads = uploads

    async def sources(self, upload: OpenUpload) -> list[Source]:
        """Returns what an upload may claim from: what its predecessor stored, one
        source for each writer, and its base, where that still stands."""
        found: list[Source] = []
        if upload.record.predecessor:
            name = UploadName(upload.name.run, upload.record.predecessor)
            found += await self._stored_by(name)
        if upload.record.base:
            found += await self._base(upload)
        return found

    async def _base(self, upload: OpenUpload) -> list[Source]:
        run, step = upload.name.run, upload.record.base_step
        try:
            for _ in range(_LOOKS):
                slot = await self._uploads.slot(run, step)
                if slot is None or slot.state != PURGING:
                    break
                await asyncio.sleep(_LOOK_SECONDS)  # it sees us, and leaves it
            if (
                slot is None
                or slot.state not in CHECKPOINTS - {PURGING}
                or slot.upload != upload.record.base
            ):
                return []
            manifest = await self._uploads.manifest(run, slot)
            whole = await self._whole_files(run, manifest.places)
        except CorruptDataError as e:
            _log.warning("%s@%d cannot be a base: %s", run, step, e)
            return []
        sums, places = manifest.sums, manifest.places
        if not whole.all():
            kept = np.flatnonzero(whole[places.file])
            sums, places = sums.take(kept), places.take(kept)
        return [Source(tree=manifest.tree, sums=sums, places=places)]

    async def _whole_files(self, run: RunName, places: Places) -> NDArray[np.bool_]:
        """For each data file of places, whether it is neither missing nor cut off."""
        ends = places.ends

        async def is_whole(number: int) -> bool:
            place, end = (
                RunPlaces(run).data_file(places.files[number]),
                int(ends[number]),
            )
            try:
                await self._bucket.read_range(place, end - 1, end)
            except CorruptDataError as e:
                _log.warning("%s: nothing can be claimed of a file: %s", run, e)
                return False
            return True

        numbers = np.flatnonzero(ends).tolist()
        whole = np.zeros(len(places.files), np.bool_)
        whole[numbers] = await each(is_whole, numbers, at_once=_FILES_AT_ONCE)
        return whole

    async def _stored_by(self, name: UploadName) -> list[Source]:
        """What the writers of an unfinished upload had stored."""
        try:
            record = await self._uploads.record(name)
            tree = await self._uploads.tree(name, record)
        except UploadNotFoundError:
            return []
        except CorruptDataError as e:
            _log.warning("%s: nothing can be claimed of it: %s", name, e)
            return []
        opened = OpenUpload(name, record, tree)
        by_writer = await staged_places(self._bucket, name)

        async def stored(writer: int) -> list[Source]:
            return await self._stored_at(opened, by_writer[writer])

        found = await each(stored, sorted(by_writer))
        return [source for sources in found for source in sources]

    async def stored(self, upload: OpenUpload, writer: int) -> list[Source]:
        """Returns what a writer stored; nothing where that is damaged, which has it
        sent again."""
        staging = upload.places.staging(upload.name.upload, writer)
        return await self._stored_at(upload, await self._bucket.list(staging))

    async def _stored_at(
        self, upload: OpenUpload, tables: Sequence[str]
    ) -> list[Source]:
        """Returns what the tables of one writer name; nothing where one is damaged."""
        try:
            table = await tables_at(
                self._bucket, tables, chunk_count=upload.tree.chunk_count
            )
        except CorruptDataError as e:
            _log.warning("%s: nothing can be claimed of a writer: %s", upload.name, e)
            return []
        return await self.sources_of(upload, table)

    async def sources_of(self, upload: OpenUpload, table: Table) -> list[Source]:
        """Returns the sources that stored chunks of an upload are."""
        sums, places = table
        whole = await self._whole_files(upload.name.run, places)
        kept = np.flatnonzero(whole[places.file])
        return await asyncio.to_thread(
            _sources, upload.tree, sums.take(kept), places.take(kept)
        )


def _sources(tree: Tree, sums: Sums, places: Places) -> list[Source]:
    """The sources that stored chunks are: as many as versions of one were stored."""
    rows = _distinct(sums)
    sums, places = sums.take(rows), places.take(rows)
    nth = np.arange(len(sums)) - np.searchsorted(sums.ordinal, sums.ordinal)
    found = []
    for n in range(min(int(nth.max(initial=-1)) + 1, MAX_VERSIONS)):
        rows = np.flatnonzero(nth == n)
        found.append(Source(tree=tree, sums=sums.take(rows), places=places.take(rows)))
    return found


def _distinct(sums: Sums) -> I64:
    """The rows of chunks, each version of each once; ascending by ordinal."""
    words = sums.digests.view(np.uint64).reshape(-1, 2)
    order = np.lexsort((words[:, 0], words[:, 1], sums.crc32c, sums.ordinal))
    columns = (sums.ordinal, sums.crc32c, words[:, 0], words[:, 1])
    differs = np.ones(len(order), np.bool_)
    differs[1:] = np.any(
        [column[order][1:] != column[order][:-1] for column in columns], axis=0
    )
    return order[differs]


def find_claims(tree: Tree, sums: Sums, sources: Sequence[Source]) -> list[Claims]:
    """Returns what each source has of the chunks that sums are of; each chunk is
    claimed of the first source that has it."""
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


def claimed_places(claims: Claims) -> Places:
    """Returns where the claimed chunks lie, in the order of the rows."""
    return claims.source.places.take(claims.found)


def _counterparts(tree: Tree, other: Tree, chunks: I64) -> I64:
    """For each of some chunks of a tree its ordinal in another, or -1."""
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
