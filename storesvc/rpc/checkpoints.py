"""Calls that change what is known of a checkpoint, and end it."""

from datetime import timedelta
from typing import Final

from storesvc.catalog.transitions import Change
from storesvc.errors import InvalidFieldError
from storesvc.format.names import CheckpointName, RunName
from storesvc.lifecycle.checkpoints import MAX_PURGE_DELAY
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, refusals
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api

_MUTABLE: Final = ("labels", "metrics", "pinned")


class RecordCalls:
    """Changes and ends checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def UpdateCheckpoint(
        self, request: catalogue_api.UpdateCheckpointRequest, context: Context
    ) -> catalogue_api.UpdateCheckpointResponse:
        async with refusals(context):
            run, step = step_of(request.checkpoint.name)
            write_id = requests.write_id_of(request)
            record = await self._store.lifecycle.update(
                run, step, change_of(request), etag=request.etag, write_id=write_id
            )
            return catalogue_api.UpdateCheckpointResponse(
                checkpoint=messages.checkpoint_message(run, record)
            )
        raise AssertionError

    async def DeleteCheckpoint(
        self, request: catalogue_api.DeleteCheckpointRequest, context: Context
    ) -> catalogue_api.DeleteCheckpointResponse:
        async with refusals(context):
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
            return catalogue_api.DeleteCheckpointResponse(
                checkpoint=messages.checkpoint_message(run, record)
            )
        raise AssertionError

    async def UndeleteCheckpoint(
        self, request: catalogue_api.UndeleteCheckpointRequest, context: Context
    ) -> catalogue_api.UndeleteCheckpointResponse:
        async with refusals(context):
            run, step = step_of(request.name)
            write_id = requests.write_id_of(request)
            record = await self._store.lifecycle.undelete(
                run, step, write_id=write_id, uid=request.uid
            )
            return catalogue_api.UndeleteCheckpointResponse(
                checkpoint=messages.checkpoint_message(run, record)
            )
        raise AssertionError

    async def PurgeCheckpoint(
        self, request: catalogue_api.PurgeCheckpointRequest, context: Context
    ) -> catalogue_api.PurgeCheckpointResponse:
        async with refusals(context):
            run, step = step_of(request.name)
            await self._store.reserve.spent_on(
                self._store.lifecycle.purge,
                run,
                step,
                etag=request.etag,
                uid=request.uid,
            )
            return catalogue_api.PurgeCheckpointResponse()
        raise AssertionError


def step_of(resource: str) -> tuple[RunName, int]:
    """Returns the run and the step of a checkpoint that is called by its step.

    Raises:
        InvalidFieldError: It is called "latest" or by a tag, which may move.
    """
    name = CheckpointName.from_resource(resource)
    if isinstance(name.which, str):
        raise InvalidFieldError(
            f"name {resource!r}: expected a step, got {name.which}; get the checkpoint "
            "and give its step"
        )
    return name.run, name.which


def change_of(request: catalogue_api.UpdateCheckpointRequest) -> Change:
    """Returns what UpdateCheckpoint asks for.

    Raises:
        InvalidFieldError: Naming the field.
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
    request: catalogue_api.DeleteCheckpointRequest,
) -> timedelta | None:
    """Returns how long a checkpoint shall be undeletable; None: as its run says.

    Raises:
        InvalidFieldError: It is negative, or too long.
    """
    if not request.HasField("purge_delay"):
        return None
    return requests.duration("purge_delay", request.purge_delay, most=MAX_PURGE_DELAY)
