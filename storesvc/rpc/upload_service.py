"""Rpcs of the upload service: they write checkpoints.

The parts of a table arrive in a stream, within a memory budget. A client may send them
as slowly as ``LEAST_BYTES_PER_SECOND``: while it sends, its stream holds only the bytes
that have arrived, of a budget from which the slowest streams are cut off. Only the work
after the last part holds the semaphore of the service.

The requests that carry chunks are parsed without a copy of the chunks' bytes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Final, Generic, TypeVar

from storesvc.auth import call as access
from storesvc.auth.call import require
from storesvc.auth.policy import Permission
from storesvc.catalog.records import timestamp
from storesvc.concurrency import FairSemaphore, offload
from storesvc.errors import InvalidFieldError, LimitExceededError, StalledError
from storesvc.format import wire
from storesvc.format.checksums import digest
from storesvc.format.names import MAX_STEP, CheckpointName, RunName, UploadName
from storesvc.format.wire import Frame
from storesvc.quota import Quotas
from storesvc.rpc import messages, requests, streams
from storesvc.rpc.methods import authorize
from storesvc.rpc.paging import list_page
from storesvc.rpc.requests import check_counts
from storesvc.rpc.status import CALL_SECONDS, Context, share_key
from storesvc.rpc.streams import (
    LEAST_BYTES_PER_SECOND,
    RETRY_SECONDS,
    MessageBudget,
    PartedRequest,
    Share,
    StreamTimeout,
    check_part,
    first,
    following,
    missing,
    release_messages,
    unexpected_part_error,
)
from storesvc.save.commit import WriterEnd
from storesvc.save.leaf_tables import (
    CHUNK_BYTES,
    LEAF_BYTES,
    LeafParts,
    SumParts,
    unpack_client_sums,
)
from storesvc.save.receipts import check_report
from storesvc.save.uploads import DEFAULT_LEASE, NewUpload, OpenUpload, WriterPlan
from storesvc.storage.requests import background_task
from storesvc.store import Store
from storesvc.telemetry.events import Stopwatch
from storesvc_proto.v1 import report_pb2, tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api

T = TypeVar("T", bound=PartedRequest)


class PartStream(Generic[T]):
    """The messages of one stream after its opening."""

    def __init__(self, stream: AsyncIterator[T], part: str) -> None:
        self._stream = stream
        self._part = part
        self._share: Share | None = None

    @asynccontextmanager
    async def sharing(
        self, budget: MessageBudget, context: Context
    ) -> AsyncIterator["PartStream[T]"]:
        """Accounts the bytes of ``keep`` to a budget while the context lasts."""
        with budget.share(share_key(context)) as self._share:
            async with release_messages(self._stream):
                yield self

    async def keep(self, size_bytes: int) -> None:
        """Adds bytes of the received messages to the budget.

        Raises:
            LimitExceededError: The budget has no memory for them.
        """
        assert self._share is not None
        await self._share.take(size_bytes)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yields the messages.

        Raises:
            LimitExceededError: A message has too many entries, or the client is slow
                while others wait for memory.
            InvalidFieldError: A message has another part.
            StalledError: The client is slower than permitted.
        """
        share = self._share
        assert share is not None
        clock = asyncio.get_running_loop().time
        while True:
            grace = streams.STALL_SECONDS + min(0.0, share.spare_seconds(clock()))
            try:
                async with share.awaiting_client(grace):
                    message = await anext(self._stream)
            except StopAsyncIteration:
                return
            except TimeoutError as e:
                if share.is_cut:
                    raise LimitExceededError(
                        f"the stream sent less than {LEAST_BYTES_PER_SECOND} bytes per "
                        "second while others waited for memory; send the table again",
                        retry_seconds=RETRY_SECONDS,
                    ) from e
                raise StalledError(
                    f"the stream sent nothing for {streams.STALL_SECONDS:.0f} s, or "
                    f"less than {LEAST_BYTES_PER_SECOND} bytes per second; send its "
                    "table in a new one"
                ) from e
            check_part(message, self._part)
            check_counts(message)
            share.count(message.ByteSize())
            yield message


MAX_WRITERS: Final = 65536
"""Maximum writers of an upload."""

