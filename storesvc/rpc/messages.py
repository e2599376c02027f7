"""Builds the messages of the contract from the records of the service."""

from collections.abc import Iterable
from itertools import islice
from typing import Final, assert_never

from storesvc.catalog import slots
from storesvc.catalog.catalog import RunSummary
from storesvc.catalog.records import record_etag, timestamp
from storesvc.catalog.runs import run_etag
from storesvc.catalog.slots import SlotState
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc.lifecycle.holds import expire_time
from storesvc.retention.enforcement import Outcome
from storesvc.save.receipts import UploadStatus
from storesvc.watch.watcher import WatchEvent
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

_EVENT_KINDS: Final = {
    pb.Announcement.KIND_COMMIT: checkpoint_api.CheckpointEvent.KIND_COMMITTED,
    pb.Announcement.KIND_DELETE: checkpoint_api.CheckpointEvent.KIND_DELETED,
    pb.Announcement.KIND_UNDELETE: checkpoint_api.CheckpointEvent.KIND_UNDELETED,
    pb.Announcement.KIND_TAG: checkpoint_api.CheckpointEvent.KIND_TAGGED,
    pb.Announcement.KIND_UNTAG: checkpoint_api.CheckpointEvent.KIND_UNTAGGED,
    pb.Announcement.KIND_UPDATE: checkpoint_api.CheckpointEvent.KIND_UPDATED,
}


def upload_message(name: UploadName, record: pb.UploadRecord) -> upload_api.Upload:
    base = CheckpointName(name.run, record.base_step).resource if record.base else ""
    return upload_api.Upload(
        name=name.resource,
        step=record.step,
        writer_count=record.writer_count,
        labels=record.labels,
        metrics=record.metrics,
        lease_duration=record.lease_duration,
        epoch=record.epoch,
        create_time=record.create_time,
        base=base,
        resumes=bool(record.predecessor),
        owner=record.owner,
        principal=record.principal,
        state=upload_api.Upload.STATE_LIVE,
    )


def fate_message(fate: UploadStatus) -> upload_api.Upload:
    message = upload_message(fate.name, fate.record)
    match fate.slot and slots.slot_state(fate.slot):
        case None | SlotState.FREE:
            message.state = upload_api.Upload.STATE_ENDED
        case SlotState.UPLOADING:
            message.state = upload_api.Upload.STATE_LIVE
        case SlotState.COMMITTED | SlotState.DELETED | SlotState.PURGING:
            message.state = upload_api.Upload.STATE_COMMITTED
        case state:
            assert_never(state)
    message.renew_time.CopyFrom(fate.renew_time)
    message.finished_writer_count = len(fate.finished_writers)
    if message.state == upload_api.Upload.STATE_LIVE:
        writers = range(fate.record.writer_count)
        unfinished = (w for w in writers if w not in fate.finished_writers)
        message.unfinished_writers.extend(islice(unfinished, 16))
    return message


def checkpoint_message(
    run: RunName, record: pb.CheckpointRecord
) -> checkpoint_api.Checkpoint:
    message = checkpoint_api.Checkpoint(
        name=CheckpointName(run, record.step).resource,
        uid=record.upload,
        step=record.step,
        create_time=record.create_time,
        commit_time=record.commit_time,
        labels=record.labels,
        metrics=record.metrics,
        size_bytes=record.size_bytes,
        stored_bytes=record.stored_bytes,
        leaf_count=record.leaf_count,
        item_count=record.item_count,
        chunk_count=record.chunk_count,
        manifest_bytes=record.manifest_bytes,
        manifest_digest=record.manifest_digest,
        own_bytes=record.own_bytes,
        pinned=record.pinned,
        etag=record_etag(record),
        key_space="-".join(filter(None, (record.upload, record.attempt))),
        principal=record.principal,
        change_principal=record.change_principal,
    )
    if record.HasField("purge_time"):
        message.delete_time.CopyFrom(record.delete_time)
        message.purge_time.CopyFrom(record.purge_time)
    return message


def watch_message(notice: WatchEvent) -> checkpoint_api.WatchCheckpointsResponse:
    message = checkpoint_api.WatchCheckpointsResponse(resume_token=notice.token)
    change = notice.change
    if change is None:
        return message
    message.event.kind = _EVENT_KINDS[change.announcement.kind]
    message.event.tag = change.announcement.tag
    if change.checkpoint is not None:
        message.event.checkpoint.CopyFrom(
            checkpoint_message(change.run, change.checkpoint)
        )
    else:
        step = change.announcement.step
        message.event.checkpoint.name = CheckpointName(change.run, step).resource
        message.event.checkpoint.uid = change.announcement.upload
        message.event.checkpoint.step = step
    return message


def run_message(summary: RunSummary) -> checkpoint_api.Run:
    record = summary.record
    message = checkpoint_api.Run(
        name=summary.name.resource,
        uid=record.uid,
        create_time=record.create_time,
        labels=record.labels,
        etag=run_etag(record),
        change_principal=record.change_principal,
    )
    if summary.latest is not None:
        message.latest_step = summary.latest.step
    if record.HasField("retention"):
        message.retention.CopyFrom(record.retention)
    if record.HasField("purge_delay"):
        message.purge_delay.CopyFrom(record.purge_delay)
    return message


def retention_response(
    outcomes: Iterable[Outcome],
) -> checkpoint_api.ApplyRetentionResponse:
    """Returns the message for the outcomes of a retention policy."""
    return checkpoint_api.ApplyRetentionResponse(
        decisions=(
            checkpoint_api.RetentionDecision(
                step=outcome.step,
                uid=outcome.uid,
                kept=outcome.kept,
                reasons=outcome.reasons,
                own_bytes=outcome.own_bytes,
            )
            for outcome in outcomes
        )
    )


def tag_message(name: TagName, record: pb.TagRecord) -> checkpoint_api.Tag:
    return checkpoint_api.Tag(
        name=name.resource,
        checkpoint=CheckpointName(name.run, record.step).resource,
        uid=record.upload,
        protected=record.protected,
        create_time=record.create_time,
        update_time=record.update_time,
        etag=record_etag(record),
        principal=record.principal,
    )


def hold_message(name: HoldName, record: pb.HoldRecord) -> checkpoint_api.Hold:
    return checkpoint_api.Hold(
        name=name.resource,
        checkpoint=CheckpointName(name.run, record.step).resource,
        uid=record.upload,
        owner=record.owner,
        ttl=record.ttl,
        create_time=record.create_time,
        expire_time=timestamp(expire_time(record)),
        principal=record.principal,
    )
