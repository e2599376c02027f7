"""Every error this library raises.

The tree, by what a caller would do::

    StoreError
    ├── InvalidRequestError     (ValueError)       mend the call
    ├── UnsupportedLeafError    (TypeError)        mend the tree
    ├── MismatchError           (ValueError)       mend the restore target
    ├── StructureError          (ValueError)       restore by the model's code
    ├── NotFoundError           (LookupError)      ask for what exists
    ├── AlreadyExistsError                         save another step
    ├── ConflictError                              begin the save again
    ├── PeerFailedError                               mend the process that it names
    ├── PreconditionError                          do first what is missing
    ├── DataLossError                              use another checkpoint
    ├── LimitError                                 free space, or send less
    └── UnavailableError        (ConnectionError)  try again later

``StoreError.reason`` holds the precise cause: the name of an ``ErrorReason`` of
the contract (``proto/storesvc/v1/errors.proto``), or "" for causes on this side.
Messages are for people; no program needs to read them.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_log = logging.getLogger(__name__)


class StoreError(Exception):
    """Base of every error of this library."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] = MappingProxyType({}),
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """The name of an ``ErrorReason`` without its prefix, or ""."""
        self.metadata = metadata
        """What the message mentions, for programs."""
        self.retry_seconds = retry_seconds
        """After how long the server expects that a retry may succeed; None: it did not
        say."""


class InvalidRequestError(StoreError, ValueError):
    """An argument, or what it says to the server, breaks a rule."""


class UnsupportedLeafError(StoreError, TypeError):
    """A tree holds something that a checkpoint cannot."""


class MismatchError(StoreError, ValueError):
    """A checkpoint does not fit the target of a restore; lists every leaf."""


class StructureError(StoreError, ValueError):
    """The structure of a model that a checkpoint holds is damaged, names what was
    not allowed, or lacks what no document can hold."""


class NotFoundError(StoreError, LookupError):
    """There is no such run, checkpoint, tag, hold or leaf."""


class AlreadyExistsError(StoreError):
    """The step is committed, and checkpoints are write-once."""


class ConflictError(StoreError):
    """Another call changed the same object, or took the step over."""


class PeerFailedError(StoreError):
    """Another process of the job has given up its part of a save or a restore; it says
    why, and raises that itself."""


class PreconditionError(StoreError):
    """Something has to be done before this call."""


class DataLossError(StoreError):
    """Stored bytes are missing, or are not those that were saved."""


class LimitError(StoreError):
    """A limit of the server or of its storage."""


class UnavailableError(StoreError, ConnectionError):
    """The server could not be reached, or did not answer in time."""


BY_REASON: Final[Mapping[str, type[StoreError]]] = {
    "INVALID_FIELD": InvalidRequestError,
    "INVALID_TREE": InvalidRequestError,
    "INVALID_CHUNK": InvalidRequestError,
    "REQUEST_ID_REUSED": InvalidRequestError,
    "INVALID_PAGE_TOKEN": InvalidRequestError,
    "RUN_NOT_FOUND": NotFoundError,
    "CHECKPOINT_NOT_FOUND": NotFoundError,
    "INVALID_POLICY": InvalidRequestError,
    "POLICY_KEEPS_NOTHING": InvalidRequestError,
    "INVALID_RESUME_TOKEN": InvalidRequestError,
    "CHECKPOINT_DELETED": NotFoundError,
    "TAG_NOT_FOUND": NotFoundError,
    "HOLD_NOT_FOUND": NotFoundError,
    "ETAG_MISMATCH": ConflictError,
    "CHECKPOINT_NOT_DELETED": PreconditionError,
    "CHECKPOINT_IN_USE": PreconditionError,
    "TAG_PROTECTED": PreconditionError,
    "HOLD_EXPIRED": PreconditionError,
    "RESUME_TOKEN_EXPIRED": PreconditionError,
    "UPLOAD_NOT_FOUND": ConflictError,
    "CHECKPOINT_EXISTS": AlreadyExistsError,
    "UPLOAD_SUPERSEDED": ConflictError,
    "CONFLICT": ConflictError,
    "WRITER_UNFINISHED": PreconditionError,
    "PLAN_MISMATCH": PreconditionError,
    "PROCESSES_DIFFER": PreconditionError,
    "CHUNKS_INCOMPLETE": PreconditionError,
    "FORMAT_UNSUPPORTED": PreconditionError,
    "CORRUPT_DATA": DataLossError,
    "LIMIT_EXCEEDED": LimitError,
    "STORAGE_DENIED": PreconditionError,
    "STORAGE_FULL": LimitError,
    "STORAGE_UNAVAILABLE": UnavailableError,
    "STALLED": UnavailableError,
}
"""The error of each reason of the contract."""

_BY_CODE: Final[Mapping[grpc.StatusCode, type[StoreError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.ABORTED: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
}
"""For reasons that this release does not know, and answers that have none."""


@contextmanager
def translated(address: str) -> Generator[None]:
    """Raises this library's error for any ``grpc.RpcError`` raised inside.

    Use it around the iteration of a stream too: a stream fails late. What gRPC raised
    is not chained to it: the sentence has its cause, and a user reads one traceback. It
    is in the log at level DEBUG.
    """
    try:
        yield
    except grpc.RpcError as e:
        _log.debug("call of %s failed", address, exc_info=e)
        raise _error(e, address) from None
    except ValueError as e:  # what gRPC says of a channel that was closed
        if "closed" not in str(e):
            raise
        raise InvalidRequestError(
            f"the client of {address} is closed; connect again"
        ) from None


def _error(e: grpc.RpcError, address: str) -> StoreError:
    assert isinstance(e, grpc.Call)  # gRPC raises them as one object
    info, retry_seconds = _details(e)
    if info is not None:
        kind = BY_REASON.get(info.reason) or _BY_CODE.get(e.code(), StoreError)
        return kind(
            e.details(),
            reason=info.reason,
            metadata=dict(info.metadata),
            retry_seconds=retry_seconds,
        )
    if e.code() is grpc.StatusCode.UNAVAILABLE:
        details = (e.details() or "no cause given").removesuffix(": OK")
        cause = details.rpartition(": ")[2].strip("[]")
        return UnavailableError(
            f"store {address} cannot be reached ({cause}); start its server, or "
            "correct the address"
        )
    if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(
            f"store {address} did not answer in time; try again, or allow more time"
        )
    if e.code() is grpc.StatusCode.CANCELLED:  # by the server: it ends its calls
        return UnavailableError(
            f"store {address} ended the call, as a server does that stops; try again"
        )
    kind = _BY_CODE.get(e.code(), StoreError)
    return kind(f"store {address} failed: {e.code().name}: {e.details()}")


def _details(
    e: grpc.Call,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """The ``ErrorInfo`` of an answer of a storesvc server, and its retry delay in
    seconds."""
    try:
        status = rpc_status.from_call(e)
    except ValueError:  # details that contradict the status: not from our server
        return None, None
    found, seconds = None, None
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == "storesvc":
            found = info
        elif detail.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return found, seconds
