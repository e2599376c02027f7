"""Maps RPCs onto the service: translate, call, translate back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

import storesvc
from storesvc import requests, sending, uploads
from storesvc.catalogue import Catalogue
from storesvc.commits import Commits
from storesvc.errors import (
    CheckpointNotFoundError,
    InvalidFieldError,
    LimitExceededError,
    StalledError,
    StoreError,
)
from storesvc.format import trees
from storesvc.format.chunks import InvalidChunksError, unpack_sums
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

STALL_SECONDS: Final = 60.0
"""How long a stream may send nothing, or take nothing."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")


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


class CheckpointService(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    """Reads the catalogue."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ListRuns(
        self, request: catalogue_api.ListRunsRequest, context: Context
    ) -> catalogue_api.ListRunsResponse:
        async with refusals(context):
            size = requests.page_size(request.page_size)
            last = requests.last_of_page(request.parent, request.page_token)
            found = await self._store.catalogue.runs(
                requests.namespace_of(request.parent),
                after=RunName.parse(last) if last else None,
                limit=size + 1,
            )
            token = ""
            if len(found) > size:
                token = requests.page_token(request.parent, str(found[size - 1].name))
            return catalogue_api.ListRunsResponse(
                runs=map(requests.run_message, found[:size]), next_page_token=token
            )
        raise AssertionError

    async def GetRun(
        self, request: catalogue_api.GetRunRequest, context: Context
    ) -> catalogue_api.GetRunResponse:
        async with refusals(context):
            name = RunName.from_resource(request.name)
            summary = await self._store.catalogue.run(name)
            return catalogue_api.GetRunResponse(run=requests.run_message(summary))
        raise AssertionError

    async def ListCheckpoints(
        self, request: catalogue_api.ListCheckpointsRequest, context: Context
    ) -> catalogue_api.ListCheckpointsResponse:
        async with refusals(context):
            run = RunName.from_resource(request.parent)
            size = requests.page_size(request.page_size)
            last = requests.last_of_page(request.parent, request.page_token)
            found = await self._store.catalogue.checkpoints(
                run, before=int(last) if last else None, limit=size + 1
            )
            token = ""
            if len(found) > size:
                token = requests.page_token(request.parent, str(found[size - 1].step))
            return catalogue_api.ListCheckpointsResponse(
                checkpoints=[requests.checkpoint_message(run, c) for c in found[:size]],
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
                checkpoint=requests.checkpoint_message(name.run, record)
            )
        raise AssertionError

    async def ReadManifest(
        self, request: catalogue_api.ReadManifestRequest, context: Context
    ) -> AsyncIterator[catalogue_api.ReadManifestResponse]:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            record = await self._store.catalogue.checkpoint(name)
            data = await self._store.catalogue.manifest_bytes(name.run, record)
            yield catalogue_api.ReadManifestResponse(
                checkpoint=requests.checkpoint_message(name.run, record)
            )
            for at in range(0, len(data), trees.MAX_PART_BYTES):
                part = data[at : at + trees.MAX_PART_BYTES]
                yield catalogue_api.ReadManifestResponse(part=part)


class UploadService(upload_service_pb2_grpc.UploadServiceServicer):
    """Writes checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def BeginUpload(
        self,
        request_iterator: AsyncIterator[upload_api.BeginUploadRequest],
        context: Context,
    ) -> upload_api.BeginUploadResponse:
        async with refusals(context):
            first = await _first(request_iterator, "upload")
            name = requests.upload_name(first.parent, first.request_id)
            new = requests.new_upload(first.upload)
            table = bytearray()
            async for part in _following(request_iterator, "leaves"):
                table += part.leaves.SerializeToString(deterministic=True)
                _check_size("leaf table", len(table))
            record = await self._store.uploads.begin(name, new, bytes(table))
            return upload_api.BeginUploadResponse(
                upload=requests.upload_message(name, record)
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
            table = tree_pb2.ChunkTable()
            async for part in _following(request_iterator, "chunks"):
                table.MergeFrom(part.chunks)
                _check_size("receipt", table.ByteSize())
            try:
                sums = unpack_sums(table)
            except InvalidChunksError as e:
                raise InvalidFieldError(f"chunks: {e}") from e
            places = await self._store.receiver.finish(upload, first.open.writer, sums)
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
                checkpoint=requests.checkpoint_message(name.run, record)
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
                max_frame_bytes=sending.FRAME_BYTES,
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
        if message.WhichOneof("part") != part:  # type: ignore[attr-defined]  # generated code has no common base with it
            raise InvalidFieldError(
                f"stream: expected a message with {part}, got "
                f"{message.WhichOneof('part')}"  # type: ignore[attr-defined]  # as above
            )
        yield message


async def _write(context: Context, message: chunk_api.ReadChunksResponse) -> None:
    """Sends a message; a client that takes none holds memory of the server."""
    try:
        await asyncio.wait_for(context.write(message), STALL_SECONDS)
    except TimeoutError as e:
        raise StalledError(
            f"the client took nothing for {STALL_SECONDS:.0f} s; ask for what is "
            "missing in a new call"
        ) from e


def _check_size(what: str, size: int) -> None:
    if size > MAX_TREE_BYTES:
        raise LimitExceededError(
            f"{what}: expected at most {MAX_TREE_BYTES} bytes, got more"
        )
