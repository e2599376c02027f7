"""What the service refuses, in its own words.

The tree::

    StoreError
    ├── InvalidFieldError
    │   ├── InvalidTreeError
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
    ├── StorageDeniedError
    ├── StorageFullError
    ├── StorageUnavailableError
    └── StalledError

A message is one sentence: place, expected, got, what to do. What it mentions and
a program may want is in ``metadata`` too. Nothing here knows of gRPC:
``storesvc.rpc.status`` alone turns these into statuses.
"""


class StoreError(Exception):
    """Base of every refusal."""

    def __init__(self, message: str, **metadata: str) -> None:
        # what a storage told at its end may have one, and others go on after it
        super().__init__(message.removesuffix("."))
        self.metadata = metadata
        """Values for ``google.rpc.ErrorInfo.metadata``."""


class InvalidFieldError(StoreError):
    """A field of the request is malformed."""


class InvalidTreeError(InvalidFieldError):
    """The leaf table of an upload contradicts itself."""


class InvalidChunkError(InvalidFieldError):
    """A frame or a receipt does not fit the leaf table."""


class InvalidPageTokenError(InvalidFieldError):
    """The page token was not made for this list."""


class RequestIdReusedError(InvalidFieldError):
    """The request id was used with another body."""


class InvalidPolicyError(InvalidFieldError):
    """A retention policy contradicts itself."""


class PolicyKeepsNothingError(InvalidFieldError):
    """A retention policy that could keep no checkpoint."""


class InvalidResumeTokenError(InvalidFieldError):
    """The resume token was not made for this watch."""


class RunNotFoundError(StoreError):
    """No run of that name has a checkpoint."""


class CheckpointNotFoundError(StoreError):
    """The run has no committed checkpoint at that step."""


class CheckpointDeletedError(StoreError):
    """The checkpoint was deleted, and not yet purged."""


class TagNotFoundError(StoreError):
    """The run has no tag of that name."""


class HoldNotFoundError(StoreError):
    """The run has no hold of that name."""


class UploadNotFoundError(StoreError):
    """No upload of that name, or it was aborted."""


class CheckpointExistsError(StoreError):
    """The step is committed."""


class UploadSupersededError(StoreError):
    """A later upload took the step over."""


class ConflictError(StoreError):
    """Another call changed the same object at the same time."""


class EtagMismatchError(StoreError):
    """The object changed since its etag was read."""


class CheckpointNotDeletedError(StoreError):
    """Only a deleted checkpoint can be purged."""


class CheckpointInUseError(StoreError):
    """The checkpoint is pinned, tagged, held, or the base of a live upload."""


class TagProtectedError(StoreError):
    """The tag is protected, and its etag was not given."""


class HoldExpiredError(StoreError):
    """The hold has expired."""


class ResumeTokenExpiredError(StoreError):
    """The events after the resume token are gone."""


class WriterUnfinishedError(StoreError):
    """A writer has not finished yet."""


class PlanMismatchError(StoreError):
    """The writers of an upload planned different trees."""


class ProcessesDifferError(StoreError):
    """Two writers of an upload hold different values of a leaf that one of them
    writes."""


class ChunksIncompleteError(StoreError):
    """Chunks are missing, or are held by two writers."""


class FormatUnsupportedError(StoreError):
    """The store was written in a format that this code does not know."""


class CorruptDataError(StoreError):
    """Stored bytes are missing or are not those that were written."""


class LimitExceededError(StoreError):
    """A limit of the server."""

    def __init__(
        self, message: str, *, retry_seconds: int | None = None, **metadata: str
    ) -> None:
        super().__init__(message, **metadata)
        self.retry_seconds = retry_seconds
        """After how long the same call may succeed; None: never."""


class StorageDeniedError(StoreError):
    """The storage does not accept our credentials, or denies them something."""


class StorageFullError(StoreError):
    """The storage is full."""


class StorageUnavailableError(StoreError):
    """The storage did not answer."""


class StalledError(StoreError):
    """The peer sent nothing for too long."""