MAX_LEASE: Final = timedelta(days=30)
"""Maximum lease of an upload."""

_FRAME_TAG: Final = wire.tag(upload_api.WriteChunksRequest.FRAME_FIELD_NUMBER)


def new_upload(run: RunName, upload: upload_api.Upload) -> NewUpload:
    """Returns the upload that BeginUpload describes."""
    if not 0 <= upload.step <= MAX_STEP:
        raise InvalidFieldError(f"upload.step: expected 0 or more, got {upload.step}")
    if not 1 <= upload.writer_count <= MAX_WRITERS:
        raise InvalidFieldError(
            f"upload.writer_count: expected 1 to {MAX_WRITERS}, got "
            f"{upload.writer_count}"
        )
    lease = requests.duration(
        "upload.lease_duration", upload.lease_duration, most=MAX_LEASE
    )
    requests.check_entries("upload.labels", upload.labels)
    requests.check_entries("upload.metrics", upload.metrics)
    return NewUpload(
        step=upload.step,
        writer_count=upload.writer_count,
        labels=dict(sorted(upload.labels.items())),
        metrics=dict(sorted(upload.metrics.items())),
        lease=lease or DEFAULT_LEASE,
        base=parse_base(run, upload.base),
        owner=requests.checked_owner("upload.owner", upload.owner),
        body=upload.SerializeToString(deterministic=True),
    )


def parse_base(run: RunName, base: str) -> CheckpointName | None:
    """Returns the base of an upload; None: it has none."""
    if not base:
        return None
    name = CheckpointName.from_resource(base)
    if name.run != run:
        raise InvalidFieldError(
            f"upload.base: expected a checkpoint of {run}, got {name}; bytes are not "
            "shared between runs"
        )
    return name


def upload_name(parent: str, request_id: str) -> UploadName:
    """Returns the name of the upload that a request id creates.

    Raises:
        InvalidFieldError: The id is not a UUID in its canonical form.
    """
    hex_id = requests.checked_request_id(request_id).replace("-", "")
    return UploadName(RunName.from_resource(parent), hex_id)


def new_small_upload(
    run: RunName, request: upload_api.CreateCheckpointRequest
) -> NewUpload:
    """Returns the upload that CreateCheckpoint describes."""
    new = new_upload(run, request.upload)
    if new.writer_count != 1 or new.base is not None:
        raise InvalidFieldError(
            "upload: expected one writer and no base, got "
            f"{new.writer_count} and {new.base or 'none'}; begin an upload for that"
        )
    return replace(new, body=new.body + digest(request.data))


def writer_report(
    opening: upload_api.FinishWriterRequest
    | upload_api.WriterEnd
    | upload_api.CreateCheckpointRequest,
) -> report_pb2.WriterReport | None:
    """Returns the report of a writer; None: it sent none.

    Raises:
        InvalidFieldError: A field is invalid; names it.
    """
    if not opening.HasField("report"):
        return None
    # What this release does not know is not kept either: the record of the checkpoint
    # would grow by it.
    opening.report.DiscardUnknownFields()
    requests.checked_owner("report.owner", opening.report.owner)
    check_report(opening.report)
    return opening.report


def parse_part(request: bytes) -> Frame | upload_api.WriteChunksRequest:
    """Returns the frame of a serialised WriteChunksRequest, or one without a frame.

    Raises:
        InvalidFieldError: The bytes are no such request.
    """
    found = wire.split(request, _FRAME_TAG)
    if found is not None:
        return found
    message = requests.parse_message(upload_api.WriteChunksRequest, request)
    if message.HasField("frame"):
        return Frame(message.frame, memoryview(message.frame.data))
    return message


async def read_opening(
    stream: AsyncIterator[Frame | upload_api.WriteChunksRequest],
) -> upload_api.WriterRef:
    """Returns the opening of a WriteChunks stream, its first message, once the
    permissions that it requires are checked.

    Raises:
        InvalidFieldError: There is none, or it has another part.
        PermissionDeniedError: The caller may not write the upload.
    """
    opening = await anext(stream, None)
    if opening is None:
        raise missing("open")
    if isinstance(opening, Frame):
        raise unexpected_part_error("open", "frame")
    check_part(opening, "open")
    await authorize("WriteChunks", opening)
    return opening.open


