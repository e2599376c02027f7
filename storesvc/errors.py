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


class StoreError(Exception):
    """Base class of all errors that the service raises on purpose."""

    def __init__(self, message: str, **metadata: str) -> None:
        # Storage errors may end in a full stop; messages are often continued.
        super().__init__(message.removesuffix("."))
        self.metadata = metadata
        """Values of ``google.rpc.ErrorInfo.metadata``."""


class InvalidFieldError(StoreError):
    """A field of the request is invalid."""


class InvalidTreeError(InvalidFieldError):
    """The leaf table of an upload is inconsistent."""


class InvalidItemError(InvalidFieldError):
    """An item in the leaf table of an upload breaks a rule of items."""


class InvalidChunkError(InvalidFieldError):
    """A frame or a receipt does not fit the leaf table."""


class InvalidPageTokenError(InvalidFieldError):
    """The page token was not issued for this list."""


class RequestIdReusedError(InvalidFieldError):
    """The request id was used before with a different body."""


class InvalidPolicyError(InvalidFieldError):
    """A retention policy breaks a bound, is inconsistent, or has a metric that no
    checkpoint has."""


class PolicyKeepsNothingError(InvalidFieldError):
    """A retention policy could keep no checkpoint."""


class InvalidResumeTokenError(InvalidFieldError):
    """The resume token was not issued for this watch."""


class RunNotFoundError(StoreError):
    """The run does not exist, or has no checkpoint."""


class CheckpointNotFoundError(StoreError):
    """The run has no committed checkpoint at that step."""


class CheckpointDeletedError(StoreError):
    """The checkpoint is deleted, but not yet purged."""


class TagNotFoundError(StoreError):
    """The run has no tag with that name."""


class HoldNotFoundError(StoreError):
    """The run has no hold with that name."""


class UploadNotFoundError(StoreError):
    """The upload does not exist, or was aborted."""


class CheckpointExistsError(StoreError):
    """The step is already committed."""


class UploadSupersededError(StoreError):
    """A later upload took over the step."""


class ConflictError(StoreError):
    """A concurrent call changed the same object."""


class EtagMismatchError(StoreError):
    """The object changed after its etag was read."""


class CheckpointNotDeletedError(StoreError):
    """Purge was called for a checkpoint that is not deleted."""


class CheckpointInUseError(StoreError):
    """The checkpoint is pinned, tagged, held, or the base of a live upload."""


class TagProtectedError(StoreError):
    """The tag is protected, and the request has no etag."""


class HoldExpiredError(StoreError):
    """The hold has expired."""


class ResumeTokenExpiredError(StoreError):
    """The events after the resume token are gone."""


class WriterUnfinishedError(StoreError):
    """A writer has not finished."""


class PlanMismatchError(StoreError):
    """The writers of an upload planned different trees."""


class ProcessesDifferError(StoreError):
    """Two writers of an upload hold different values of a leaf that one of them
    writes."""


class ChunksIncompleteError(StoreError):
    """Chunks are missing, or are stored by two writers."""


class FormatUnsupportedError(StoreError):
    """The store's format is not known to this code."""


class CorruptDataError(StoreError):
    """Stored bytes are missing, or differ from the bytes that were written."""


class LimitExceededError(StoreError):
    """A limit of the server was exceeded."""

    def __init__(
        self, message: str, *, retry_seconds: int | None = None, **metadata: str
    ) -> None:
        super().__init__(message, **metadata)
        self.retry_seconds = retry_seconds
        """Seconds until a retry may succeed; None: a retry cannot succeed."""


class QuotaExceededError(LimitExceededError):
    """A quota of the caller or of a namespace is used up."""


class IdentityRequiredError(StoreError):
    """The call has neither a token nor a client certificate."""


class InvalidTokenError(StoreError):
    """A token is malformed, its signature does not match, or a claim breaks a rule."""


class TokenExpiredError(StoreError):
    """A token has expired."""


class TokenAudienceError(StoreError):
    """A token was issued for another audience."""


class UnknownIssuerError(StoreError):
    """No tokens of this issuer are accepted."""


class InvalidCertificateError(StoreError):
    """A client certificate does not have exactly one URI name."""


class IssuerUnreachableError(StoreError):
    """The keys of an issuer cannot be read now."""


class PermissionDeniedError(StoreError):
    """The caller may not do this."""


class AuditUnavailableError(StoreError):
    """The audit log cannot record the call, so it changed nothing; or the log cannot
    be read."""


class AuditLogDisabledError(StoreError):
    """The server has no audit log."""


class LendingUnsupportedError(StoreError):
    """The server lends no credentials for its storage."""


class StorageDeniedError(StoreError):
    """The storage rejects the server's credentials, or denies them an operation."""


class StorageFullError(StoreError):
    """The storage is full."""


class StorageUnavailableError(StoreError):
    """The storage did not answer."""


class StalledError(StoreError):
    """The client sent or read nothing until a timeout."""
