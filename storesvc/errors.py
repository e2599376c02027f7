"""What the service refuses, in its own words.

The tree::

    StoreError
    ├── InvalidFieldError
    │   ├── InvalidTreeError
    │   ├── InvalidChunkError
    │   ├── InvalidPageTokenError
    │   └── RequestIdReusedError
    ├── RunNotFoundError
    ├── CheckpointNotFoundError
    ├── UploadNotFoundError
    ├── CheckpointExistsError
    ├── UploadSupersededError
    ├── ConflictError
    ├── WriterUnfinishedError
    ├── ChunksIncompleteError
    ├── FormatUnsupportedError
    ├── CorruptDataError
    ├── LimitExceededError
    ├── StorageFullError
    ├── StorageUnavailableError
    └── StalledError

A message is one sentence: place, expected, got, what to do. What it mentions and
a program may want is in ``metadata`` too. Nothing here knows of gRPC:
``storesvc.statuses`` alone turns these into statuses.
"""


class StoreError(Exception):
    """Base of every refusal."""

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
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


class RunNotFoundError(StoreError):
    """No run of that name has a checkpoint."""


class CheckpointNotFoundError(StoreError):
    """The run has no committed checkpoint at that step."""


class UploadNotFoundError(StoreError):
    """No upload of that name, or it was aborted."""


class CheckpointExistsError(StoreError):
    """The step is committed."""


class UploadSupersededError(StoreError):
    """A later upload took the step over."""


class ConflictError(StoreError):
    """Another call changed the same object at the same time."""


class WriterUnfinishedError(StoreError):
    """A writer has not finished yet."""


class ChunksIncompleteError(StoreError):
    """Chunks are missing, or are held by two writers."""


class FormatUnsupportedError(StoreError):
    """The store was written in a format that this code does not know."""


class CorruptDataError(StoreError):
    """Stored bytes are missing or are not those that were written."""


class LimitExceededError(StoreError):
    """A limit of the server."""


class StorageFullError(StoreError):
    """The storage is full."""


class StorageUnavailableError(StoreError):
    """The storage did not answer."""


class StalledError(StoreError):
    """The peer sent nothing for too long."""
