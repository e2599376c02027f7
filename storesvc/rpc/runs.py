"""Calls that set runs up, and apply their retention policies."""

from contextlib import aclosing
from dataclasses import replace

from storesvc.catalog.runs import RUN_FIELDS, RunField
from storesvc.errors import InvalidFieldError
from storesvc.format.names import RunName
from storesvc.lifecycle.checkpoints import MAX_PURGE_DELAY
from storesvc.retention.validation import check
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, refusals, write
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api
from storesvc_proto.v1 import retention_pb2


class RunCalls:
    """Sets runs up, and applies their retention policies."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def UpdateRun(
        self, request: catalogue_api.UpdateRunRequest, context: Context
    ) -> catalogue_api.UpdateRunResponse:
        async with refusals(context):
            name = RunName.from_resource(request.run.name)
            write_id = requests.write_id_of(request)
            record = await self._store.runs.update(
                name, *change_of(request), etag=request.etag, write_id=write_id
            )
            summary = replace(await self._store.catalogue.run(name), record=record)
            return catalogue_api.UpdateRunResponse(run=messages.run_message(summary))
        raise AssertionError

    async def ApplyRetention(  # as ReadChunks
        self, request: catalogue_api.ApplyRetentionRequest, context: Context
    ) -> None:
        async with refusals(context):
            name, policy = RunName.from_resource(request.name), trial_policy(request)
            retaining = self._store.retaining
            pages = (
                retaining.preview(name, policy)
                if request.validate_only
                else retaining.apply(name)
            )
            async with aclosing(pages):
                async for page in pages:
                    await write(context, messages.retention_response(page))


def change_of(
    request: catalogue_api.UpdateRunRequest,
) -> tuple[pb.RunRecord, list[RunField]]:
    """Returns what UpdateRun sets, and which fields of it.

    Raises:
        InvalidFieldError: Naming the field.
        InvalidPolicyError: The policy breaks a bound.
        PolicyKeepsNothingError: The policy could keep no checkpoint.
    """
    paths = set(request.update_mask.paths)
    if not paths or not paths <= set(RUN_FIELDS):
        raise InvalidFieldError(
            f"update_mask: expected some of {', '.join(RUN_FIELDS)}, got "
            f"{', '.join(sorted(paths))[:200] or 'none'}"
        )
    given, record = request.run, pb.RunRecord()
    requests.check_entries("run.labels", given.labels)
    record.labels.update(given.labels)
    if given.HasField("retention"):
        check(given.retention)
        record.retention.CopyFrom(given.retention)
    if given.HasField("purge_delay"):
        requests.duration("run.purge_delay", given.purge_delay, most=MAX_PURGE_DELAY)
        record.purge_delay.CopyFrom(given.purge_delay)
    return record, [field for field in RUN_FIELDS if field in paths]


def trial_policy(
    request: catalogue_api.ApplyRetentionRequest,
) -> retention_pb2.RetentionPolicy | None:
    """Returns the policy that ApplyRetention is to try; None: that of the run.

    Raises:
        InvalidFieldError: It would be applied, not tried.
        InvalidPolicyError: It breaks a bound.
        PolicyKeepsNothingError: It could keep no checkpoint.
    """
    if not request.HasField("policy"):
        return None
    if not request.validate_only:
        raise InvalidFieldError(
            "policy: expected validate_only with it; to apply it, make it the policy "
            "of the run with UpdateRun first"
        )
    check(request.policy)
    return request.policy
