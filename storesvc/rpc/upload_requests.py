"""Parses and checks the requests of the upload service.

The requests that carry chunks are parsed without a copy of the chunks' bytes.
"""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final

from storesvc.access.call import require
from storesvc.access.policy import Permission
from storesvc.errors import InvalidFieldError
from storesvc.format import wire
from storesvc.format.names import MAX_STEP, CheckpointName, RunName, UploadName
from storesvc.format.wire import Frame
from storesvc.rpc import requests
from storesvc.rpc.permissions import authorize
from storesvc.rpc.request_limits import check_counts
from storesvc.rpc.streams import check_part, missing, unexpected
from storesvc.save.receipts import check_report
from storesvc.save.uploads import DEFAULT_LEASE, NewUpload
from storesvc_proto.v1 import report_pb2, tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api

MAX_WRITERS: Final = 65536
"""Maximum writers of an upload."""

MAX_LEASE: Final = timedelta(days=30)
"""Maximum lease of an upload."""

_FRAME_TAG: Final = wire.tag(upload_api.WriteChunksRequest.FRAME_FIELD_NUMBER)


def new_upload(run: RunName, upload: upload_api.Upload) -> NewUpload:
    """Returns the upload that BeginUpload describes.

    Raises:
        InvalidFieldError: A field is invalid; names it.
    """
    if not 0 <= upload.step <= MAX_STEP:
        raise InvalidFieldError(f"upload.step: expected 0 or more, got {upload.step}")
    if not 1 <= upload.writer_count <= MAX_WRITERS:
        raise InvalidFieldError(
            f"upload.writer_count: expected 1 to {MAX_WRITERS}, got "
            f"{upload.writer_count}"
        )
    lease = requests.duration(
        "upload.lease_duration", upload.lease_duration, most=MAX_LEASE
    )
    requests.check_entries("upload.labels", upload.labels)
    requests.check_entries("upload.metrics", upload.metrics)
    return NewUpload(
        step=upload.step,
        writer_count=upload.writer_count,
        labels=dict(sorted(upload.labels.items())),
        metrics=dict(sorted(upload.metrics.items())),
        lease=lease or DEFAULT_LEASE,
        base=base_of(run, upload.base),
        owner=requests.checked_owner("upload.owner", upload.owner),
        body=upload.SerializeToString(deterministic=True),
    )


def base_of(run: RunName, base: str) -> CheckpointName | None:
    """Returns the base of an upload; None: it has none.

    Raises:
        InvalidFieldError: The base belongs to another run.
    """
    if not base:
        return None
    name = CheckpointName.from_resource(base)
    if name.run != run:
        raise InvalidFieldError(
            f"upload.base: expected a checkpoint of {run}, got {name}; bytes are not "
            "shared between runs"
        )
    return name


def upload_name(parent: str, request_id: str) -> UploadName:
    """Returns the name of the upload that a request id creates.

    Raises:
        InvalidFieldError: The id is not a UUID in its canonical form.
    """
    hex_id = requests.checked_request_id(request_id).replace("-", "")
    return UploadName(RunName.from_resource(parent), hex_id)


def writer_report(
    opening: upload_api.FinishWriterRequest,
) -> report_pb2.WriterReport | None:
    """Returns the report of a writer; None: it sent none.

    Raises:
        InvalidFieldError: A field is invalid; names it.
    """
    if not opening.HasField("report"):
        return None
    # What this release does not know is not kept either: the record of the checkpoint
    # would grow by it.
    opening.report.DiscardUnknownFields()
    requests.checked_owner("report.owner", opening.report.owner)
    check_report(opening.report)
    return opening.report


def part_of(request: bytes) -> Frame | upload_api.WriteChunksRequest:
    """Returns the frame of a serialised WriteChunksRequest, or one without a frame.

    Raises:
        InvalidFieldError: The bytes are no such request.
    """
    found = wire.split(request, _FRAME_TAG)
    if found is not None:
        return found
    message = requests.parsed(upload_api.WriteChunksRequest, request)
    if message.HasField("frame"):
        return Frame(message.frame, memoryview(message.frame.data))
    return message


async def opening_of(
    stream: AsyncIterator[Frame | upload_api.WriteChunksRequest],
) -> upload_api.WriterRef:
    """Returns the opening of a WriteChunks stream, its first message, once the
    permissions that it requires are checked.

    Raises:
        InvalidFieldError: There is none, or it has another part.
        PermissionDeniedError: The caller may not write the upload.
    """
    opening = await anext(stream, None)
    if opening is None:
        raise missing("open")
    if isinstance(opening, Frame):
        raise unexpected("open", "frame")
    check_part(opening, "open")
    await authorize("WriteChunks", opening)
    return opening.open


async def stored_parts(
    run: RunName, stream: AsyncIterator[Frame | upload_api.WriteChunksRequest]
) -> AsyncIterator[Frame | tree_pb2.ChunkTable]:
    """Yields the parts of the messages after the opening.

    Raises:
        InvalidFieldError: A message has another part.
        PermissionDeniedError: The caller may not refer to data files of the run.
    """
    async for request in stream:
        if isinstance(request, Frame):
            check_counts(request.columns)
            yield request
        else:
            check_part(request, "frame", "placed")
            check_counts(request)
            require(Permission.UPLOADS_PLACE, run)
            yield request.placed
