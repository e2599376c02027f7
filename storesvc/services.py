"""Maps RPCs onto the service: translate, call, translate back."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

import storesvc
from storesvc import messages, receiving, sending, uploads
from storesvc.catalogue import Catalogue
from storesvc.commits import Commits
from storesvc.errors import (
    CheckpointNotFoundError,
    InvalidChunkError,
    InvalidFieldError,
    LimitExceededError,
    StalledError,
    StoreError,
)
from storesvc.format import trees
from storesvc.format.chunks import InvalidChunksError, Sums, unpack_sums
from storesvc.format.names import CheckpointName, InvalidNameError, RunName, UploadName
from storesvc.receiving import Receiver
from storesvc.sending import Sender
from storesvc.statuses import refuse
from storesvc.uploads import OpenUpload, Uploads
from storesvc_proto.v1 import (
    checkpoint_service_pb2 as catalogue_api,
)
from storesvc_proto.v1 import (
    checkpoint_service_pb2_grpc,
    chunk_service_pb2_grpc,
    maintenance_service_pb2_grpc,
    tree_pb2,
    upload_service_pb2_grpc,
)
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Bytes of a message, either way: gRPC's default, kept."""

MAX_TREE_BYTES: Final = 256 << 20
"""Bytes of a leaf table, and of a receipt."""

MAX_LARGE_CALLS: Final = 2
"""Calls that gather a table, at once."""

MAX_MANIFESTS: Final = 4
"""Manifests that are sent, at once."""

STALL_SECONDS: Final = 60.0
"""How long a stream may send nothing."""

TAKE_SECONDS: Final = 15.0
"""How long a client may take no message."""

CALL_SECONDS: Final = 60.0
"""How long a call that gathers a table may take."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class _Parted(Protocol):
    """A message of a stream, which holds one of several parts."""

    def WhichOneof(self, group: Literal["part"], /) -> str | None:
        """Returns which one."""


T = TypeVar("T", bound=_Parted)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """What the services share: one store of one process."""

    uid: str
    catalogue: Catalogue
    uploads: Uploads
    receiver: Receiver
    commits: Commits
    sender: Sender


@asynccontextmanager
async def refusals(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status of any refusal raised inside."""
    try:
        yield
    except InvalidNameError as e:
        await refuse(context, InvalidFieldError(str(e)))
    except StoreError as e:
        await refuse(context, e)
    except TimeoutError:
        late = f"the call took longer than {CALL_SECONDS:.0f} s; repeat it"
        await refuse(context, StalledError(late))
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - a boundary: told to the log, not to the client
        bug = uuid.uuid4().hex[:8]
        _log.exception("bug %s", bug)
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"a bug of the server, {bug} in its log; please report it",
        )


