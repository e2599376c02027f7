"""Rpcs of runs and their retention policies."""

from contextlib import aclosing
from dataclasses import replace

from storesvc.catalog.runs import RUN_FIELDS, RunField
from storesvc.errors import InvalidFieldError
from storesvc.format.names import RunName
from storesvc.lifecycle.checkpoints import MAX_PURGE_DELAY
from storesvc.retention.policy import check
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context
from storesvc.rpc.paging import list_page
from storesvc.rpc.streams import write
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import retention_pb2


class RunCalls:
    """Reads and updates runs, and applies their retention policies."""

    _store: Store

    async def ListRuns(
        self, request: checkpoint_api.ListRunsRequest, context: Context
    ) -> checkpoint_api.ListRunsResponse:
        space, catalog = requests.namespace_of(request.parent), self._store.catalog
        page = await list_page(
            request,
            request.parent,
            find=lambda last, limit: catalog.runs(space, after=last, limit=limit),
            parse=RunName.parse,
            key=str,
            show=lambda _, run: messages.run_message(run),
        )
        return checkpoint_api.ListRunsResponse(
            runs=page.rows, damaged=page.damaged, next_page_token=page.token
        )

    async def GetRun(
        self, request: checkpoint_api.GetRunRequest, context: Context
    ) -> checkpoint_api.GetRunResponse:
        summary = await self._store.catalog.run(RunName.from_resource(request.name))
        return checkpoint_api.GetRunResponse(run=messages.run_message(summary))

    async def UpdateRun(
        self, request: checkpoint_api.UpdateRunRequest, context: Context
    ) -> checkpoint_api.UpdateRunResponse:
        name = RunName.from_resource(request.run.name)
        write_id = requests.write_id_of(request)
        given, fields = run_change(request)
        if given.HasField("retention"):
            await self._store.retention.check(name, given.retention)
        record = await self._store.runs.update(
            name, given, fields, etag=request.etag, write_id=write_id
        )
        if "retention" in fields:
            self._store.recent_commits.add(name)
        summary = replace(await self._store.catalog.run(name), record=record)
        return checkpoint_api.UpdateRunResponse(run=messages.run_message(summary))

    async def ApplyRetention(
        self, request: checkpoint_api.ApplyRetentionRequest, context: Context
    ) -> None:
        name, policy = RunName.from_resource(request.name), trial_policy(request)
        retention = self._store.retention
        is_trial = request.validate_only
        pages = retention.preview(name, policy) if is_trial else retention.apply(name)
        async with aclosing(pages):
            async for page in pages:
                await write(context, messages.retention_response(page))


def run_change(
    request: checkpoint_api.UpdateRunRequest,
) -> tuple[pb.RunRecord, list[RunField]]:
    """Returns the values that UpdateRun sets, and the names of their fields.

    Raises:
        InvalidFieldError: A field is invalid; names it.
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
    request: checkpoint_api.ApplyRetentionRequest,
) -> retention_pb2.RetentionPolicy | None:
    """Returns the policy for ApplyRetention to try; None: the policy of the run.

    Raises:
        InvalidFieldError: The request has a policy, but would apply it.
        InvalidPolicyError: It breaks a bound.
        PolicyKeepsNothingError: It could keep no checkpoint.
    """
    if not request.HasField("policy"):
        return None
    if not request.validate_only:
        raise InvalidFieldError(
            "policy: expected validate_only with it, got an apply; to apply a policy, "
            "set it with UpdateRun first"
        )
    check(request.policy)
    return request.policy
