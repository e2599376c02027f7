"""Rpcs of checkpoints, and the watch of their events."""

from contextlib import aclosing
from datetime import timedelta
from typing import Final

from storesvc.catalog.slots import Change
from storesvc.errors import CorruptDataError, InvalidFieldError
from storesvc.format import trees
from storesvc.format.names import CheckpointName, RunName, parse_step
from storesvc.lifecycle.checkpoints import MAX_PURGE_DELAY
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, share_key
from storesvc.rpc.message_budget import MessageBudget
from storesvc.rpc.paging import list_page
from storesvc.rpc.streams import write
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api

_MUTABLE: Final = ("labels", "metrics", "pinned")


class CheckpointCalls:
    """Reads, updates, deletes, purges and watches checkpoints."""

    _store: Store
    _sent: MessageBudget

    async def ListCheckpoints(
        self, request: checkpoint_api.ListCheckpointsRequest, context: Context
    ) -> checkpoint_api.ListCheckpointsResponse:
        run = RunName.from_resource(request.parent)

        async def find(
            last: int | None, limit: int
        ) -> list[tuple[CheckpointName, pb.CheckpointRecord | CorruptDataError]]:
            found = await self._store.catalog.checkpoint_rows(
                run, before=last, limit=limit, show_deleted=request.show_deleted
            )
            return [(CheckpointName(run, step), slot) for step, slot in found]

        page = await list_page(
            request,
            f"{request.parent}{' with deleted' * request.show_deleted}",
            find=find,
            parse=parse_step,
            key=lambda name: str(name.which),
            show=lambda _, slot: messages.checkpoint_message(run, slot),
        )
        return checkpoint_api.ListCheckpointsResponse(
            checkpoints=page.rows, damaged=page.damaged, next_page_token=page.token
        )

    async def GetCheckpoint(
        self, request: checkpoint_api.GetCheckpointRequest, context: Context
    ) -> checkpoint_api.GetCheckpointResponse:
        name = CheckpointName.from_resource(request.name)
        record = await self._store.catalog.checkpoint(name)
        checkpoint = messages.checkpoint_message(name.run, record)
        return checkpoint_api.GetCheckpointResponse(
            checkpoint=checkpoint, writers=record.writers
        )

    async def ReadManifest(
        self, request: checkpoint_api.ReadManifestRequest, context: Context
    ) -> None:
        name, catalog = CheckpointName.from_resource(request.name), self._store.catalog
        if request.uid:
            record = await catalog.checkpoint_of_uid(name, request.uid)
        else:
            record = await catalog.checkpoint(name)
        checkpoint = messages.checkpoint_message(name.run, record)
        response = checkpoint_api.ReadManifestResponse(checkpoint=checkpoint)
        await write(context, response)
        await self._send_manifest(name.run, record, context)

    async def _send_manifest(
        self, run: RunName, record: pb.CheckpointRecord, context: Context
    ) -> None:
        """Sends a manifest in parts: a client that reads nothing keeps only one."""
        size_bytes = min(trees.MAX_PART_BYTES, record.manifest_bytes)
        parts = self._store.catalog.manifest_parts(
            run, record, size_bytes=trees.MAX_PART_BYTES
        )
        with self._sent.share(share_key(context)) as share:
            await share.take(size_bytes)
            async with aclosing(parts):
                async for part in parts:
                    response = checkpoint_api.ReadManifestResponse(part=part)
                    await write(context, response, share)

    async def UpdateCheckpoint(
        self, request: checkpoint_api.UpdateCheckpointRequest, context: Context
    ) -> checkpoint_api.UpdateCheckpointResponse:
        run, step = step_of(request.checkpoint.name)
        write_id = requests.write_id_of(request)
        record = await self._store.lifecycle.update(
            run, step, change_of(request), etag=request.etag, write_id=write_id
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.UpdateCheckpointResponse(checkpoint=checkpoint)

    async def DeleteCheckpoint(
        self, request: checkpoint_api.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_api.DeleteCheckpointResponse:
        run, step = step_of(request.name)
        record = await self._store.reserve.spent_on(
            self._store.lifecycle.delete,
            run,
            step,
            purge_delay=purge_delay_of(request),
            etag=request.etag,
            write_id=requests.write_id_of(request),
            uid=request.uid,
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.DeleteCheckpointResponse(checkpoint=checkpoint)

    async def UndeleteCheckpoint(
        self, request: checkpoint_api.UndeleteCheckpointRequest, context: Context
    ) -> checkpoint_api.UndeleteCheckpointResponse:
        run, step = step_of(request.name)
        write_id = requests.write_id_of(request)
        record = await self._store.lifecycle.undelete(
            run, step, write_id=write_id, uid=request.uid
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.UndeleteCheckpointResponse(checkpoint=checkpoint)

    async def PurgeCheckpoint(
        self, request: checkpoint_api.PurgeCheckpointRequest, context: Context
    ) -> checkpoint_api.PurgeCheckpointResponse:
        run, step = step_of(request.name)
        purge = self._store.lifecycle.purge
        await self._store.reserve.spent_on(
            purge, run, step, etag=request.etag, uid=request.uid
        )
        return checkpoint_api.PurgeCheckpointResponse()

    async def WatchCheckpoints(
        self, request: checkpoint_api.WatchCheckpointsRequest, context: Context
    ) -> None:
        parent = _watched(request.parent)
        watch = self._store.watcher.watch(parent, request.resume_token)
        async with aclosing(watch):
            async for event in watch:
                await write(context, messages.watch_message(event))


def step_of(resource: str) -> tuple[RunName, int]:
    """Returns the run and the step of a checkpoint that is named by its step.

    Raises:
        InvalidFieldError: It is named by "latest" or a tag, which may move.
    """
    name = CheckpointName.from_resource(resource)
    if isinstance(name.which, str):
        raise InvalidFieldError(
            f"name {resource!r}: expected a step, got {name.which}; get the checkpoint "
            "and give its step"
        )
    return name.run, name.which


def change_of(request: checkpoint_api.UpdateCheckpointRequest) -> Change:
    """Returns the change that UpdateCheckpoint requests.

    Raises:
        InvalidFieldError: A field is invalid; names it.
    """
    paths = set(request.update_mask.paths)
    if not paths or not paths <= set(_MUTABLE):
        raise InvalidFieldError(
            f"update_mask: expected some of {', '.join(_MUTABLE)}, got "
            f"{', '.join(sorted(paths))[:200] or 'none'}"
        )
    given = request.checkpoint
    requests.check_entries("checkpoint.labels", given.labels)
    requests.check_entries("checkpoint.metrics", given.metrics)
    return Change(
        labels=dict(given.labels) if "labels" in paths else None,
        metrics=dict(given.metrics) if "metrics" in paths else None,
        pinned=given.pinned if "pinned" in paths else None,
    )


def purge_delay_of(
    request: checkpoint_api.DeleteCheckpointRequest,
) -> timedelta | None:
    """Returns the purge delay of a deletion; None: the one of the run.

    Raises:
        InvalidFieldError: It is negative, or too long.
    """
    if not request.HasField("purge_delay"):
        return None
    return requests.duration("purge_delay", request.purge_delay, most=MAX_PURGE_DELAY)


def _watched(parent: str) -> RunName | str:
    """Returns the run or the namespace to watch.

    Raises:
        InvalidFieldError: The parent is neither, or is all namespaces.
        InvalidNameError: The name is invalid.
    """
    if "/runs/" in parent:
        return RunName.from_resource(parent)
    namespace = requests.namespace_of(parent)
    if namespace is None:
        raise InvalidFieldError(
            f"parent {parent!r}: expected one namespace, or a run of it; watch each "
            "namespace separately"
        )
    return namespace
