"""Errors of storages, in the service's words.

TensorStore raises builtin exceptions; the status code heads the message.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from storesvc.errors import (
    CorruptDataError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.storages import Storage

_DAMAGE: Final = (
    "DATA_LOSS",
    "OUT_OF_RANGE",
    "Error decoding",
    "NOT_FOUND: Error reading",
)
"""What messages begin with that tell of damaged or missing bytes."""

_DENIED: Final = ("PERMISSION_DENIED", "UNAUTHENTICATED")


@contextmanager
def translated(storage: Storage, place: str) -> Generator[None]:
    """Raises our error for any that TensorStore raises inside, and for a deadline.

    Raises:
        CorruptDataError: What is stored there is damaged, or shorter than it was.
        StorageFullError: The storage is full.
        StorageUnavailableError: It failed, does not answer, or lets nobody in.
    """
    try:
        yield
    except StoreError:
        raise
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{storage.describe(place)}: the storage did not answer in time; try again"
        ) from e
    except (ValueError, RuntimeError, OSError, KeyError) as e:
        raise _error(storage, storage.describe(place), str(e)) from e


def _error(storage: Storage, place: str, text: str) -> StoreError:
    told = text.partition(" [")[0]
    # of a bucket it is a quota of requests, which passes
    is_full = text.startswith("RESOURCE_EXHAUSTED") and not storage.is_remote
    if is_full or "No space left" in text:
        return StorageFullError(f"{place}: the storage is full; free space and retry")
    if text.startswith(_DENIED):
        return StorageUnavailableError(
            f"{place}: the storage lets these credentials do nothing there "
            f"({told}); give them the role of an object user on {storage.name}"
        )
    if text.startswith(_DAMAGE):
        return CorruptDataError(
            f"{place} is damaged or cut off ({told}); use another checkpoint"
        )
    return StorageUnavailableError(f"{place}: the storage failed: {told}")
