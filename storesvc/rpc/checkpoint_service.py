"""Rpcs of the checkpoint service: runs, checkpoints, tags and holds.

Comparisons and manifests are sent in several messages, whose memory a budget bounds.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from typing import Final

from storesvc.catalog.runs import RUN_FIELDS, RunField
from storesvc.catalog.slots import Change
from storesvc.errors import CorruptDataError, InvalidFieldError
from storesvc.format import trees
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, parse_step
from storesvc.inspect.rules import Difference, dtype_text, logical_shape
from storesvc.inspect.verify import Comparison
from storesvc.lifecycle.checkpoints import MAX_PURGE_DELAY
from storesvc.lifecycle.holds import DEFAULT_TTL
from storesvc.retention.policy import check
from storesvc.rpc import messages, requests
from storesvc.rpc.paging import list_page
from storesvc.rpc.status import Context, share_key
from storesvc.rpc.streams import MessageBudget, write
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import retention_pb2

SENT_BYTES: Final = 128 << 20
"""Memory for response messages that clients have not yet read, except chunks."""

PEER_BYTES: Final = 96 << 20
"""The part of it that one peer may use."""

PAGE: Final = 500
"""Differences per message: it fits with keys and shapes of maximum length."""

MAX_TTL: Final = timedelta(days=30)
"""Maximum lease of a hold."""


class CheckpointService:
    """The catalog: reads and changes runs, checkpoints, tags and holds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent = MessageBudget(SENT_BYTES, PEER_BYTES, purpose="responses")

    async def ListRuns(
        self, request: checkpoint_api.ListRunsRequest, context: Context
    ) -> checkpoint_api.ListRunsResponse:
        space, catalog = requests.parse_namespace(request.parent), self._store.catalog
        page = await list_page(
            request,
            request.parent,
            find=lambda last, limit: catalog.runs(space, after=last, limit=limit),
            parse=RunName.parse,
            key=str,
            show=lambda _, run: messages.run_row_message(run),
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
        write_id = requests.make_write_id(request)
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
                kind = checkpoint_api.RetentionDecision
                decisions = (messages.show_value(kind, one) for one in page)
                response = checkpoint_api.ApplyRetentionResponse(decisions=decisions)
                await write(context, response)

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
        name = CheckpointName.from_resource(request.name)
        record, migrations = await self._find(name, request)
        response = checkpoint_api.ReadManifestResponse(
            checkpoint=messages.checkpoint_message(name.run, record),
            migrations=migrations,
        )
        await write(context, response)
        await self._send_manifest(name.run, record, context)

    async def _find(
        self, name: CheckpointName, request: checkpoint_api.ReadManifestRequest
    ) -> tuple[pb.CheckpointRecord, Sequence[bytes]]:
        """Returns a checkpoint, and the migrations that are requested."""
        catalog = self._store.catalog
        if request.uid:
            looking = catalog.checkpoint_with_uid(name, request.uid)
        else:
            looking = catalog.checkpoint(name)
        if not request.with_migrations:
            return await looking, ()
        return await asyncio.gather(looking, self._store.runs.migrations(name.run))

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
        run, step = parse_checkpoint_step(request.checkpoint.name)
        write_id = requests.make_write_id(request)
        record = await self._store.lifecycle.update(
            run, step, parse_change(request), etag=request.etag, write_id=write_id
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.UpdateCheckpointResponse(checkpoint=checkpoint)

    async def DeleteCheckpoint(
        self, request: checkpoint_api.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_api.DeleteCheckpointResponse:
        run, step = parse_checkpoint_step(request.name)
        record = await self._store.reserve.spent_on(
            self._store.lifecycle.delete,
            run,
            step,
            purge_delay=parse_purge_delay(request),
            etag=request.etag,
            write_id=requests.make_write_id(request),
            uid=request.uid,
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.DeleteCheckpointResponse(checkpoint=checkpoint)

    async def UndeleteCheckpoint(
        self, request: checkpoint_api.UndeleteCheckpointRequest, context: Context
    ) -> checkpoint_api.UndeleteCheckpointResponse:
        run, step = parse_checkpoint_step(request.name)
        write_id = requests.make_write_id(request)
        record = await self._store.lifecycle.undelete(
            run, step, write_id=write_id, uid=request.uid
        )
        checkpoint = messages.checkpoint_message(run, record)
        return checkpoint_api.UndeleteCheckpointResponse(checkpoint=checkpoint)

    async def PurgeCheckpoint(
        self, request: checkpoint_api.PurgeCheckpointRequest, context: Context
    ) -> checkpoint_api.PurgeCheckpointResponse:
        run, step = parse_checkpoint_step(request.name)
        purge = self._store.lifecycle.purge
        await self._store.reserve.spent_on(
            purge, run, step, etag=request.etag, uid=request.uid
        )
        return checkpoint_api.PurgeCheckpointResponse()

    async def DiffCheckpoints(
        self, request: checkpoint_api.DiffCheckpointsRequest, context: Context
    ) -> None:
        before, after = map(CheckpointName.from_resource, (request.base, request.name))
        async with self._store.comparisons.between(before, after) as found:
            summary = summary_message(before.run, after.run, found)
            pages = await asyncio.to_thread(cut_pages, found.differences)
        # Outside the comparison, so that no other one waits while the client reads.
        with self._sent.share(share_key(context)) as share:
            await share.take(sum(page.ByteSize() for page in pages))
            response = checkpoint_api.DiffCheckpointsResponse(summary=summary)
            await write(context, response)
            for page in pages:
                await write(context, page, share)

    async def WatchCheckpoints(
        self, request: checkpoint_api.WatchCheckpointsRequest, context: Context
    ) -> None:
        parent = parse_parent(request.parent)
        watch = self._store.watcher.watch(parent, request.resume_token)
        async with aclosing(watch):
            async for event in watch:
                await write(context, messages.watch_message(event))

    async def SetTag(
        self, request: checkpoint_api.SetTagRequest, context: Context
    ) -> checkpoint_api.SetTagResponse:
        name = TagName.from_resource(request.name)
        record = await self._store.tags.set(
            name,
            parse_checkpoint(request, name),
            protected=request.protected if request.HasField("protected") else None,
            etag=request.etag,
            write_id=requests.make_write_id(request),
        )
        return checkpoint_api.SetTagResponse(tag=messages.tag_message(name, record))

    async def DeleteTag(
        self, request: checkpoint_api.DeleteTagRequest, context: Context
    ) -> checkpoint_api.DeleteTagResponse:
        name = TagName.from_resource(request.name)
        write_id = requests.make_write_id(request)
        await self._store.tags.delete(name, etag=request.etag, write_id=write_id)
        return checkpoint_api.DeleteTagResponse()

    async def ListTags(
        self, request: checkpoint_api.ListTagsRequest, context: Context
    ) -> checkpoint_api.ListTagsResponse:
        run, tags = RunName.from_resource(request.parent), self._store.tags
        page = await list_page(
            request,
            f"{request.parent}/tags",
            find=lambda last, limit: tags.list(run, after=last or "", limit=limit),
            parse=str,
            key=lambda name: name.tag,
            show=messages.tag_message,
        )
        return checkpoint_api.ListTagsResponse(
            tags=page.rows, damaged=page.damaged, next_page_token=page.token
        )

    async def CreateHold(
        self, request: checkpoint_api.CreateHoldRequest, context: Context
    ) -> checkpoint_api.CreateHoldResponse:
        checkpoint = CheckpointName.from_resource(request.parent)
        hex_id = requests.checked_request_id(request.request_id).replace("-", "")
        name, ttl = HoldName(checkpoint.run, hex_id), parse_ttl(request)
        owner = requests.checked_owner("owner", request.owner)
        record = await self._store.holds.create(
            name, checkpoint, owner=owner, ttl=ttl, uid=request.uid
        )
        hold = messages.hold_message(name, record)
        return checkpoint_api.CreateHoldResponse(hold=hold)

    async def RenewHold(
        self, request: checkpoint_api.RenewHoldRequest, context: Context
    ) -> checkpoint_api.RenewHoldResponse:
        name = HoldName.from_resource(request.name)
        hold = messages.hold_message(name, await self._store.holds.renew(name))
        return checkpoint_api.RenewHoldResponse(hold=hold)

    async def DeleteHold(
        self, request: checkpoint_api.DeleteHoldRequest, context: Context
    ) -> checkpoint_api.DeleteHoldResponse:
        await self._store.holds.delete(HoldName.from_resource(request.name))
        return checkpoint_api.DeleteHoldResponse()

    async def ListHolds(
        self, request: checkpoint_api.ListHoldsRequest, context: Context
    ) -> checkpoint_api.ListHoldsResponse:
        run, holds = RunName.from_resource(request.parent), self._store.holds
        page = await list_page(
            request,
            f"{request.parent}/holds",
            find=lambda last, limit: holds.list(run, after=last or "", limit=limit),
            parse=str,
            key=lambda name: name.hold,
            show=messages.hold_message,
        )
        return checkpoint_api.ListHoldsResponse(
            holds=page.rows, damaged=page.damaged, next_page_token=page.token
        )


def run_change(
    request: checkpoint_api.UpdateRunRequest,
) -> tuple[pb.RunRecord, list[RunField]]:
    """Returns the values that UpdateRun sets, and the names of their fields."""
    paths = requests.read_mask(request, RUN_FIELDS)
    given, record = request.run, pb.RunRecord()
    requests.check_entries("run.labels", given.labels)
    record.labels.update(given.labels)
    if given.HasField("retention"):
        check(given.retention)
        record.retention.CopyFrom(given.retention)
    if given.HasField("purge_delay"):
        requests.duration("run.purge_delay", given.purge_delay, most=MAX_PURGE_DELAY)
        record.purge_delay.CopyFrom(given.purge_delay)
    record.migrations.extend(given.migrations)
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


def parse_checkpoint_step(resource: str) -> tuple[RunName, int]:
    """Returns the run and the step of a checkpoint that is named by its step."""
    name = CheckpointName.from_resource(resource)
    if isinstance(name.which, str):
        raise InvalidFieldError(
            f"name {resource!r}: expected a step, got {name.which}; get the checkpoint "
            "and give its step"
        )
    return name.run, name.which


def parse_change(request: checkpoint_api.UpdateCheckpointRequest) -> Change:
    paths = requests.read_mask(request, ("labels", "metrics", "pinned"))
    given = request.checkpoint
    requests.check_entries("checkpoint.labels", given.labels)
    requests.check_entries("checkpoint.metrics", given.metrics)
    return Change(
        labels=dict(given.labels) if "labels" in paths else None,
        metrics=dict(given.metrics) if "metrics" in paths else None,
        pinned=given.pinned if "pinned" in paths else None,
    )


def parse_purge_delay(
    request: checkpoint_api.DeleteCheckpointRequest,
) -> timedelta | None:
    """Returns the purge delay of a deletion; None: the one of the run."""
    if not request.HasField("purge_delay"):
        return None
    return requests.duration("purge_delay", request.purge_delay, most=MAX_PURGE_DELAY)


def cut_pages(
    differences: Sequence[Difference],
) -> list[checkpoint_api.DiffCheckpointsResponse]:
    """Returns the messages for differences."""
    return [
        checkpoint_api.DiffCheckpointsResponse(
            differences=map(difference_message, differences[at : at + PAGE])
        )
        for at in range(0, len(differences), PAGE)
    ]


def summary_message(
    before: RunName, after: RunName, found: Comparison
) -> checkpoint_api.DiffSummary:
    return checkpoint_api.DiffSummary(
        base=messages.checkpoint_message(before, found.before),
        checkpoint=messages.checkpoint_message(after, found.after),
        same_leaf_count=found.same_leaf_count,
        different_leaf_count=sum(not each.is_item for each in found.differences),
    )


def difference_message(difference: Difference) -> checkpoint_api.LeafDifference:
    message = checkpoint_api.LeafDifference(
        key=difference.leaf.key,
        kind=difference.kind,
        changed_chunk_count=difference.changed_chunks,
        chunk_count=difference.leaf.grid.count,
    )
    if difference.before is not None:
        message.base_dtype = dtype_text(difference.before)
        message.base_shape.extend(logical_shape(difference.before))
    if difference.after is not None:
        message.dtype = dtype_text(difference.after)
        message.shape.extend(logical_shape(difference.after))
    return message


def parse_parent(parent: str) -> RunName | str:
    """Returns the run or the namespace to watch.

    Raises:
        InvalidFieldError: The parent is neither, or is all namespaces.
        InvalidNameError: The name is invalid.
    """
    if "/runs/" in parent:
        return RunName.from_resource(parent)
    namespace = requests.parse_namespace(parent)
    if namespace is None:
        raise InvalidFieldError(
            f"parent {parent!r}: expected one namespace, or a run of it; watch each "
            "namespace separately"
        )
    return namespace


def parse_checkpoint(
    request: checkpoint_api.SetTagRequest, name: TagName
) -> CheckpointName:
    """Returns the checkpoint to which SetTag points a tag."""
    checkpoint = CheckpointName.from_resource(request.checkpoint)
    if checkpoint.run != name.run:
        raise InvalidFieldError(
            f"checkpoint: expected one of {name.run}, got {checkpoint}; a tag names "
            "checkpoints of its own run"
        )
    return checkpoint


def parse_ttl(request: checkpoint_api.CreateHoldRequest) -> timedelta:
    if not request.HasField("ttl"):
        return DEFAULT_TTL
    ttl = requests.duration("ttl", request.ttl, most=MAX_TTL)
    if not ttl:
        raise InvalidFieldError("ttl: expected more than 0 s, got 0 s")
    return ttl
