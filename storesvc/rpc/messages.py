"""Builds the messages of the contract from the records of the service."""

from itertools import islice
from typing import Any, Final, TypeVar, assert_never

from google.protobuf.message import Message

from storesvc.catalog import slots
from storesvc.catalog.catalog import RunSummary
from storesvc.catalog.records import record_etag, timestamp
from storesvc.catalog.runs import run_etag
from storesvc.catalog.slots import SlotState
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc.lifecycle.holds import expire_time
from storesvc.save.receipts import UploadStatus
from storesvc.watch.watcher import WatchEvent
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

M = TypeVar("M", bound=Message)

_EVENT_KINDS: Final = {
    pb.Announcement.KIND_COMMIT: checkpoint_api.CheckpointEvent.KIND_COMMITTED,
    pb.Announcement.KIND_DELETE: checkpoint_api.CheckpointEvent.KIND_DELETED,
    pb.Announcement.KIND_UNDELETE: checkpoint_api.CheckpointEvent.KIND_UNDELETED,
    pb.Announcement.KIND_TAG: checkpoint_api.CheckpointEvent.KIND_TAGGED,
    pb.Announcement.KIND_UNTAG: checkpoint_api.CheckpointEvent.KIND_UNTAGGED,
    pb.Announcement.KIND_UPDATE: checkpoint_api.CheckpointEvent.KIND_UPDATED,
}


def _show_record(kind: type[M], record: Message, **given: Any) -> M:
    """Returns a message with the fields of a record that it has, too, and others."""
    known = kind.DESCRIPTOR.fields_by_name
    shared = {f.name: value for f, value in record.ListFields() if f.name in known}
    return kind(**{**shared, **given})


def show_value(kind: type[M], value: object) -> M:
    """Returns a message whose fields are the attributes of a value."""
    names = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: getattr(value, name) for name in names})


def upload_message(name: UploadName, record: pb.UploadRecord) -> upload_api.Upload:
    base = CheckpointName(name.run, record.base_step).resource if record.base else ""
    return _show_record(
        upload_api.Upload,
        record,
        name=name.resource,
        base=base,
        resumes=bool(record.predecessor),
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
    return _show_record(
        checkpoint_api.Checkpoint,
        record,
        name=CheckpointName(run, record.step).resource,
        uid=record.upload,
        etag=record_etag(record),
        key_space="-".join(filter(None, (record.upload, record.attempt))),
    )


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
    return _show_record(
        checkpoint_api.Run,
        summary.record,
        name=summary.name.resource,
        etag=run_etag(summary.record),
        latest_step=None if summary.latest is None else summary.latest.step,
    )


def run_row_message(summary: RunSummary) -> checkpoint_api.Run:
    """Returns the message for a run of a list, without its migrations."""
    message = run_message(summary)
    message.ClearField("migrations")
    return message


def tag_message(name: TagName, record: pb.TagRecord) -> checkpoint_api.Tag:
    return _show_record(
        checkpoint_api.Tag,
        record,
        name=name.resource,
        checkpoint=CheckpointName(name.run, record.step).resource,
        uid=record.upload,
        etag=record_etag(record),
    )


def hold_message(name: HoldName, record: pb.HoldRecord) -> checkpoint_api.Hold:
    return _show_record(
        checkpoint_api.Hold,
        record,
        name=name.resource,
        checkpoint=CheckpointName(name.run, record.step).resource,
        uid=record.upload,
        expire_time=timestamp(expire_time(record)),
    )
