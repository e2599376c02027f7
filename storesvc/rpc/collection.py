"""Calls that collect garbage, and tell what a run takes."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Final

from storesvc.format.names import RunName
from storesvc.gc.collector import DEFAULT_GRACE, FailureLimit, Progress
from storesvc.gc.usage import Usage
from storesvc.rpc import requests
from storesvc.rpc.boundary import Context, refusals, write
from storesvc.store import Store
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api

MAX_GRACE: Final = timedelta(days=365)
"""How long ago something must have lost its use, at most."""


class CollectCalls:
    """Collects garbage, and tells what a run takes."""

    _store: Store

    async def CollectGarbage(  # as ReadChunks
        self, request: maintenance_api.CollectGarbageRequest, context: Context
    ) -> None:
        async with refusals(context):
            grace, collector = grace_of(request), self._store.collector
            one_run = collector.preview if request.validate_only else collector.collect
            runs, failures = await self._runs_of(request.parent), FailureLimit()
            passes = _passes(runs, partial(one_run, grace=grace), failures)
            async with aclosing(passes):
                async for progress in passes:
                    await write(context, progress_message(progress))
            if not request.validate_only and not failures.is_reached:
                await collector.trim({run.namespace for run in runs})

    async def GetUsage(
        self, request: maintenance_api.GetUsageRequest, context: Context
    ) -> maintenance_api.GetUsageResponse:
        async with refusals(context):
            name = RunName.from_resource(request.name)
            return usage_message(await self._store.usages.usage(name))
        raise AssertionError

    async def _runs_of(self, parent: str) -> list[RunName]:
        """The runs below a parent; a run that nothing was ever saved to is refused."""
        if "/runs/" in parent:
            run = RunName.from_resource(parent)
            if run not in await self._store.catalogue.run_names(run.namespace):
                await self._store.catalogue.check_run(run)
            return [run]
        return await self._store.catalogue.run_names(requests.namespace_of(parent))


async def _passes(
    runs: Iterable[RunName],
    one_run: Callable[[RunName], AsyncGenerator[Progress]],
    failures: FailureLimit,
) -> AsyncGenerator[Progress]:
    """Passes over runs, one after the other, while the storage answers."""
    for run in runs:
        if failures.is_reached:
            yield failures.skipped(run)
            continue
        async with aclosing(one_run(run)) as passed:
            async for progress in passed:
                failures.record(progress)
                yield progress


def grace_of(request: maintenance_api.CollectGarbageRequest) -> timedelta:
    """Returns how long ago something must have lost its use.

    Raises:
        InvalidFieldError: It is negative, malformed or too long.
    """
    if not request.HasField("grace"):
        return DEFAULT_GRACE
    return requests.duration("grace", request.grace, most=MAX_GRACE)


def progress_message(progress: Progress) -> maintenance_api.CollectGarbageResponse:
    """Returns how far a pass is as the contract shows it."""
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


def usage_message(usage: Usage) -> maintenance_api.GetUsageResponse:
    """Returns what a run takes as the contract shows it."""
    return maintenance_api.GetUsageResponse(
        checkpoint_count=usage.checkpoints,
        deleted_checkpoint_count=usage.deleted_checkpoints,
        upload_count=usage.uploads,
        logical_bytes=usage.logical_bytes,
        stored_bytes=usage.stored_bytes,
        distinct_bytes=usage.distinct_bytes,
        file_count=usage.files,
    )
