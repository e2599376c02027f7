"""Receipts: what a writer reports when it finishes, compared with what is stored.

A receipt lists the chunks of one writer with their checksums and locations. It is
written only if every chunk is stored, by the writer itself or by a source that the
upload may claim from; the commit is decided from the receipts alone. `UploadStatuses`
reads from them what became of an upload.

A receipt has the report of its writer. The record of a checkpoint is read with each
list, so it keeps the reports of the few writers that took longest: the others waited
for them.
"""

import asyncio
import math
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog, rows
from storesvc.catalog.records import read_record
from storesvc.concurrency import offload
from storesvc.errors import (
    ChunksIncompleteError,
    CorruptDataError,
    InvalidChunkError,
    InvalidFieldError,
    StorageUnavailableError,
    UploadNotFoundError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format.chunks import I64, ChunkLocations, Sums, merge
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.format.seal import seal
from storesvc.save.reuse import (
    Claims,
    FileEnd,
    Reuse,
    claimed_places,
    file_ends,
    find_claims,
)
from storesvc.save.staging_tables import (
    OwnTables,
    Table,
    pack_table,
    tables_at,
    unpack_table,
)
from storesvc.save.uploads import OpenUpload, Uploads
from storesvc.storage.bucket import Bucket
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import AT_ONCE, gather_each
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import report_pb2

FEW_WRITERS: Final = 8
"""Writers whose receipts are read without a list, which takes as long as they do."""


class Receipt(NamedTuple):
    """The end of a writer."""

    table: Table
    """Its chunks."""
    report: list[report_pb2.WriterReport]
    """Its measurements; empty: it sent none."""


class Staged(NamedTuple):
    """The staging tables of a writer."""

    paths: list[str]
    """Paths of the tables in the bucket."""
    known: Mapping[str, Table]
    """Tables by path that this process wrote."""
    files: Mapping[FileEnd, bool]
    """For each data file of these, whether it exists and is not truncated."""
    is_all: bool
    """False if the bucket was not asked for tables that this process did not write."""


@dataclass(eq=False, repr=False)
class Receipts:
    """Checks, writes and reads the receipts of the writers of uploads."""

    bucket: TensorStoreBucket
    uploads: Uploads
    reuse: Reuse
    tables: OwnTables

    async def finish(
        self,
        upload: OpenUpload,
        writer: int,
        sums: Sums,
        staged: Awaitable[Staged],
        report: report_pb2.WriterReport | None = None,
    ) -> ChunkLocations:
        """Writes the receipt of a writer, and returns the locations of its chunks.

        Args:
            sums: Checksums of all chunks of the writer, ascending by ordinal.
            staged: Returns its staging tables, from ``staged``.
            report: What the writer measured; None: nothing.

        Raises:
            InvalidChunkError: The receipt names a chunk that is not in the leaf
                table, has another checksum than the stored chunk, or omits a chunk.
            ChunksIncompleteError: A chunk is not stored.
            UploadNotFoundError: The upload ended in the meantime.
            UploadSupersededError: The upload lost its step in the meantime.
        """
        try:
            return await self._finish(upload, writer, sums, staged, report)
        except (CorruptDataError, StorageUnavailableError):
            # An object may be missing because the upload has ended: report that then.
            await self.uploads.open(upload.name, upload.record.epoch)
            raise

    async def _finish(
        self,
        upload: OpenUpload,
        writer: int,
        sums: Sums,
        staged: Awaitable[Staged],
        report: report_pb2.WriterReport | None,
    ) -> ChunkLocations:
        places = await self.locate(upload, writer, sums, await staged)
        # Write the receipt only now: it states that all of its chunks are stored, and
        # the commit reads the receipts, not the staging tables.
        receipt = await offload(upload.tree.chunk_count, pack_table, sums, places)
        if report is not None:
            receipt.report.CopyFrom(report)
            receipt.report.writer = writer
        await reach(Failpoint.FINISH_BEFORE_RECEIPT)
        place = upload.places.receipt(upload.name.upload, writer)
        await self.bucket.write(place, seal(receipt, place=place))
        await self.uploads.renew(upload)
        await reach(Failpoint.FINISH_BEFORE_REPLY)
        return places

    async def locate(
        self,
        upload: OpenUpload,
        writer: int,
        sums: Sums,
        tables: Staged,
        placed: Table | None = None,
    ) -> ChunkLocations:
        """Returns the locations of all chunks of a writer, which are stored; arguments
        and errors as of ``finish``, and durable chunks that no staging table has."""
        # What the writer stored itself is claimed as its staging tables list it: they
        # name durable chunks only.
        _check_ordinals(upload, sums)
        # Threads: 100,000 chunks take longer than a health check may wait.
        count = upload.tree.chunk_count
        own, claims = await self._claims(upload, sums, tables, placed)
        if not tables.is_all and len(_find_unclaimed(sums, claims)):
            # Other servers may have written tables of this writer.
            tables = await self._all_staged(upload.name, writer)
            own, claims = await self._claims(upload, sums, tables, placed)
        stored = await offload(count, _stored_by_writer, upload, writer, sums, own)
        return await offload(count, _find_places, upload, sums, claims, stored)

    async def _claims(
        self, upload: OpenUpload, sums: Sums, tables: Staged, placed: Table | None
    ) -> tuple[Table, list[Claims]]:
        """Returns what a writer stored, and the chunks of its receipt in there. It
        claims the rest from the base and the predecessor, which are only read if the
        writer did not store everything itself."""
        count = upload.tree.chunk_count
        own = await tables_at(
            self.bucket, tables.paths, chunk_count=count, known=tables.known
        )
        files = dict(tables.files)
        if placed is not None:
            own = await offload(count, merge, [own, placed])
            files |= dict.fromkeys(file_ends([placed]), True)
        sources = await self.reuse.table_sources(upload, own, files)
        claims = await offload(count, find_claims, upload.tree, sums, sources)
        left = _find_unclaimed(sums, claims)
        if len(left):
            others = await self.reuse.sources(upload)
            more = await offload(
                count, find_claims, upload.tree, sums.take(left), others
            )
            claims += [Claims(c.source, left[c.rows], c.found) for c in more]
        return own, claims

    async def staged(
        self, name: UploadName, writer: int, *, chunk_count: int
    ) -> Staged:
        """Returns the staging tables of a writer of some chunks in them, for
        ``finish``.

        On a bucket, the tables that this process wrote a moment ago come without a
        request: usually they are all. A writer without chunks needs none.
        """
        prefix = RunPaths(name.run).staging(name.upload, writer)
        known = self.tables.below(prefix)
        is_known = self.tables.are_fresh(prefix) if known else not chunk_count
        if self.bucket.has_files or not is_known:
            return await self._all_staged(name, writer)
        files = dict.fromkeys(file_ends(known.values()), True)
        return Staged(list(known), known, files, is_all=False)

    async def _all_staged(self, name: UploadName, writer: int) -> Staged:
        """Lists the staging tables of a writer, and checks files of this process."""
        prefix = RunPaths(name.run).staging(name.upload, writer)
        known = self.tables.below(prefix)
        paths, files = await asyncio.gather(
            self.bucket.list(prefix), self.reuse.checked(name.run, known.values())
        )
        return Staged(paths, known, files, is_all=True)

    async def find(
        self, upload: OpenUpload, writer: int, parts: AsyncIterator[Sums]
    ) -> AsyncGenerator[I64]:
        """Yields, for each part, the ordinals of the chunks that need not be sent."""
        own, others = await asyncio.gather(
            self.reuse.writer_sources(upload, writer), self.reuse.sources(upload)
        )
        sources = [*own, *others]
        async for sums in parts:
            _check_ordinals(upload, sums)
            claims = await offload(
                upload.tree.chunk_count, find_claims, upload.tree, sums, sources
            )
            rows = np.concatenate([np.empty(0, np.int64), *(c.rows for c in claims)])
            yield sums.ordinal[np.sort(rows)]

    async def finished_writers(self, name: UploadName) -> frozenset[int]:
        places = RunPaths(name.run)
        receipts = await self.bucket.list(places.receipts(name.upload))
        return frozenset(map(places.parse_writer, receipts))

    async def read(self, upload: OpenUpload) -> dict[int, Receipt]:
        """Returns the receipts of an upload, by writer.

        Raises:
            CorruptDataError: A receipt is damaged.
        """

        async def receipt(writer: int) -> Receipt | None:
            place = upload.places.receipt(upload.name.upload, writer)
            found = await read_record(self.bucket, place, pb.Receipt)
            if found is None:
                return None
            table = unpack_table(place, found[0], upload.tree.chunk_count)
            reports = [found[0].report] if found[0].HasField("report") else []
            return Receipt(table, reports)

        # Of many writers, few may have finished: a list first finds them.
        writers: Sequence[int] = range(upload.record.writer_count)
        if len(writers) > FEW_WRITERS:
            writers = sorted(await self.finished_writers(upload.name))
        read = zip(writers, await gather_each(receipt, writers), strict=True)
        return {writer: stored for writer, stored in read if stored is not None}


def _check_ordinals(upload: OpenUpload, sums: Sums) -> None:
    """Rejects checksums of chunks that are not in the leaf table."""
    if len(sums) and sums.ordinal[-1] >= upload.tree.chunk_count:
        raise InvalidChunkError(
            f"{upload.name}: the tree has {upload.tree.chunk_count} chunks, got sums "
            f"of chunk {sums.ordinal[-1]}"
        )


def _stored_by_writer(
    upload: OpenUpload, writer: int, sums: Sums, own: Table
) -> NDArray[np.bool_]:
    """Returns for each ordinal whether the writer stored that chunk, in any version."""
    stored = np.zeros(upload.tree.chunk_count, np.bool_)
    stored[own[0].ordinal] = True
    if np.count_nonzero(stored) > np.count_nonzero(stored[sums.ordinal]):
        raise InvalidChunkError(
            f"{upload.name}: writer {writer} stored {np.count_nonzero(stored)} chunks, "
            f"got a receipt for {len(sums)}; finish with all of them"
        )
    return stored


def _find_unclaimed(sums: Sums, claims: Sequence[Claims]) -> I64:
    """Returns the rows of a receipt that no source has."""
    left = np.ones(len(sums), np.bool_)
    for one in claims:
        left[one.rows] = False
    return np.flatnonzero(left)


def _find_places(
    upload: OpenUpload, sums: Sums, claims: Sequence[Claims], stored: NDArray[np.bool_]
) -> ChunkLocations:
    """Returns the locations of the chunks of a receipt, all of which are stored."""
    left = sums.ordinal[_find_unclaimed(sums, claims)]
    others, missing = left[stored[left]].tolist(), left.tolist()
    if others:
        raise InvalidChunkError(
            f"{upload.tree.describe_chunk(others[0])}: expected the bytes that the "
            "receipt describes, but others are stored; send it again, then finish"
        )
    if missing:
        shown = ", ".join(map(upload.tree.describe_chunk, missing[:5]))
        raise ChunksIncompleteError(
            f"{upload.name}: {len(missing)} chunks of the receipt are not stored "
            f"({shown}); send them, then finish again",
            missing=str(len(missing)),
        )
    return merge([(sums.take(c.rows), claimed_places(c)) for c in claims])[1]


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """An upload, its lease and its progress."""

    name: UploadName
    record: pb.UploadRecord
    slot: pb.CheckpointRecord | None
    """The slot, while this upload owns it."""
    renew_time: Timestamp
    """Time of the last renewal of the lease."""
    finished_writers: frozenset[int]


@dataclass(eq=False, repr=False)
class UploadStatuses:
    """Reads the status of uploads."""

    bucket: Bucket
    catalog: Catalog
    uploads: Uploads
    receipts: Receipts

    async def get(self, name: UploadName) -> UploadStatus:
        """Returns the status of an upload, live or ended."""
        record = await self.uploads.record(name)
        found = await self.catalog.slot(name.run, record.step)
        slot = found and found[0]
        lease = await read_record(
            self.bucket, RunPaths(name.run).lease(name.upload), pb.LeaseRecord
        )
        return UploadStatus(
            name,
            record,
            slot if slot and slots.owns(name, record, slot) else None,
            renew_time=lease[0].renew_time if lease else record.create_time,
            finished_writers=await self.receipts.finished_writers(name),
        )

    async def list_live(
        self, runs: Sequence[RunName], *, after: UploadName | None, limit: int
    ) -> list[tuple[UploadName, UploadStatus | CorruptDataError]]:
        """Returns the live uploads of runs by run and id, with the error for each one
        whose records are damaged."""
        found: list[tuple[UploadName, UploadStatus | CorruptDataError]] = []
        left = [run for run in runs if after is None or run >= after.run]
        while left and len(found) < limit:
            batch, left = left[:AT_ONCE], left[AT_ONCE:]
            begun = await gather_each(self.catalog.begun_uploads, batch)
            names = [
                name
                for run, ids in zip(batch, begun, strict=True)
                for name in (UploadName(run, id_) for id_ in ids)
                if after is None or name > after
            ]
            found += await rows(self._live, names, limit=limit - len(found))
        return found

    async def _live(self, name: UploadName) -> UploadStatus | None:
        try:
            status = await self.get(name)
        except UploadNotFoundError:  # collected in the meantime
            return None
        is_live = status.slot and status.slot.state == slots.UPLOADING
        return status if is_live else None


MAX_PHASES: Final = 32
MAX_WRITERS: Final = 16
"""Maximum reports in the record of a checkpoint."""

_NAME: Final = re.compile(r"[a-z ]{1,32}")


def check_report(report: report_pb2.WriterReport) -> None:
    if len(report.phases) > MAX_PHASES:
        raise InvalidFieldError(
            f"report.phases: expected at most {MAX_PHASES}, got {len(report.phases)}"
        )
    if not 0 <= report.sent_bytes <= report.total_bytes:
        raise InvalidFieldError(
            f"report.sent_bytes: expected 0 to {report.total_bytes}, which is "
            f"report.total_bytes, got {report.sent_bytes}"
        )
    try:
        report.start_time.ToDatetime()
    except ValueError as e:
        raise InvalidFieldError(
            f"report.start_time: expected a time of the years 1 to 9999, got "
            f"{report.start_time.seconds} s since 1970"
        ) from e
    _check_seconds("report.seconds", report.seconds)
    for at, phase in enumerate(report.phases):
        place = f"report.phases[{at}]"
        if not _NAME.fullmatch(phase.name):
            raise InvalidFieldError(
                f"{place}.name: expected 1 to 32 lower-case letters and spaces, got "
                f"{phase.name[:40]!r}"
            )
        _check_seconds(f"{place}.start_seconds", phase.start_seconds)
        _check_seconds(f"{place}.end_seconds", phase.end_seconds)
        _check_seconds(f"{place}.busy_seconds", phase.busy_seconds)
        if phase.end_seconds < phase.start_seconds:
            raise InvalidFieldError(
                f"{place}.end_seconds: expected {phase.start_seconds:g} or more, got "
                f"{phase.end_seconds:g}"
            )


def longest(
    reports: Iterable[report_pb2.WriterReport],
) -> list[report_pb2.WriterReport]:
    """Returns the reports that a record keeps, ascending by writer."""
    by_seconds = sorted(reports, key=lambda report: (-report.seconds, report.writer))
    return sorted(by_seconds[:MAX_WRITERS], key=lambda report: report.writer)


def _check_seconds(place: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidFieldError(f"{place}: expected 0 or more, got {seconds:g}")
