"""Defines the bucket: the few operations that the service needs of a storage.

Paths are relative to the root of the store, with "/" between their parts. Conditional
writes and deletions are the only arbiter between processes, and a complete list decides
what is garbage. Some storages that speak the API of Google Cloud Storage or of S3,
emulators above all, accept conditions and ignore them. A store there would lose
checkpoints without an error, so each storage is probed, and no store is created or
opened where one of the three is missing.

The errors of TensorStore and of the operating system become ours here. TensorStore
raises builtin exceptions; their message begins with the status code.
"""

import errno
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol, TypeAlias

from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format import layout
from storesvc.storage.location import Storage
from storesvc.storage.rooted_files import HOW_TO_FREE_SPACE, IrregularFileError
from storesvc.storage.throttle import ended_early

Generation = NewType("Generation", bytes)
"""Version of an object, as its last write made it; opaque."""

UNLISTED: Final = Generation(b"")
"""Generation of an object in a list that has none; no object has it."""


class Condition(Enum):
    """Precondition of a write, other than a generation."""

    ALWAYS = "always"
    IF_ABSENT = "if absent"


ALWAYS: Final = Condition.ALWAYS
IF_ABSENT: Final = Condition.IF_ABSENT

WriteCondition: TypeAlias = Condition | Generation
"""A generation requires that the object still has that version."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of an object."""

    data: bytes
    generation: Generation


class PreconditionError(Exception):
    """The object does not have the version that the write requires.

    A retry in a lower layer can fail its precondition against the object that its own
    first attempt wrote: read the object back before assuming a concurrent writer.
    """


class Bucket(Protocol):
    """A storage of objects.

    Every method raises ``StorageUnavailableError`` where the storage does not answer,
    ``StorageDeniedError`` where it rejects the credentials or denies the operation,
    and ``StorageFullError`` where it is full.
    """

    async def read(self, path: str) -> Stored | None:
        """Returns an object; None if it does not exist."""

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Returns the bytes of an object from ``start`` up to ``stop``.

        Raises:
            CorruptDataError: The object is missing or shorter.
        """

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        """Writes a whole object; durable when it returns.

        Raises:
            PreconditionError: The condition did not hold; nothing was written.
        """

    async def settle(self, path: str) -> None:
        """Makes an object durable, in the version that a read has just returned.

        A write that was interrupted, or whose sync failed, can be visible before it is
        durable: a call that reports the write of another call MUST settle it first.
        """

    async def delete(self, path: str, *, generation: Generation | None = None) -> None:
        """Deletes an object, if it still has that generation; an absent one is no
        error.

        Raises:
            PreconditionError: It has another generation.
        """

    async def delete_below(self, prefix: str) -> None:
        """Deletes every object whose path begins with a prefix; not atomic."""

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        """Returns the paths that begin with a prefix, ascending.

        Args:
            after: Returns only paths after this one, which begins with the prefix.
            limit: Number of paths that the caller needs; None: all. If there are more,
                a storage that lists in pages returns only as many; others return all.
        """

    async def list_versions(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> dict[str, Generation]:
        """Returns a list like ``list``, with the generation of each object, or
        ``UNLISTED`` where the lists of the storage have none."""

    @property
    def lists_pages(self) -> bool:
        """True if a list takes a request for each page of names."""


NAMES_A_PAGE: Final = 1000
"""Names in a page of a list; a bucket answers one such request with one page."""


async def list_pages(bucket: Bucket, prefix: str) -> AsyncIterator[list[str]]:
    """Yields the paths that begin with a prefix, which ends with "/", ascending, in
    pages; a directory, whose files are large and few, is one page."""
    after = ""
    while page := await bucket.list(prefix, after=after, limit=NAMES_A_PAGE):
        yield page
        if len(page) != NAMES_A_PAGE:
            return
        after = page[-1]


async def check_conditions(bucket: Bucket, folder: str = layout.PROBES) -> None:
    """Rejects a storage that ignores a condition, or whose list lacks an object.

    Writes, lists and deletes one object of its own, in a folder.

    Raises:
        InvalidFieldError: The storage fails a probe.
        StorageDeniedError: The storage does not let this process write.
        StorageUnavailableError: The storage does not answer.
    """
    path = f"{folder}{uuid.uuid4().hex}"
    first = await _written(bucket, path, b"1", IF_ABSENT)
    try:
        second = await _written(bucket, path, b"2", first)
        await _reject_violation(
            bucket.write(path, b"3", condition=IF_ABSENT),
            "the creation of an object (ifGenerationMatch=0, If-None-Match)",
        )
        await _reject_violation(
            bucket.write(path, b"4", condition=first),
            "the overwriting of an object (ifGenerationMatch, If-Match)",
        )
        await _reject_violation(
            bucket.delete(path, generation=first),
            "the deletion of an object (ifGenerationMatch, If-Match)",
        )
        if path not in await bucket.list(folder):
            raise InvalidFieldError(
                f"{path}: expected a list of the storage to have an object that was "
                "just written, got none; storesvc requires complete lists: use another "
                "storage"
            )
    except BaseException:
        with suppress(StoreError):
            await bucket.delete(path)
        raise
    await bucket.delete(path, generation=second)


async def _written(
    bucket: Bucket, path: str, data: bytes, condition: WriteCondition
) -> Generation:
    """Writes an object, and returns its generation. A conflict may be with our own
    write, if its response was lost."""
    try:
        return await bucket.write(path, data, condition=condition)
    except PreconditionError as e:
        stored = await bucket.read(path)
        if stored is None or stored.data != data:
            raise StorageUnavailableError(
                f"{path}: expected the storage to accept a write whose condition "
                "holds, got a conflict; try again"
            ) from e
        return stored.generation


async def _reject_violation(change: Awaitable[object], what: str) -> None:
    """Rejects a storage that makes a change whose condition does not hold."""
    with suppress(PreconditionError):
        await change
        raise InvalidFieldError(
            f"the storage ignores the condition on {what}: a store in it would lose "
            "checkpoints; storesvc requires conditional writes: use a storage that "
            "checks them"
        )


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
    *map(os.strerror, (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT)),
)
"""Parts of messages about a path that no directory can have."""


@contextmanager
def translate_errors(storage: Storage, path: str) -> Generator[None]:
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
        raise denied_error(storage, path, e.strerror or str(e)) from e
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
            return unauthenticated_error(storage, path, why)
        return denied_error(storage, path, why)
    if ended_early(text):
        return failure_error(storage, path, "a response ended early")
    if text.startswith(_DAMAGE):
        return CorruptDataError(
            f"{where} is damaged or truncated ({reason}); use another checkpoint"
        )
    return failure_error(storage, path, reason)


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


def failure_error(storage: Storage, path: str, reason: str) -> StorageUnavailableError:
    """Returns the error of a storage that could not do what was requested."""
    return StorageUnavailableError(
        f"{storage.describe(path)}: the storage failed: {reason}", storage=storage.name
    )


def denied_error(storage: Storage, path: str, reason: str) -> StorageDeniedError:
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


def unauthenticated_error(
    storage: Storage, path: str, reason: str
) -> StorageDeniedError:
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
