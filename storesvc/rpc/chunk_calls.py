"""Calls that read chunks."""

from contextlib import aclosing

from storesvc.errors import InvalidFieldError
from storesvc.format.names import CheckpointName
from storesvc.rpc.handling import Context, refusals, write
from storesvc.store import Store
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import chunk_service_pb2_grpc


class ChunkService(chunk_service_pb2_grpc.ChunkServiceServicer):
    """Ships stored chunks as they lie."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ReadChunks(  # type: ignore[override]  # writes by the context, not by yield, to watch the time of each write
        self, request: chunk_api.ReadChunksRequest, context: Context
    ) -> None:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            if not request.uid:
                raise InvalidFieldError(
                    f"uid: expected that of {name}, got none; read its manifest first"
                )
            record = await self._store.catalogue.checkpoint_of_uid(name, request.uid)
            manifest = await self._store.catalogue.manifest(name.run, record)
            frames = self._store.sender.send(name.run, manifest, request.chunk)
            async with aclosing(frames):
                async for frame in frames:
                    await write(context, chunk_api.ReadChunksResponse(frame=frame))
