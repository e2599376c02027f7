"""Errors of the service.

The tree::

    StoreError
    ├── InvalidFieldError
    │   ├── InvalidTreeError
    │   ├── InvalidItemError
    │   ├── InvalidChunkError
    │   ├── InvalidPageTokenError
    │   ├── InvalidPolicyError
    │   ├── PolicyKeepsNothingError
    │   ├── InvalidResumeTokenError
    │   └── RequestIdReusedError
    ├── RunNotFoundError
    ├── CheckpointNotFoundError
    ├── CheckpointDeletedError
    ├── TagNotFoundError
    ├── HoldNotFoundError
    ├── UploadNotFoundError
    ├── CheckpointExistsError
    ├── UploadSupersededError
    ├── ConflictError
    ├── EtagMismatchError
    ├── CheckpointNotDeletedError
    ├── CheckpointInUseError
    ├── TagProtectedError
    ├── HoldExpiredError
    ├── ResumeTokenExpiredError
    ├── WriterUnfinishedError
    ├── PlanMismatchError
    ├── ProcessesDifferError
    ├── ChunksIncompleteError
    ├── FormatUnsupportedError
    ├── CorruptDataError
    ├── LimitExceededError
    │   └── QuotaExceededError
    ├── IdentityRequiredError
    ├── InvalidTokenError
    ├── TokenExpiredError
    ├── TokenAudienceError
    ├── UnknownIssuerError
    ├── InvalidCertificateError
    ├── IssuerUnreachableError
    ├── PermissionDeniedError
    ├── AuditUnavailableError
    ├── AuditLogDisabledError
    ├── LendingUnsupportedError
    ├── StorageDeniedError
    ├── StorageFullError
    ├── StorageUnavailableError
    └── StalledError

A message is one sentence: place, expected, got, what to do. Values in it that a program
may need are also in ``metadata``. This module does not depend on gRPC: only
``storesvc.rpc.status`` translates these errors into statuses.
"""

from typing import ClassVar


class StoreError(Exception):
    """Base class of all errors that the service raises on purpose."""

    code: ClassVar[str]
    """Name of the status code of gRPC."""

    reason: ClassVar[str]
    """Name of the ``ErrorReason`` of the contract, without its prefix."""

    retry_seconds: int | None = None
    """Seconds until a retry may succeed; None: time alone resolves nothing."""

    def __init__(self, message: str, **metadata: str) -> None:
        # Storage errors may end in a full stop; messages are often continued.
        super().__init__(message.removesuffix("."))
        self.metadata = metadata
        """Values of ``google.rpc.ErrorInfo.metadata``."""


class InvalidFieldError(StoreError):
    """A field of the request is invalid."""

    code, reason = "INVALID_ARGUMENT", "INVALID_FIELD"


class InvalidTreeError(InvalidFieldError):
    """The leaf table of an upload is inconsistent."""

    code, reason = "INVALID_ARGUMENT", "INVALID_TREE"


class InvalidItemError(InvalidFieldError):
    """An item in the leaf table of an upload breaks a rule of items."""

    code, reason = "INVALID_ARGUMENT", "INVALID_ITEM"


class InvalidChunkError(InvalidFieldError):
    """A frame or a receipt does not fit the leaf table."""

    code, reason = "INVALID_ARGUMENT", "INVALID_CHUNK"


class InvalidPageTokenError(InvalidFieldError):
    """The page token was not issued for this list."""

    code, reason = "INVALID_ARGUMENT", "INVALID_PAGE_TOKEN"


class RequestIdReusedError(InvalidFieldError):
    """The request id was used before with a different body."""

    code, reason = "INVALID_ARGUMENT", "REQUEST_ID_REUSED"


class InvalidPolicyError(InvalidFieldError):
    """A retention policy breaks a bound, is inconsistent, or has a metric that no
    checkpoint has."""

    code, reason = "INVALID_ARGUMENT", "INVALID_POLICY"


class PolicyKeepsNothingError(InvalidFieldError):
    """A retention policy could keep no checkpoint."""

    code, reason = "INVALID_ARGUMENT", "POLICY_KEEPS_NOTHING"


class InvalidResumeTokenError(InvalidFieldError):
    """The resume token was not issued for this watch."""

    code, reason = "INVALID_ARGUMENT", "INVALID_RESUME_TOKEN"


class RunNotFoundError(StoreError):
    """The run does not exist, or has no checkpoint."""

    code, reason = "NOT_FOUND", "RUN_NOT_FOUND"


class CheckpointNotFoundError(StoreError):
    """The run has no committed checkpoint at that step."""

    code, reason = "NOT_FOUND", "CHECKPOINT_NOT_FOUND"


class CheckpointDeletedError(StoreError):
    """The checkpoint is deleted, but not yet purged."""

    code, reason = "NOT_FOUND", "CHECKPOINT_DELETED"


class TagNotFoundError(StoreError):
    """The run has no tag with that name."""

    code, reason = "NOT_FOUND", "TAG_NOT_FOUND"


class HoldNotFoundError(StoreError):
    """The run has no hold with that name."""

    code, reason = "NOT_FOUND", "HOLD_NOT_FOUND"


class UploadNotFoundError(StoreError):
    """The upload does not exist, or was aborted."""

    code, reason = "NOT_FOUND", "UPLOAD_NOT_FOUND"


class CheckpointExistsError(StoreError):
    """The step is already committed."""

    code, reason = "ALREADY_EXISTS", "CHECKPOINT_EXISTS"