class CheckpointService(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    """Reads the catalogue."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._manifests = asyncio.Semaphore(MAX_MANIFESTS)

    async def ListRuns(
        self, request: catalogue_api.ListRunsRequest, context: Context
    ) -> catalogue_api.ListRunsResponse:
        async with refusals(context):
            size = messages.page_size(request.page_size)
            found = await self._store.catalogue.runs(
                messages.namespace_of(request.parent),
                after=messages.last_run(request.parent, request.page_token),
                limit=size + 1,
            )
            token = ""
            if len(found) > size:
                token = messages.page_token(request.parent, str(found[size - 1].name))
            return catalogue_api.ListRunsResponse(
                runs=map(messages.run_message, found[:size]), next_page_token=token
            )
        raise AssertionError

    async def GetRun(
        self, request: catalogue_api.GetRunRequest, context: Context
    ) -> catalogue_api.GetRunResponse:
        async with refusals(context):
            name = RunName.from_resource(request.name)
            summary = await self._store.catalogue.run(name)
            return catalogue_api.GetRunResponse(run=messages.run_message(summary))
        raise AssertionError

    async def ListCheckpoints(
        self, request: catalogue_api.ListCheckpointsRequest, context: Context
    ) -> catalogue_api.ListCheckpointsResponse:
        async with refusals(context):
            run = RunName.from_resource(request.parent)
            size = messages.page_size(request.page_size)
            last = messages.last_step(request.parent, request.page_token)
            found = await self._store.catalogue.checkpoints(
                run, before=last, limit=size + 1
            )
            token = ""
            if len(found) > size:
                token = messages.page_token(request.parent, str(found[size - 1].step))
            return catalogue_api.ListCheckpointsResponse(
                checkpoints=[messages.checkpoint_message(run, c) for c in found[:size]],
                next_page_token=token,
            )
        raise AssertionError

    async def GetCheckpoint(
        self, request: catalogue_api.GetCheckpointRequest, context: Context
    ) -> catalogue_api.GetCheckpointResponse:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            record = await self._store.catalogue.checkpoint(name)
            return catalogue_api.GetCheckpointResponse(
                checkpoint=messages.checkpoint_message(name.run, record)
            )
        raise AssertionError

    async def ReadManifest(  # type: ignore[override]  # as ReadChunks
        self, request: catalogue_api.ReadManifestRequest, context: Context
    ) -> None:
        async with refusals(context), self._manifests:
            name = CheckpointName.from_resource(request.name)
            record = await self._store.catalogue.checkpoint(name)
            data = await self._store.catalogue.manifest_bytes(name.run, record)
            checkpoint = messages.checkpoint_message(name.run, record)
            response = catalogue_api.ReadManifestResponse(checkpoint=checkpoint)
            await _write(context, response)
            for at in range(0, len(data), trees.MAX_PART_BYTES):
                part = data[at : at + trees.MAX_PART_BYTES]
                await _write(context, catalogue_api.ReadManifestResponse(part=part))


class UploadService(upload_service_pb2_grpc.UploadServiceServicer):
    """Writes checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._large_calls = asyncio.Semaphore(MAX_LARGE_CALLS)

    @asynccontextmanager
    async def _large_call(self) -> AsyncIterator[None]:
        """Bounds what tables take in memory: their number, and their time."""
        async with asyncio.timeout(CALL_SECONDS), self._large_calls:
            yield

    async def BeginUpload(
        self,
        request_iterator: AsyncIterator[upload_api.BeginUploadRequest],
        context: Context,
    ) -> upload_api.BeginUploadResponse:
        async with refusals(context):
            first = await _first(request_iterator, "upload")
            name = messages.upload_name(first.parent, first.request_id)
            new = messages.new_upload(first.upload)
            async with self._large_call():
                table = await _joined_leaves(name, request_iterator)
                record = await self._store.uploads.begin(name, new, table)
            return upload_api.BeginUploadResponse(
                upload=messages.upload_message(name, record)
            )
        raise AssertionError

    async def WriteChunks(
        self,
        request_iterator: AsyncIterator[upload_api.WriteChunksRequest],
        context: Context,
    ) -> AsyncIterator[upload_api.WriteChunksResponse]:
        async with refusals(context):
            first = await _first(request_iterator, "open")
            upload = await self._open(first.open)
            frames = (r.frame async for r in _following(request_iterator, "frame"))
            written = self._store.receiver.write(upload, first.open.writer, frames)
            async with aclosing(written):
                async for count in written:
                    yield upload_api.WriteChunksResponse(durable_count=count)

    async def FinishWriter(
        self,
        request_iterator: AsyncIterator[upload_api.FinishWriterRequest],
        context: Context,
    ) -> upload_api.FinishWriterResponse:
        async with refusals(context):
            first = await _first(request_iterator, "open")
            upload = await self._open(first.open)
            async with self._large_call():
                sums = await _joined_sums(request_iterator)
                places = await self._store.receiver.finish(
                    upload, first.open.writer, sums
                )
            return upload_api.FinishWriterResponse(
                chunk_count=len(sums), stored_bytes=int(places.length.sum())
            )
        raise AssertionError

    async def CommitUpload(
        self, request: upload_api.CommitUploadRequest, context: Context
    ) -> upload_api.CommitUploadResponse:
        async with refusals(context):
            name = UploadName.from_resource(request.name)
            record = await self._store.commits.commit(name, request.epoch)
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
        if not 0 <= ref.writer < upload.record.writer_count:
            raise InvalidFieldError(
                f"open.writer: expected 0 to {upload.record.writer_count - 1}, got "
                f"{ref.writer}"
            )
        return upload


class ChunkService(chunk_service_pb2_grpc.ChunkServiceServicer):
    """Ships stored chunks as they lie."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ReadChunks(  # type: ignore[override]  # writes by the context, not by yield, to watch the time of each write
        self, request: chunk_api.ReadChunksRequest, context: Context
    ) -> None:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            record = await self._store.catalogue.checkpoint(name)
            if record.upload != request.uid:
                raise CheckpointNotFoundError(
                    f"{name}: the checkpoint with uid {request.uid!r} was replaced by "
                    f"{record.upload!r}; read its manifest again",
                    run=str(name.run),
                    step=str(record.step),
                )
            manifest = await self._store.catalogue.manifest(name.run, record)
            frames = self._store.sender.send(name.run, manifest, request.chunk)
            async with aclosing(frames):
                async for frame in frames:
                    await _write(context, chunk_api.ReadChunksResponse(frame=frame))


class MaintenanceService(maintenance_service_pb2_grpc.MaintenanceServiceServicer):
    """Tells what the server is and allows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def GetServerInfo(
        self, request: maintenance_api.GetServerInfoRequest, context: Context
    ) -> maintenance_api.GetServerInfoResponse:
        return maintenance_api.GetServerInfoResponse(
            version=storesvc.__version__,
            store_uid=self._store.uid,
            limits=maintenance_api.Limits(
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_frame_bytes=receiving.FRAME_BYTES,
                max_chunk_bytes=trees.MAX_CHUNK_BYTES,
                max_leaf_count=uploads.MAX_LEAVES,
                max_chunk_count=uploads.MAX_CHUNKS,
                max_tree_bytes=MAX_TREE_BYTES,
                max_read_chunk_count=sending.MAX_CHUNKS,
            ),
        )


async def _first(stream: AsyncIterator[T], part: str) -> T:
    """The first message of a stream, which holds another part than the others."""
    async for message in _following(stream, part):
        return message
    raise InvalidFieldError(f"stream: expected a first message with {part}, got none")


async def _following(stream: AsyncIterator[T], part: str) -> AsyncIterator[T]:
    """The other messages of a stream; none may be of another part, or be late."""
    while True:
        try:
            message = await asyncio.wait_for(anext(stream), STALL_SECONDS)
        except StopAsyncIteration:
            return
        except TimeoutError as e:
            raise StalledError(
                f"the stream sent nothing for {STALL_SECONDS:.0f} s; send what was not "
                "acknowledged in a new one"
            ) from e
        if message.WhichOneof("part") != part:
            raise InvalidFieldError(
                f"stream: expected a message with {part}, got "
                f"{message.WhichOneof('part')}"
            )
        yield message


async def _joined_leaves(
    name: UploadName, stream: AsyncIterator[upload_api.BeginUploadRequest]
) -> bytes:
    """The serialised leaf table of a stream, its rows counted as they come."""
    table, rows = bytearray(), tree_pb2.LeafTable()
    async for message in _following(stream, "leaves"):
        part = message.leaves
        uploads.check_limits(name, part)
        rows.dtypes.extend(part.dtypes)
        rows.prng_impls.extend(part.prng_impls)
        rows.shardings.extend(part.shardings)
        uploads.check_limits(name, rows)
        table += part.SerializeToString(deterministic=True)
        _check_size("leaf table", len(table))
    return bytes(table)


async def _joined_sums(stream: AsyncIterator[upload_api.FinishWriterRequest]) -> Sums:
    """The receipt of a stream."""
    table, size = tree_pb2.ChunkTable(), 0
    async for message in _following(stream, "chunks"):
        size += message.ByteSize()
        _check_size("receipt", size)
        table.MergeFrom(message.chunks)
    try:
        return await asyncio.to_thread(unpack_sums, table)
    except InvalidChunksError as e:
        raise InvalidChunkError(f"receipt: {e}") from e


async def _write(context: Context, message: Message) -> None:
    """Sends a message; a client that takes none holds memory of the server."""
    try:
        await asyncio.wait_for(context.write(message), TAKE_SECONDS)
    except TimeoutError as e:
        raise StalledError(
            f"the client took nothing for {TAKE_SECONDS:.0f} s; ask for what is "
            "missing in a new call"
        ) from e


def _check_size(what: str, size: int) -> None:
    if size > MAX_TREE_BYTES:
        raise LimitExceededError(
            f"{what}: expected at most {MAX_TREE_BYTES} bytes, got more"
        )
