"""Errors of storages, in the service's words.

TensorStore raises builtin exceptions; the status code heads the message.
"""

import errno
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
"""What messages begin with that tell of damaged or missing bytes."""

_READ_ONLY: Final = "Read-only file system"
"""How an error of TensorStore words EROFS."""

_DENIED: Final = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_UNACCEPTED: Final = (
    "http_response_code='401'",
    "InvalidAccessKeyId",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
)
"""Tells who is not known from who may not, where the status code does not."""


@contextmanager
def translated(storage: Storage, place: str) -> Generator[None]:
    """Raises our error for any that TensorStore raises inside, and for a deadline.

    Raises:
        CorruptDataError: What is stored there is damaged, or shorter than it was.
        StorageDeniedError: The storage lets us not in, or not do this, or is
            read-only.
        StorageFullError: It is full.
        StorageUnavailableError: It failed, or does not answer.
    """
    try:
        yield
    except StoreError:
        raise
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{storage.describe(place)}: the storage did not answer in time; try again",
            storage=storage.name,
        ) from e
    except IrregularFileError as e:
        raise CorruptDataError(
            f"{e}; links and special files are not read or written: replace it by the "
            "file that was stored, or use another checkpoint"
        ) from e
    except PermissionError as e:
        raise denied(storage, place, e.strerror or str(e)) from e
    except (ValueError, RuntimeError, OSError, KeyError) as e:
        if isinstance(e, OSError) and e.errno == errno.EROFS:
            raise read_only(storage, place) from e
        raise _error(storage, place, str(e)) from e


def _error(storage: Storage, place: str, text: str) -> StoreError:
    where, told = storage.describe(place), text.partition(" [")[0]
    # of a bucket it is a quota of requests, which passes
    is_full = text.startswith("RESOURCE_EXHAUSTED") and not storage.is_remote
    if is_full or "No space left" in text:
        return StorageFullError(
            f"{where}: the storage is full; {HOW_TO_FREE_SPACE}, then try again",
            storage=storage.name,
        )
    if _READ_ONLY in text:
        return read_only(storage, place)
    if text.startswith(_DENIED):
        why = told.partition(": ")[2]
        if is_about_who_asks(text):
            return unaccepted(storage, place, why)
        return denied(storage, place, why)
    if text.startswith(_DAMAGE):
        return CorruptDataError(
            f"{where} is damaged or cut off ({told}); use another checkpoint"
        )
    return failed(storage, place, told)


def is_about_who_asks(text: str) -> bool:
    """Returns whether a denial tells that the storage does not know who asks."""
    return any(sign in text for sign in _UNACCEPTED)


def failed(storage: Storage, place: str, told: str) -> StorageUnavailableError:
    """Returns what is said where the storage could not do what was asked."""
    return StorageUnavailableError(
        f"{storage.describe(place)}: the storage failed: {told}", storage=storage.name
    )


def denied(storage: Storage, place: str, told: str) -> StorageDeniedError:
    """Returns what is said where the storage knows who asks, and lets them not."""
    who, what = ("our credentials", "objects")
    if not storage.is_remote:
        who, what = ("the user of this process", "files")
    return StorageDeniedError(
        f"{storage.describe(place)}: the storage denies this to {who} "
        f"({told.removesuffix('.')}); let them read, write, list and delete {what} "
        f"below {storage.name}",
        storage=storage.name,
    )


def read_only(storage: Storage, place: str) -> StorageDeniedError:
    """Returns what refuses to write to a file system that is mounted read-only."""
    return StorageDeniedError(
        f"{storage.describe(place)}: the storage {storage.name} is read-only; mount it "
        "for writing, or only read from it",
        storage=storage.name,
        read_only="true",
    )


def unaccepted(storage: Storage, place: str, told: str) -> StorageDeniedError:
    """Returns what is said where the storage does not know who asks."""
    return StorageDeniedError(
        f"{storage.describe(place)}: the storage does not accept our credentials "
        f"({told.removesuffix('.')}); renew them, and see that their account exists "
        "and the clock is right",
        storage=storage.name,
    )


def no_bucket(storage: Storage) -> InvalidFieldError:
    """Returns the refusal of a root in a bucket that does not exist."""
    return InvalidFieldError(
        f"root {storage.name}: expected a bucket that exists, got none of this name; "
        "create it, or correct the name"
    )
