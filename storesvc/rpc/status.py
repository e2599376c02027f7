"""Translates the errors of the service into gRPC statuses; no other module does."""

import asyncio
import traceback
from functools import partial
from typing import Final, NamedTuple, NoReturn

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from storesvc import errors
from storesvc.access.call import current
from storesvc.telemetry.scope import scope
from storesvc_proto.v1 import errors_pb2 as pb

DOMAIN: Final = "storesvc"
"""``google.rpc.ErrorInfo.domain``."""

MAX_TEXT_BYTES: Final = 1000
"""Maximum bytes of a status message. It is sent twice in headers, and gRPC drops
headers above 8 KiB completely."""

MAX_METADATA_BYTES: Final = 200
"""Maximum bytes of a value of ``ErrorInfo.metadata``."""

RETRY_SECONDS: Final[dict[type[errors.StoreError], int]] = {
    errors.StorageFullError: 60,
    errors.StorageUnavailableError: 1,
    errors.IssuerUnreachableError: 1,
    errors.AuditUnavailableError: 10,
}
"""Retry delays of errors that time alone may resolve; ``LimitExceededError`` has its
own."""

REQUEST_ID: Final = "x-request-id"
"""Trailing metadata with the id of a call, as in the log and the audit log."""

_NO_RETRY: Final = ("grpc-retry-pushback-ms", "-1")
"""Disables gRPC's transparent retries of a failed call. Its last attempt could exceed
the deadline and hide the cause; the client library retries itself."""

_PREFIX: Final = "ERROR_REASON_"


class Wire(NamedTuple):
    """The status code and the reason of an error."""

    code: int
    reason: "pb.ErrorReason.ValueType"


WIRE: Final[dict[type[errors.StoreError], Wire]] = {
    errors.InvalidFieldError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_FIELD
    ),
    errors.InvalidTreeError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_TREE
    ),
    errors.InvalidItemError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_ITEM
    ),
    errors.InvalidChunkError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_CHUNK
    ),
    errors.InvalidPageTokenError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_PAGE_TOKEN
    ),
    errors.RequestIdReusedError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_REQUEST_ID_REUSED
    ),
    errors.InvalidPolicyError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_POLICY
    ),
    errors.PolicyKeepsNothingError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_POLICY_KEEPS_NOTHING
    ),
    errors.InvalidResumeTokenError: Wire(
        code_pb2.INVALID_ARGUMENT, pb.ERROR_REASON_INVALID_RESUME_TOKEN
    ),
    errors.RunNotFoundError: Wire(code_pb2.NOT_FOUND, pb.ERROR_REASON_RUN_NOT_FOUND),
    errors.CheckpointNotFoundError: Wire(
        code_pb2.NOT_FOUND, pb.ERROR_REASON_CHECKPOINT_NOT_FOUND
    ),
    errors.CheckpointDeletedError: Wire(
        code_pb2.NOT_FOUND, pb.ERROR_REASON_CHECKPOINT_DELETED
    ),
    errors.TagNotFoundError: Wire(code_pb2.NOT_FOUND, pb.ERROR_REASON_TAG_NOT_FOUND),
    errors.HoldNotFoundError: Wire(code_pb2.NOT_FOUND, pb.ERROR_REASON_HOLD_NOT_FOUND),
    errors.UploadNotFoundError: Wire(
        code_pb2.NOT_FOUND, pb.ERROR_REASON_UPLOAD_NOT_FOUND
    ),
    errors.CheckpointExistsError: Wire(
        code_pb2.ALREADY_EXISTS, pb.ERROR_REASON_CHECKPOINT_EXISTS
    ),
    errors.UploadSupersededError: Wire(
        code_pb2.ABORTED, pb.ERROR_REASON_UPLOAD_SUPERSEDED
    ),
    errors.ConflictError: Wire(code_pb2.ABORTED, pb.ERROR_REASON_CONFLICT),
    errors.EtagMismatchError: Wire(code_pb2.ABORTED, pb.ERROR_REASON_ETAG_MISMATCH),
    errors.CheckpointNotDeletedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_CHECKPOINT_NOT_DELETED
    ),
    errors.CheckpointInUseError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_CHECKPOINT_IN_USE
    ),
    errors.TagProtectedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_TAG_PROTECTED
    ),
    errors.HoldExpiredError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_HOLD_EXPIRED
    ),
    errors.ResumeTokenExpiredError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_RESUME_TOKEN_EXPIRED
    ),
    errors.WriterUnfinishedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_WRITER_UNFINISHED
    ),
    errors.PlanMismatchError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_PLAN_MISMATCH
    ),
    errors.ProcessesDifferError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_PROCESSES_DIFFER
    ),
    errors.ChunksIncompleteError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_CHUNKS_INCOMPLETE
    ),
    errors.FormatUnsupportedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_FORMAT_UNSUPPORTED
    ),
    errors.StorageDeniedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_STORAGE_DENIED
    ),
    errors.CorruptDataError: Wire(code_pb2.DATA_LOSS, pb.ERROR_REASON_CORRUPT_DATA),
    errors.LimitExceededError: Wire(
        code_pb2.RESOURCE_EXHAUSTED, pb.ERROR_REASON_LIMIT_EXCEEDED
    ),
    errors.StorageFullError: Wire(
        code_pb2.RESOURCE_EXHAUSTED, pb.ERROR_REASON_STORAGE_FULL
    ),
    errors.StorageUnavailableError: Wire(
        code_pb2.UNAVAILABLE, pb.ERROR_REASON_STORAGE_UNAVAILABLE
    ),
    errors.QuotaExceededError: Wire(
        code_pb2.RESOURCE_EXHAUSTED, pb.ERROR_REASON_QUOTA_EXCEEDED
    ),
    errors.IdentityRequiredError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_IDENTITY_REQUIRED
    ),
    errors.InvalidTokenError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_TOKEN_INVALID
    ),
    errors.TokenExpiredError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_TOKEN_EXPIRED
    ),
    errors.TokenAudienceError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_TOKEN_AUDIENCE_MISMATCH
    ),
    errors.UnknownIssuerError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_ISSUER_UNKNOWN
    ),
    errors.InvalidCertificateError: Wire(
        code_pb2.UNAUTHENTICATED, pb.ERROR_REASON_CERTIFICATE_INVALID
    ),
    errors.IssuerUnreachableError: Wire(
        code_pb2.UNAVAILABLE, pb.ERROR_REASON_ISSUER_UNREACHABLE
    ),
    errors.PermissionDeniedError: Wire(
        code_pb2.PERMISSION_DENIED, pb.ERROR_REASON_PERMISSION_DENIED
    ),
    errors.AuditUnavailableError: Wire(
        code_pb2.UNAVAILABLE, pb.ERROR_REASON_AUDIT_UNAVAILABLE
    ),
    errors.AuditLogDisabledError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_AUDIT_LOG_DISABLED
    ),
    errors.LendingUnsupportedError: Wire(
        code_pb2.FAILED_PRECONDITION, pb.ERROR_REASON_LENDING_UNSUPPORTED
    ),
    errors.StalledError: Wire(code_pb2.DEADLINE_EXCEEDED, pb.ERROR_REASON_STALLED),
}