WORK_BYTES: Final = 384 << 20
"""Memory for tables that are unpacked or checked concurrently (an estimate)."""

TABLES_BYTES: Final = 160 << 20
"""Memory for the parts of tables that have arrived, over all streams."""

PEER_BYTES: Final = TABLES_BYTES - (16 << 20)
"""The part of it that one peer may use: the largest table fits, and leaves room for
tables of usual sizes."""

L = TypeVar("L", upload_api.BeginUploadRequest, upload_api.JoinUploadRequest)

_log = logging.getLogger(__name__)


class UploadService:
    """Writes checkpoints. WriteChunks receives serialised requests."""

    def __init__(self, store: Store, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas
        self._work = FairSemaphore(WORK_BYTES, purpose="checks tables")
        self._tables = MessageBudget(TABLES_BYTES, PEER_BYTES, purpose="tables")

    async def BeginUpload(
        self,
        request_iterator: AsyncIterator[upload_api.BeginUploadRequest],
        context: Context,
    ) -> upload_api.BeginUploadResponse:
        opening = await first(request_iterator, "upload")
        name = upload_name(opening.parent, opening.request_id)
        new = new_upload(name.run, opening.upload)
        parts, stream = LeafParts(name, opening.leaf_count), request_iterator
        async with self._leaf_table(parts, stream, context):
            table, digests = parts.join(), parts.digests
            record, _ = await self._store.uploads.begin(
                name, new, table, digests, reserve=partial(self._quotas.reserve, name)
            )
        upload = messages.upload_message(name, record)
        return upload_api.BeginUploadResponse(upload=upload)

    async def JoinUpload(
        self,
        request_iterator: AsyncIterator[upload_api.JoinUploadRequest],
        context: Context,
    ) -> upload_api.JoinUploadResponse:
        opening = await first(request_iterator, "open")
        join, name = opening.open, UploadName.from_resource(opening.open.upload)
        requests.check_writer("open.writer", join.writer, join.writer_count)
        parts, stream = LeafParts(name, opening.leaf_count), request_iterator
        async with self._leaf_table(parts, stream, context):
            record = await self._store.uploads.join(
                name,
                writer=join.writer,
                writer_count=join.writer_count,
                plan=WriterPlan(join.tree_digest, join.values_digest)
                if join.tree_digest
                else WriterPlan.whole(parts.join(), parts.digests),
            )
        upload = messages.upload_message(name, record)
        return upload_api.JoinUploadResponse(upload=upload)

    @asynccontextmanager
    async def _leaf_table(
        self, parts: LeafParts, stream: AsyncIterator[L], context: Context
    ) -> AsyncIterator[None]:
        """Receives the parts of a leaf table; permits work on it inside the context."""
        rows = PartStream(stream, "leaves")
        async with rows.sharing(self._tables, context):
            async for message in rows:
                await rows.keep(parts.add(message.leaves, message.leaf_digests))
            async with self._working(context, parts.weight_bytes):
                yield

    @asynccontextmanager
    async def _working(
        self, context: Context, weight_bytes: int
    ) -> AsyncIterator[None]:
        """Limits the memory and the time of the work on tables inside the context."""
        peer = share_key(context)
        async with (
            self._work.held(peer, weight=weight_bytes),
            asyncio.timeout(CALL_SECONDS),
        ):
            yield

    async def GetUpload(
        self, request: upload_api.GetUploadRequest, context: Context
    ) -> upload_api.GetUploadResponse:
        fate = await self._store.upload_statuses.get(
            UploadName.from_resource(request.name)
        )
        return upload_api.GetUploadResponse(upload=messages.fate_message(fate))

    async def ListUploads(
        self, request: upload_api.ListUploadsRequest, context: Context
    ) -> upload_api.ListUploadsResponse:
        runs, uploads = (
            await self._list_runs(request.parent),
            self._store.upload_statuses,
        )
        page = await list_page(
            request,
            f"{request.parent}/uploads",
            find=lambda last, limit: uploads.list_live(runs, after=last, limit=limit),
            parse=UploadName.from_resource,
            key=attrgetter("resource"),
            show=lambda _, fate: messages.fate_message(fate),
        )
        return upload_api.ListUploadsResponse(
            uploads=page.rows, damaged=page.damaged, next_page_token=page.token
        )

    async def _list_runs(self, parent: str) -> list[RunName]:
        """Returns the runs below a parent; a single run need not exist."""
        if "/runs/" in parent:
            return [RunName.from_resource(parent)]
        namespace = requests.parse_namespace(parent)
        runs = await self._store.catalog.run_names(namespace)
        return [run for run in runs if access.may(Permission.UPLOADS_GET, run)]

    async def KeepUploadAlive(
        self, request: upload_api.KeepUploadAliveRequest, context: Context
    ) -> upload_api.KeepUploadAliveResponse:
        name = UploadName.from_resource(request.name)
        upload = await self._store.uploads.open(name, request.epoch)
        until = await self._store.uploads.renew(upload)
        return upload_api.KeepUploadAliveResponse(expire_time=timestamp(until))

    async def FindChunks(
        self,
        request_iterator: AsyncIterator[upload_api.FindChunksRequest],
        context: Context,
    ) -> AsyncIterator[upload_api.FindChunksResponse]:
        opening = await first(request_iterator, "open")
        upload = await self._open(opening.open)
        parts = (
            await offload(
                len(message.chunks.crc32c), unpack_client_sums, message.chunks
            )
            async for message in following(request_iterator, "chunks")
        )
        found = self._store.receipts.find(upload, opening.open.writer, parts)
        async with release_messages(request_iterator), aclosing(found):
            async for ordinals in found:
                yield upload_api.FindChunksResponse(found=ordinals.tolist())

    async def WriteChunks(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[upload_api.WriteChunksResponse]:
        watch, timeout = Stopwatch(), StreamTimeout()
        arriving = timeout.limit(watch.waits("client", request_iterator))
        parts = (parse_part(each) async for each in arriving)
        opening = await read_opening(parts)
        upload = await self._open(opening)
        written = self._store.receiver.write(
            upload,
            opening.writer,
            self._admit_parts(upload, parts),
            watch,
            # A client without free buffers sends nothing until it gets an
            # acknowledgement, so it is not late while the server stores a batch.
            storing=timeout.renew,
            peer=share_key(context),
        )
        async with aclosing(arriving), aclosing(written):
            async for count in written:
                yield upload_api.WriteChunksResponse(durable_count=count)
        _log.info("WriteChunks %s@%d: %s", upload.name.run, upload.record.step, watch)

    async def _admit_parts(
        self,
        upload: OpenUpload,
        stream: AsyncIterator[Frame | upload_api.WriteChunksRequest],
    ) -> AsyncIterator[Frame | tree_pb2.ChunkTable]:
        """Yields the parts of the messages after the opening, once the quota admits
        their bytes.

        Raises:
            InvalidFieldError: A message has another part.
            PermissionDeniedError: The caller may not refer to data files of the run.
        """
        tree_bytes = int(upload.tree.lengths.sum())
        async for request in stream:
            part: Frame | tree_pb2.ChunkTable
            if isinstance(request, Frame):
                check_counts(request.columns)
                part, size = request, len(request.data)
            else:
                check_part(request, "frame", "placed")
                check_counts(request)
                require(Permission.UPLOADS_PLACE, upload.name.run)
                part, size = request.placed, sum(request.placed.length)
            await self._quotas.send(upload.name, size, tree_bytes)
            yield part

    async def FinishWriter(
        self,
        request_iterator: AsyncIterator[upload_api.FinishWriterRequest],
        context: Context,
    ) -> upload_api.FinishWriterResponse:
        opening = await first(request_iterator, "open")
        ref, receipts = opening.open, self._store.receipts
        name, writer = UploadName.from_resource(ref.upload), ref.writer
        # The list takes as long as the read of the slot, and needs nothing of it.
        async with (
            background_task(
                receipts.staged(name, writer, chunk_count=opening.chunk_count)
            ) as staged,
            self._store.uploads.opened(name, ref.epoch) as upload,
        ):
            requests.check_writer("open.writer", writer, upload.record.writer_count)
            parts = SumParts(upload.tree, opening.chunk_count)
            async with self._receipt(parts, request_iterator, context):
                sums = await offload(opening.chunk_count, parts.join)
                places = await receipts.finish(
                    upload, writer, sums, staged, writer_report(opening)
                )
                return upload_api.FinishWriterResponse(
                    chunk_count=len(sums),
                    stored_bytes=int(places.length.sum()),
                    unfinished_writer_count=-1
                    if opening.skip_unfinished_count
                    else await self._unfinished_count(upload),
                )

    @asynccontextmanager
    async def _receipt(
        self,
        parts: SumParts,
        stream: AsyncIterator[upload_api.FinishWriterRequest],
        context: Context,
    ) -> AsyncIterator[None]:
        """Receives the parts of a receipt; permits work on it inside the context."""
        rows = PartStream(stream, "chunks")
        async with rows.sharing(self._tables, context):
            async for message in rows:
                part = message.chunks
                await rows.keep(await offload(len(part.crc32c), parts.add, part))
            async with self._working(context, parts.weight_bytes):
                yield

    async def _unfinished_count(self, upload: OpenUpload) -> int:
        """Returns the number of unfinished writers, after one has finished."""
        count = upload.record.writer_count
        if count == 1:
            return 0
        return count - len(await self._store.receipts.finished_writers(upload.name))

    async def CommitUpload(
        self, request: upload_api.CommitUploadRequest, context: Context
    ) -> upload_api.CommitUploadResponse:
        name, watch = UploadName.from_resource(request.name), Stopwatch()
        async with self._ending(name, request, context) as end:
            record = await self._store.commits.commit(name, request.epoch, end)
        if call := access.current.get():
            call.detail["step"] = str(record.step)
        watch.size_bytes = record.stored_bytes
        _log.info("CommitUpload %s@%d: %s", name.run, record.step, watch)
        checkpoint = messages.checkpoint_message(name.run, record)
        return upload_api.CommitUploadResponse(checkpoint=checkpoint)

    @asynccontextmanager
    async def _ending(
        self,
        name: UploadName,
        request: upload_api.CommitUploadRequest,
        context: Context,
    ) -> AsyncIterator[WriterEnd | None]:
        """Yields what the only writer of an upload declares, and permits work on it
        inside the context; None: the writers finish by themselves."""
        if not request.HasField("end"):
            yield None
            return
        chunks = request.end.chunks
        weight_bytes = CHUNK_BYTES * len(chunks.crc32c) + request.ByteSize()
        async with self._working(context, weight_bytes):
            yield WriterEnd(
                sums=await offload(len(chunks.crc32c), unpack_client_sums, chunks),
                placed=request.end.placed,
                report=writer_report(request.end),
                reserve=partial(self._quotas.send, name),
            )

    async def CreateCheckpoint(
        self, request: upload_api.CreateCheckpointRequest, context: Context
    ) -> upload_api.CreateCheckpointResponse:
        name, watch = upload_name(request.parent, request.request_id), Stopwatch()
        new, table = new_small_upload(name.run, request), request.leaves
        weight_bytes = LEAF_BYTES * len(table.key) + 3 * request.ByteSize()
        async with self._working(context, weight_bytes):
            record = await self._store.commits.create(
                name,
                new,
                table.SerializeToString(deterministic=True),
                request.data,
                reserve=lambda size: self._quotas.send(name, size, size),
                report=writer_report(request),
            )
        watch.size_bytes = record.stored_bytes
        _log.info("CreateCheckpoint %s@%d: %s", name.run, record.step, watch)
        checkpoint = messages.checkpoint_message(name.run, record)
        return upload_api.CreateCheckpointResponse(checkpoint=checkpoint)

    async def AbortUpload(
        self, request: upload_api.AbortUploadRequest, context: Context
    ) -> upload_api.AbortUploadResponse:
        await self._store.uploads.abort(UploadName.from_resource(request.name))
        return upload_api.AbortUploadResponse()

    async def _open(self, ref: upload_api.WriterRef) -> OpenUpload:
        """Returns the open upload of a writer; rejects an invalid writer index."""
        upload = await self._store.uploads.open_recent(
            UploadName.from_resource(ref.upload), ref.epoch
        )
        requests.check_writer("open.writer", ref.writer, upload.record.writer_count)
        return upload
