"""Calls that read the catalogue."""

from contextlib import aclosing
from typing import Final

from storesvc.format import trees
from storesvc.format.names import CheckpointName, RunName, parse_step
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, host_of, refusals, write
from storesvc.rpc.message_budget import MemoryBudget
from storesvc.rpc.paging import page
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api

SENT_BYTES: Final = 128 << 20
"""Of the messages of streams that wait to be taken, beside those of chunks."""

PEER_BYTES: Final = 96 << 20
"""Of those of one peer."""


class CatalogueCalls:
    """Reads the catalogue."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent = MemoryBudget(SENT_BYTES, PEER_BYTES, purpose="responses")

    async def ListRuns(
        self, request: catalogue_api.ListRunsRequest, context: Context
    ) -> catalogue_api.ListRunsResponse:
        async with refusals(context):
            size = requests.page_size(request.page_size)
            found = await self._store.catalogue.runs(
                requests.namespace_of(request.parent),
                after=requests.last_of_page(
                    request.parent, request.page_token, RunName.parse
                ),
                limit=size + 1,
            )
            made = page(
                request.parent,
                found,
                size=size,
                key=str,
                show=lambda _, run: messages.run_message(run),
            )
            return catalogue_api.ListRunsResponse(
                runs=made.rows, damaged=made.damaged, next_page_token=made.token
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
            size = requests.page_size(request.page_size)
            listed = f"{request.parent}{' with deleted' * request.show_deleted}"
            last = requests.last_of_page(listed, request.page_token, parse_step)
            found = await self._store.catalogue.checkpoint_rows(
                run, before=last, limit=size + 1, show_deleted=request.show_deleted
            )
            made = page(
                listed,
                [(CheckpointName(run, step), slot) for step, slot in found],
                size=size,
                key=lambda name: str(name.which),
                show=lambda _, slot: messages.checkpoint_message(run, slot),
            )
            return catalogue_api.ListCheckpointsResponse(
                checkpoints=made.rows, damaged=made.damaged, next_page_token=made.token
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

    async def ReadManifest(  # as ReadChunks
        self, request: catalogue_api.ReadManifestRequest, context: Context
    ) -> None:
        async with refusals(context):
            name = CheckpointName.from_resource(request.name)
            if request.uid:
                record = await self._store.catalogue.checkpoint_of_uid(
                    name, request.uid
                )
            else:
                record = await self._store.catalogue.checkpoint(name)
            checkpoint = messages.checkpoint_message(name.run, record)
            response = catalogue_api.ReadManifestResponse(checkpoint=checkpoint)
            await write(context, response)
            await self._send_manifest(name.run, record, context)

    async def _send_manifest(
        self, run: RunName, record: pb.CheckpointRecord, context: Context
    ) -> None:
        """Sends a manifest part by part: a client that takes none keeps one."""
        size_bytes = min(trees.MAX_PART_BYTES, record.manifest_bytes)
        parts = self._store.catalogue.manifest_parts(
            run, record, size_bytes=trees.MAX_PART_BYTES
        )
        with self._sent.share(host_of(context.peer())) as share:
            await share.take(size_bytes)
            async with aclosing(parts):
                async for part in parts:
                    response = catalogue_api.ReadManifestResponse(part=part)
                    await write(context, response, share)