def reason_name(reason: "pb.ErrorReason.ValueType") -> str:
    """Returns a reason as in ``ErrorInfo.reason``: without its prefix."""
    return pb.ErrorReason.Name(reason).removeprefix(_PREFIX)


def status_of(error: errors.StoreError) -> status_pb2.Status:
    """Returns the status of an error."""
    wire = WIRE[type(error)]
    metadata = {k: _cut(v, MAX_METADATA_BYTES) for k, v in error.metadata.items()}
    if call := current.get():
        metadata["request_id"] = call.request_id
    info = error_details_pb2.ErrorInfo(
        reason=reason_name(wire.reason), domain=DOMAIN, metadata=metadata
    )
    details: list[Message] = [info]
    seconds = RETRY_SECONDS.get(type(error))
    if isinstance(error, errors.LimitExceededError):
        seconds = error.retry_seconds
    if seconds is not None:
        delay = Duration(seconds=seconds)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=wire.code, message=_cut(str(error), MAX_TEXT_BYTES))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _cut(text: str, size: int) -> str:
    """Cuts a text to a maximum of bytes: keeps its start and its end."""
    data = text.encode(errors="replace")
    if len(data) <= size:
        return text
    half = (size - 5) // 2
    ends = (data[:half], data[-half:])
    return " ... ".join(end.decode(errors="ignore") for end in ends)


async def abort(
    context: "grpc.aio.ServicerContext[object, object]", error: errors.StoreError
) -> NoReturn:
    """Ends a call with the status of an error."""
    status = rpc_status.to_status(status_of(error))
    note_status(status.code, reason_name(WIRE[type(error)].reason))
    try:
        await context.abort(
            status.code,
            status.details,
            (*status.trailing_metadata, _NO_RETRY, *request_id_trailer()),
        )
    except grpc.aio.AbortError as e:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_clear, e))
        raise
    raise AssertionError("abort returned")


def note_status(code: grpc.StatusCode, reason: str) -> None:
    """Notes how the call in progress ends, for its measurement."""
    measured = scope.get()
    if measured is not None:
        measured.status, measured.reason = code.name, reason


def request_id_trailer() -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata that identifies the call in progress."""
    call = current.get()
    return ((REQUEST_ID, call.request_id),) if call is not None else ()


def _clear(error: BaseException, _: "asyncio.Task[object]") -> None:
    """Clears the frames of an error after its call has ended.

    gRPC stores the error of an aborted call, and the frames of the error refer to the
    call: the cycle would keep a rejected request in memory until the next full garbage
    collection of Python.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
