"""Rpcs of the maintenance service (limits, verification, collection, usage) and of the
chunk service."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial

import storesvc
from storesvc.auth import call as access
from storesvc.errors import InvalidFieldError
from storesvc.format import trees
from storesvc.format.manifests import Manifest
from storesvc.format.names import CheckpointName, RunName
from storesvc.gc.collector import FailureLimit, Progress
from storesvc.inspect.rules import Report
from storesvc.restore import sender
from storesvc.rpc import messages, requests
from storesvc.rpc.status import MAX_MESSAGE_BYTES, Context
from storesvc.rpc.streams import write
from storesvc.save import batches, leaf_tables
from storesvc.store import Store
from storesvc.telemetry.events import Stopwatch
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api

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
        record = await self._store.catalog.checkpoint_with_uid(name, uid)
        return await self._store.catalog.manifest(name.run, record)


class MaintenanceService:
    """Maintains a store."""

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
                max_frame_bytes=batches.FRAME_BYTES,
                max_chunk_bytes=trees.MAX_CHUNK_BYTES,
                max_leaf_count=leaf_tables.MAX_LEAVES,
                max_chunk_count=leaf_tables.MAX_CHUNKS,
                max_tree_bytes=leaf_tables.MAX_TREE_BYTES,
                max_read_chunk_count=sender.MAX_CHUNKS,
            ),
        )

    async def VerifyCheckpoint(
        self, request: maintenance_api.VerifyCheckpointRequest, context: Context
    ) -> None:
        name = CheckpointName.from_resource(request.name)
        record = await self._store.catalog.checkpoint(name)
        checkpoint = messages.checkpoint_message(name.run, record)
        response = maintenance_api.VerifyCheckpointResponse(checkpoint=checkpoint)
        await write(context, response)
        reports = self._store.verifier.verify(name.run, record)
        async with aclosing(reports):
            async for report in reports:
                await write(context, report_message(report))

    async def CollectGarbage(
        self, request: maintenance_api.CollectGarbageRequest, context: Context
    ) -> None:
        grace, collector = requests.parse_grace(request), self._store.collector
        one_run = collector.preview if request.validate_only else collector.collect
        runs, failures = await self._list_runs(request.parent), FailureLimit()
        passes = _passes(runs, partial(one_run, grace=grace), failures)
        async with aclosing(passes):
            async for progress in passes:
                await write(context, progress_message(progress))
        if not request.validate_only and not failures.is_reached:
            await collector.trim({run.namespace for run in runs})

    async def _list_runs(self, parent: str) -> list[RunName]:
        """Returns the runs below a parent; rejects a run that does not exist."""
        if "/runs/" not in parent:
            namespace = requests.parse_namespace(parent)
            return await self._store.catalog.run_names(namespace)
        run = RunName.from_resource(parent)
        if run not in await self._store.catalog.run_names(run.namespace):
            await self._store.catalog.check_run(run)
        return [run]

    async def GetUsage(
        self, request: maintenance_api.GetUsageRequest, context: Context
    ) -> maintenance_api.GetUsageResponse:
        name = RunName.from_resource(request.name)
        usage = await self._store.usage.read_usage(name)
        return maintenance_api.GetUsageResponse(**asdict(usage))

    async def UpgradeStore(
        self, request: maintenance_api.UpgradeStoreRequest, context: Context
    ) -> maintenance_api.UpgradeStoreResponse:
        before, after = await self._store.format.upgrade(
            request.format_version, is_preview=request.validate_only
        )
        if (call := access.current.get()) is not None:
            call.detail["format_version"] = f"{before} -> {after}"
        return maintenance_api.UpgradeStoreResponse(
            previous_version=before, format_version=after
        )


async def _passes(
    runs: Iterable[RunName],
    one_run: Callable[[RunName], AsyncGenerator[Progress]],
    failures: FailureLimit,
) -> AsyncGenerator[Progress]:
    """Collects runs one after another until the storage is unavailable."""
    for run in runs:
        if failures.is_reached:
            yield failures.skipped(run)
            continue
        async with aclosing(one_run(run)) as passed:
            async for progress in passed:
                failures.record(progress)
                yield progress


def progress_message(progress: Progress) -> maintenance_api.CollectGarbageResponse:
    return maintenance_api.CollectGarbageResponse(
        run=progress.run.resource,
        done=progress.is_done,
        aborted_upload_count=progress.aborted_uploads,
        deleted_checkpoint_count=progress.deleted_checkpoints,
        purged_checkpoint_count=progress.purged_checkpoints,
        garbage_object_count=progress.garbage_objects,
        deleted_object_count=progress.deleted_objects,
        postponed=progress.postponed,
    )


def report_message(report: Report) -> maintenance_api.VerifyCheckpointResponse:
    return maintenance_api.VerifyCheckpointResponse(
        chunk_count=report.chunk_count,
        stored_bytes=report.stored_bytes,
        damages=(
            messages.show_value(maintenance_api.Damage, one) for one in report.damages
        ),
    )
