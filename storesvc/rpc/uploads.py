"""Calls that write checkpoints."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Final

from storesvc.call_timer import Stopwatch
from storesvc.catalog.records import timestamp
from storesvc.errors import InvalidFieldError
from storesvc.fair_semaphore import FairSemaphore
from storesvc.format.names import MAX_STEP, CheckpointName, RunName, UploadName
from storesvc.format.wire import Frame
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import (
    CALL_SECONDS,
    Context,
    Patience,
    check_part,
    first,
    following,
    host_of,
    missing,
    refusals,
    released,
    unexpected,
)
from storesvc.rpc.message_budget import MemoryBudget
from storesvc.rpc.paging import page
from storesvc.rpc.request_limits import check_counts
from storesvc.rpc.table_streams import PartStream
from storesvc.rpc.upload_requests import part_of
from storesvc.save.table_parts import LeafParts, SumParts, unpacked
from storesvc.save.uploads import DEFAULT_LEASE, NewUpload, OpenUpload
from storesvc.store import Store
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api

WORK_BYTES: Final = 384 << 20
"""What the tables that are unpacked or checked at once take in memory, about."""

TABLES_BYTES: Final = 160 << 20
"""Of the parts of tables that have come, of all streams."""

PEER_BYTES: Final = TABLES_BYTES - (16 << 20)
"""Of those of one peer: the largest table fits, and leaves room for usual ones."""

MAX_WRITERS: Final = 65536
MAX_LEASE: Final = timedelta(days=30)

_log = logging.getLogger(__name__)


class UploadService:
    """Writes checkpoints; the requests that carry chunks are serialised still."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._work = FairSemaphore(WORK_BYTES, purpose="checks tables")
        self._tables = MemoryBudget(TABLES_BYTES, PEER_BYTES, purpose="tables")

    @asynccontextmanager
    async def _worked(self, context: Context, weight_bytes: int) -> AsyncIterator[None]:
        """Bounds what the work on tables takes: memory, and time."""
        peer = host_of(context.peer())
        async with (
            self._work.held(peer, weight=weight_bytes),
            asyncio.timeout(CALL_SECONDS),
        ):
            yield

    async def BeginUpload(
        self,
        request_iterator: AsyncIterator[upload_api.BeginUploadRequest],
        context: Context,
    ) -> upload_api.BeginUploadResponse:
        async with refusals(context):
            opening = await first(request_iterator, "upload")
            name = upload_name(opening.parent, opening.request_id)
            new = new_upload(name.run, opening.upload)
            parts = LeafParts(name, opening.leaf_count)
            stream = PartStream(request_iterator, "leaves")
            async with stream.sharing(self._tables, context):
                async for message in stream:
                    await stream.keep(parts.add(message.leaves, message.leaf_digests))
                async with self._worked(context, parts.weight_bytes):
                    record = await self._store.uploads.begin(
                        name, new, parts.joined(), parts.digests
                    )
            return upload_api.BeginUploadResponse(
                upload=messages.upload_message(name, record)
            )
        raise AssertionError

    async def JoinUpload(
        self,
        request_iterator: AsyncIterator[upload_api.JoinUploadRequest],
        context: Context,
    ) -> upload_api.JoinUploadResponse:
        async with refusals(context):
            opening = await first(request_iterator, "open")
            join = opening.open
            name = UploadName.from_resource(join.upload)
            requests.check_writer("open.writer", join.writer, join.writer_count)
            parts = LeafParts(name, opening.leaf_count)
            stream = PartStream(request_iterator, "leaves")
            async with stream.sharing(self._tables, context):
                async for message in stream:
                    await stream.keep(parts.add(message.leaves, message.leaf_digests))
                async with self._worked(context, parts.weight_bytes):
                    record = await self._store.uploads.join(
                        name,
                        writer=join.writer,
                        writer_count=join.writer_count,
                        table=parts.joined(),
                        digests=parts.digests,
                    )
            return upload_api.JoinUploadResponse(
                upload=messages.upload_message(name, record)
            )
        raise AssertionError

    async def GetUpload(
        self, request: upload_api.GetUploadRequest, context: Context
    ) -> upload_api.GetUploadResponse:
        async with refusals(context):
            name = UploadName.from_resource(request.name)
            fate = await self._store.upload_statuses.get(name)
            return upload_api.GetUploadResponse(upload=messages.fate_message(fate))
        raise AssertionError

    async def ListUploads(
        self, request: upload_api.ListUploadsRequest, context: Context
    ) -> upload_api.ListUploadsResponse:
        async with refusals(context):
            runs = await self._runs_of(request.parent)
            size = requests.page_size(request.page_size)
            listed = f"{request.parent}/uploads"
            last = requests.last_of_page(
                listed, request.page_token, UploadName.from_resource
            )
            found = await self._store.upload_statuses.list_live(
                runs, after=last, limit=size + 1
            )
            made = page(
                listed,
                found,
                size=size,
                key=attrgetter("resource"),
                show=lambda _, fate: messages.fate_message(fate),
            )
            return upload_api.ListUploadsResponse(
                uploads=made.rows, damaged=made.damaged, next_page_token=made.token
            )
        raise AssertionError

    async def _runs_of(self, parent: str) -> list[RunName]:
        """The runs below a parent; a run that there may not be is one, too."""
        if "/runs/" in parent:
            return [RunName.from_resource(parent)]
        return await self._store.catalogue.run_names(requests.namespace_of(parent))

    async def KeepUploadAlive(
        self, request: upload_api.KeepUploadAliveRequest, context: Context
    ) -> upload_api.KeepUploadAliveResponse:
        async with refusals(context):
            name = UploadName.from_resource(request.name)
            upload = await self._store.uploads.open(name, request.epoch)
            until = await self._store.uploads.renew(upload)
            return upload_api.KeepUploadAliveResponse(expire_time=timestamp(until))
        raise AssertionError

    async def FindChunks(
        self,
        request_iterator: AsyncIterator[upload_api.FindChunksRequest],
        context: Context,
    ) -> AsyncIterator[upload_api.FindChunksResponse]:
        async with refusals(context):
            opening = await first(request_iterator, "open")
            upload = await self._open(opening.open)
            parts = (
                await asyncio.to_thread(unpacked, message.chunks)
                async for message in following(request_iterator, "chunks")
            )
            found = self._store.receipts.find(upload, opening.open.writer, parts)
            async with released(request_iterator), aclosing(found):
                async for ordinals in found:
                    yield upload_api.FindChunksResponse(found=ordinals.tolist())

    async def WriteChunks(
        self,
        request_iterator: AsyncIterator[bytes],
        context: Context,
    ) -> AsyncIterator[upload_api.WriteChunksResponse]:
        async with refusals(context):
            watch, patience = Stopwatch(), Patience()
            coming = watch.waits("client", request_iterator)
            arriving = (part_of(each) async for each in patience.with_each(coming))
            opening = await anext(arriving, None)
            if opening is None:
                raise missing("open")
            if isinstance(opening, Frame):
                raise unexpected("open", "frame")
            check_part(opening, "open")
            upload = await self._open(opening.open)
            written = self._store.receiver.write(
                upload,
                opening.open.writer,
                _stored_parts(arriving),
                watch,
                # a client without free memory sends nothing before it is acknowledged
                storing=patience.renew,
                peer=host_of(context.peer()),
            )
            async with aclosing(written):
                async for count in written:
                    yield upload_api.WriteChunksResponse(durable_count=count)
            _log.info(
                "WriteChunks %s@%d: %s", upload.name.run, upload.record.step, watch
            )

    async def FinishWriter(
        self,
        request_iterator: AsyncIterator[upload_api.FinishWriterRequest],
        context: Context,
    ) -> upload_api.FinishWriterResponse:
        async with refusals(context):
            opening = await first(request_iterator, "open")
            upload = await self._open(opening.open)
            parts = SumParts(upload.tree, opening.chunk_count)
            stream = PartStream(request_iterator, "chunks")
            async with stream.sharing(self._tables, context):
                async for message in stream:
                    kept = await asyncio.to_thread(parts.add, message.chunks)
                    await stream.keep(kept)
                async with self._worked(context, parts.weight_bytes):
                    sums = await asyncio.to_thread(parts.joined)
                    places = await self._store.receipts.finish(
                        upload, opening.open.writer, sums
                    )
                    left = await self._unfinished_count(upload)
            return upload_api.FinishWriterResponse(
                chunk_count=len(sums),
                stored_bytes=int(places.length.sum()),
                unfinished_writer_count=left,
            )
        raise AssertionError

    async def _unfinished_count(self, upload: OpenUpload) -> int:
        """How many writers have not finished, for one that has."""
        count = upload.record.writer_count
        if count == 1:
            return 0
        return count - len(await self._store.receipts.finished_writers(upload.name))

    async def CommitUpload(
        self, request: upload_api.CommitUploadRequest, context: Context
    ) -> upload_api.CommitUploadResponse:
        async with refusals(context):
            name, watch = UploadName.from_resource(request.name), Stopwatch()
            record = await self._store.commits.commit(name, request.epoch)
            self._store.recent.add(name.run)
            watch.size_bytes = record.stored_bytes
            _log.info("CommitUpload %s@%d: %s", name.run, record.step, watch)
            return upload_api.CommitUploadResponse(
                checkpoint=messages.checkpoint_message(name.run, record)
            )
        raise AssertionError

    async def AbortUpload(
        self, request: upload_api.AbortUploadRequest, context: Context
    ) -> upload_api.AbortUploadResponse:
        async with refusals(context):
            await self._store.uploads.abort(UploadName.from_resource(request.name))
            return upload_api.AbortUploadResponse()
        raise AssertionError

    async def _open(self, ref: upload_api.WriterRef) -> OpenUpload:
        upload = await self._store.uploads.open(
            UploadName.from_resource(ref.upload), ref.epoch
        )
        requests.check_writer("open.writer", ref.writer, upload.record.writer_count)
        return upload


def new_upload(run: RunName, upload: upload_api.Upload) -> NewUpload:
    """Returns what BeginUpload asks for.

    Raises:
        InvalidFieldError: Naming the field.
    """
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
        base=base_of(run, upload.base),
        owner=requests.checked_owner("upload.owner", upload.owner),
        body=upload.SerializeToString(deterministic=True),
    )


def base_of(run: RunName, base: str) -> CheckpointName | None:
    """Returns the checkpoint whose chunks an upload may claim.

    Raises:
        InvalidFieldError: It is of another run.
    """
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
    """Returns the name of the upload that a request id stands for.

    Raises:
        InvalidFieldError: The id is not a UUID in its usual form.
    """
    hex_id = requests.checked_request_id(request_id).replace("-", "")
    return UploadName(RunName.from_resource(parent), hex_id)


async def _stored_parts(
    arriving: AsyncIterator[Frame | upload_api.WriteChunksRequest],
) -> AsyncIterator[Frame | tree_pb2.ChunkTable]:
    """What the following messages of a stream bring."""
    async for request in arriving:
        if isinstance(request, Frame):
            check_counts(request.columns)
            yield request
        else:
            check_part(request, "frame", "placed")
            check_counts(request)
            yield request.placed
