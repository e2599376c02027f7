"""Rpcs of the chunk service."""

import logging
from contextlib import aclosing

from storesvc.call_timer import Stopwatch
from storesvc.errors import InvalidFieldError
from storesvc.format.manifests import Manifest
from storesvc.format.names import CheckpointName
from storesvc.rpc.boundary import Context
from storesvc.rpc.streams import write
from storesvc.store import Store
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api

_log = logging.getLogger(__name__)


class ChunkService:
    """Sends stored chunks unchanged, as serialised responses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ReadChunks(
        self, request: chunk_api.ReadChunksRequest, context: Context
    ) -> None:
        name, watch = CheckpointName.from_resource(request.name), Stopwatch()
        manifest = await self._manifest(name, request.uid)
        frames = self._store.sender.send(name.run, manifest, request.chunk)
        async with aclosing(frames), aclosing(watch.waits("storage", frames)) as read:
            async for frame in read:
                with watch.phase("client"):
                    await write(context, frame)
                watch.size_bytes += len(frame)
        _log.info("ReadChunks %s: %s", name, watch)

    async def _manifest(self, name: CheckpointName, uid: str) -> Manifest:
        """Returns the manifest of a checkpoint, deleted or not, by its uid."""
        if not uid:
            raise InvalidFieldError(
                f"uid: expected the uid of {name}, got none; read its manifest first"
            )
        record = await self._store.catalog.checkpoint_of_uid(name, uid)
        return await self._store.catalog.manifest(name.run, record)