class UploadSupersededError(StoreError):
    """A later upload took over the step."""

    code, reason = "ABORTED", "UPLOAD_SUPERSEDED"


class ConflictError(StoreError):
    """A concurrent call changed the same object."""

    code, reason = "ABORTED", "CONFLICT"


class EtagMismatchError(StoreError):
    """The object changed after its etag was read."""

    code, reason = "ABORTED", "ETAG_MISMATCH"


class CheckpointNotDeletedError(StoreError):
    """Purge was called for a checkpoint that is not deleted."""

    code, reason = "FAILED_PRECONDITION", "CHECKPOINT_NOT_DELETED"


class CheckpointInUseError(StoreError):
    """The checkpoint is pinned, tagged, held, or the base of a live upload."""

    code, reason = "FAILED_PRECONDITION", "CHECKPOINT_IN_USE"


class TagProtectedError(StoreError):
    """The tag is protected, and the request has no etag."""

    code, reason = "FAILED_PRECONDITION", "TAG_PROTECTED"


class HoldExpiredError(StoreError):
    """The hold has expired."""

    code, reason = "FAILED_PRECONDITION", "HOLD_EXPIRED"


class ResumeTokenExpiredError(StoreError):
    """The events after the resume token are gone."""

    code, reason = "FAILED_PRECONDITION", "RESUME_TOKEN_EXPIRED"


class WriterUnfinishedError(StoreError):
    """A writer has not finished."""

    code, reason = "FAILED_PRECONDITION", "WRITER_UNFINISHED"


class PlanMismatchError(StoreError):
    """The writers of an upload planned different trees."""

    code, reason = "FAILED_PRECONDITION", "PLAN_MISMATCH"


class ProcessesDifferError(StoreError):
    """Two writers of an upload hold different values of a leaf that one of them
    writes."""

    code, reason = "FAILED_PRECONDITION", "PROCESSES_DIFFER"


class ChunksIncompleteError(StoreError):
    """Chunks are missing, or are stored by two writers."""

    code, reason = "FAILED_PRECONDITION", "CHUNKS_INCOMPLETE"


class FormatUnsupportedError(StoreError):
    """The store's format is not known to this code."""

    code, reason = "FAILED_PRECONDITION", "FORMAT_UNSUPPORTED"


class CorruptDataError(StoreError):
    """Stored bytes are missing, or differ from the bytes that were written."""

    code, reason = "DATA_LOSS", "CORRUPT_DATA"


class LimitExceededError(StoreError):
    """A limit of the server was exceeded."""

    code, reason = "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"

    def __init__(
        self, message: str, *, retry_seconds: int | None = None, **metadata: str
    ) -> None:
        super().__init__(message, **metadata)
        self.retry_seconds = retry_seconds


class QuotaExceededError(LimitExceededError):
    """A quota of the caller or of a namespace is used up."""

    code, reason = "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED"


class IdentityRequiredError(StoreError):
    """The call has neither a token nor a client certificate."""

    code, reason = "UNAUTHENTICATED", "IDENTITY_REQUIRED"


class InvalidTokenError(StoreError):
    """A token is malformed, its signature does not match, or a claim breaks a rule."""

    code, reason = "UNAUTHENTICATED", "TOKEN_INVALID"


class TokenExpiredError(StoreError):
    """A token has expired."""

    code, reason = "UNAUTHENTICATED", "TOKEN_EXPIRED"


class TokenAudienceError(StoreError):
    """A token was issued for another audience."""

    code, reason = "UNAUTHENTICATED", "TOKEN_AUDIENCE_MISMATCH"


class UnknownIssuerError(StoreError):
    """No tokens of this issuer are accepted."""

    code, reason = "UNAUTHENTICATED", "ISSUER_UNKNOWN"


class InvalidCertificateError(StoreError):
    """A client certificate does not have exactly one URI name."""

    code, reason = "UNAUTHENTICATED", "CERTIFICATE_INVALID"


class IssuerUnreachableError(StoreError):
    """The keys of an issuer cannot be read now."""

    code, reason = "UNAVAILABLE", "ISSUER_UNREACHABLE"
    retry_seconds = 1


class PermissionDeniedError(StoreError):
    """The caller may not do this."""

    code, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class AuditUnavailableError(StoreError):
    """The audit log cannot record the call, so it changed nothing; or the log cannot
    be read."""

    code, reason = "UNAVAILABLE", "AUDIT_UNAVAILABLE"
    retry_seconds = 10


class AuditLogDisabledError(StoreError):
    """The server has no audit log."""

    code, reason = "FAILED_PRECONDITION", "AUDIT_LOG_DISABLED"


class LendingUnsupportedError(StoreError):
    """The server lends no credentials for its storage."""

    code, reason = "FAILED_PRECONDITION", "LENDING_UNSUPPORTED"


class StorageDeniedError(StoreError):
    """The storage rejects the server's credentials, or denies them an operation."""

    code, reason = "FAILED_PRECONDITION", "STORAGE_DENIED"


class StorageFullError(StoreError):
    """The storage is full."""

    code, reason = "RESOURCE_EXHAUSTED", "STORAGE_FULL"
    retry_seconds = 60


class StorageUnavailableError(StoreError):
    """The storage did not answer."""

    code, reason = "UNAVAILABLE", "STORAGE_UNAVAILABLE"
    retry_seconds = 1


class StalledError(StoreError):
    """The client sent or read nothing until a timeout."""

    code, reason = "DEADLINE_EXCEEDED", "STALLED"
