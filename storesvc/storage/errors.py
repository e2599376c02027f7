"""Translates the errors of TensorStore and of the operating system into ours.

TensorStore raises builtin exceptions; their message begins with the status code.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.storage.data_file import HOW_TO_FREE_SPACE
from storesvc.storage.location import Storage
from storesvc.storage.rooted_files import IrregularFileError

_DAMAGE: Final = (
    "DATA_LOSS",
    "OUT_OF_RANGE",
    "Error decoding",
    "NOT_FOUND: Error reading",
)
"""Beginnings of messages about damaged or missing bytes."""

_READ_ONLY: Final = "Read-only file system"
"""Message of TensorStore for EROFS."""

_DENIED: Final = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_UNAUTHENTICATED: Final = (
    "http_response_code='401'",
    "InvalidAccessKeyId",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
)
"""Parts of messages about rejected credentials, where the status code does not
distinguish them from missing permissions."""


_NO_LOCKS: Final = tuple(map(os.strerror, (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)))
"""Parts of messages about locks on a file system that has none."""

_NO_DIRECTORY: Final = (
    "Invalid file path",
    *map(os.strerror, (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)),
)
"""Parts of messages about a path that no directory can have."""


@contextmanager
def translated(storage: Storage, path: str) -> Generator[None]:
    """Translates errors of TensorStore, of files and of deadlines that are raised
    inside.

    Raises:
        CorruptDataError: The stored object is damaged, or shorter than it was.
        StorageDeniedError: The storage rejects the credentials, denies the operation,
            or is read-only.
        StorageFullError: The storage is full.
        StorageUnavailableError: The storage failed, or does not answer.
    """
    try:
        yield
    except StoreError:
        raise
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{storage.describe(path)}: the storage did not answer in time; try again",
            storage=storage.name,
        ) from e
    except IrregularFileError as e:
        raise CorruptDataError(
            f"{e}; links and special files are not read or written: replace it by the "
            "file that was stored, or use another checkpoint"
        ) from e
    except PermissionError as e:
        raise denied(storage, path, e.strerror or str(e)) from e
    except (ValueError, RuntimeError, OSError, KeyError) as e:
        if isinstance(e, OSError) and e.errno == errno.EROFS:
            raise _read_only(storage, path) from e
        raise _error(storage, path, str(e)) from e


def _error(storage: Storage, path: str, text: str) -> StoreError:
    where, reason = storage.describe(path), text.partition(" [")[0]
    if not storage.is_remote:  # callers of a server need not know where its files are
        reason = reason.replace(storage.spec.get("path", ""), "")
    # From a bucket it is a quota of requests, which is a transient error.
    is_full = text.startswith("RESOURCE_EXHAUSTED") and not storage.is_remote
    if is_full or "No space left" in text:
        return StorageFullError(
            f"{where}: the storage is full; {HOW_TO_FREE_SPACE}, then try again",
            storage=storage.name,
        )
    if _READ_ONLY in text:
        return _read_only(storage, path)
    if text.startswith(_DENIED):
        why = reason.partition(": ")[2]
        if is_unauthenticated(text):
            return unauthenticated(storage, path, why)
        return denied(storage, path, why)
    if text.startswith(_DAMAGE):
        return CorruptDataError(
            f"{where} is damaged or truncated ({reason}); use another checkpoint"
        )
    return failed(storage, path, reason)


def invalid_place(
    root: str, error: StorageUnavailableError
) -> InvalidFieldError | None:
    """Returns the error of a root where no store can be opened; None if the storage
    may work later."""
    text = str(error)
    if " lock " in text and _has(text, _NO_LOCKS):
        return InvalidFieldError(
            f"root {root}: expected a file system with locks ({text}); mount it with "
            "locks, or run 'storectl serve' on a machine where it is a local disk and "
            "connect to that"
        )
    if _has(text, _NO_DIRECTORY):
        return InvalidFieldError(
            f"root {root}: expected a directory, or a path where one can be created "
            f"({text}); correct the path"
        )
    return None


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)


def is_unauthenticated(text: str) -> bool:
    """Returns whether a denial is about the credentials, not about permissions."""
    return _has(text, _UNAUTHENTICATED)


def failed(storage: Storage, path: str, reason: str) -> StorageUnavailableError:
    """Returns the error of a storage that could not do what was requested."""
    return StorageUnavailableError(
        f"{storage.describe(path)}: the storage failed: {reason}", storage=storage.name
    )


def denied(storage: Storage, path: str, reason: str) -> StorageDeniedError:
    """Returns the error of a storage that accepts the credentials and denies the
    operation to them."""
    identity, objects = ("our credentials", "objects")
    if not storage.is_remote:
        identity, objects = ("the user of this process", "files")
    return StorageDeniedError(
        f"{storage.describe(path)}: the storage denies this to {identity} "
        f"({reason.removesuffix('.')}); let them read, write, list and delete "
        f"{objects} below {storage.name}",
        storage=storage.name,
    )


def _read_only(storage: Storage, path: str) -> StorageDeniedError:
    return StorageDeniedError(
        f"{storage.describe(path)}: the storage {storage.name} is read-only; mount it "
        "for writing, or only read from it",
        storage=storage.name,
        read_only="true",
    )


def unauthenticated(storage: Storage, path: str, reason: str) -> StorageDeniedError:
    """Returns the error of a storage that rejects the credentials."""
    return StorageDeniedError(
        f"{storage.describe(path)}: the storage does not accept our credentials "
        f"({reason.removesuffix('.')}); renew them, and check that their account "
        "exists and the clock is right",
        storage=storage.name,
    )


def no_bucket(storage: Storage) -> InvalidFieldError:
    """Returns the error of a root in a bucket that does not exist."""
    return InvalidFieldError(
        f"root {storage.name}: expected an existing bucket, got none of this name; "
        "create it, or correct the name"
    )
