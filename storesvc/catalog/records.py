"""Reads sealed records of the bucket, and updates them with conditional writes.

A damaged read is repeated, because the response may have been corrupted in transit. A
failed precondition is checked against the nonce of the seal, because a retry below may
have failed against our own write. `update_record` is the compare-and-swap loop of
holds, tags and checkpoints.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.errors import ConflictError, CorruptDataError, FormatUnsupportedError
from storesvc.format.checksums import digest
from storesvc.format.seal import CorruptRecordError, FormatVersionError, M, seal, unseal
from storesvc.storage.bucket import (
    Bucket,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)

ATTEMPTS: Final = 8
"""Attempts of one update, while other calls change the same record."""

T = TypeVar("T")


async def update_record(
    attempt: Callable[[], Awaitable[T]], *, record: str, **metadata: str
) -> T:
    """Repeats an update until its conditional write succeeds, and returns its result.

    Args:
        attempt: Reads the record, decides, and writes it on the condition that it is
            unchanged since the read. It raises ``PreconditionError`` if the record
            changed; any other error ends the update.
        record: Name of the record, for the error.
    """
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except PreconditionError:
            continue
    raise ConflictError(
        f"{record}: other calls changed it {ATTEMPTS} times in a row; try again",
        **metadata,
    )


_NONCE_BYTES: Final = 8

_log = logging.getLogger(__name__)


async def read_record(
    bucket: Bucket, path: str, kind: type[M], *, of: str = ""
) -> tuple[M, Generation] | None:
    """Returns the record at a path and its generation; reads a damaged one twice.

    Args:
        of: Users' name of the recorded object, if they can abandon it by removing the
            record.

    Raises:
        CorruptDataError: The object is not the record that was written there.
        FormatUnsupportedError: The record is of another version of the format.
    """
    found = await read_stored(bucket, path, kind, of=of)
    return None if found is None else (found[0], found[1].generation)


async def read_stored(
    bucket: Bucket, path: str, kind: type[M], *, of: str = ""
) -> tuple[M, Stored] | None:
    """Returns the record at a path and its object; otherwise like ``read_record``."""
    stored = await bucket.read(path)
    if stored is None:
        return None
    try:
        return _unseal_record(stored, kind, path), stored
    except CorruptRecordError:
        again = await bucket.read(path)
    if again is None:
        return None
    try:
        record = _unseal_record(again, kind, path)
    except CorruptRecordError as e:
        reads = "" if again.data == stored.data else ", and two reads of it differ"
        raise damage_error(path, f"{e}{reads}", of=of) from e
    _log.warning("%s", corrupted_in_transit(path))
    return record, again


def _unseal_record(stored: Stored, kind: type[M], path: str) -> M:
    try:
        return unseal(stored.data, kind, place=path)
    except FormatVersionError as e:
        raise FormatUnsupportedError(f"{path}: {e}; use a newer release") from e


def corrupted_in_transit(path: str) -> str:
    """Returns the log line of a damaged read whose repetition is sound."""
    return (
        f"{path}: a response of the storage was corrupted in transit; the second read "
        "is sound"
    )


async def read_listed(
    bucket: Bucket, path: str, kind: type[M], *, of: str = ""
) -> tuple[M, Generation] | None:
    """Returns the record at a path and its generation; reads a second time if the
    record is absent and a list contains it.

    For records that users name: an absent one costs a list.
    """
    found = await read_record(bucket, path, kind, of=of)
    if found is None and path in await bucket.list(path):
        found = await read_record(bucket, path, kind, of=of)
        if found is not None:
            # the usual cause: it was created in between, as a run by its first save
            _log.info("%s: one read found no object, and the next one did", path)
    return found


def damage_error(path: str, how: str, *, of: str = "") -> CorruptDataError:
    """Returns the error of a damaged record; arguments as of ``read_record``."""
    remedy = "restore this object from a copy"
    if not of:
        return CorruptDataError(f"{path} is damaged: {how}; {remedy}")
    return CorruptDataError(
        f"the record of {of} is damaged ({path}: {how}); {remedy}, or remove it to "
        f"abandon {of}"
    )


def seal_record(path: str, record: Message) -> bytes:
    """Returns the sealed object of a record, with a nonce that no other write has."""
    return seal(record, place=path, nonce=os.urandom(_NONCE_BYTES))


async def write_record(
    bucket: Bucket, path: str, record: Message, *, condition: WriteCondition
) -> Generation:
    """Writes a record conditionally, and returns its generation.

    A storage that retries may report a conflict with its own first attempt; the nonce
    of the seal shows whether this write was made.

    Raises:
        PreconditionError: The condition did not hold, and the object is not this
            write's.
    """
    # 1. Seal it with a nonce: equal records of two processes are two writes, and only
    #    one of them may succeed.
    data = seal_record(path, record)
    try:
        return await bucket.write(path, data, condition=condition)
    except PreconditionError:
        # 2. If the object has this nonce, an earlier attempt of this write succeeded,
        #    and its response was lost. Reported as a conflict, a change that was made
        #    would be repeated or abandoned.
        stored = await bucket.read(path)
        if stored is None or stored.data != data:
            raise
        # 3. The attempt may have been cut off before it was durable.
        await bucket.settle(path)
        return stored.generation


def record_etag(record: Message) -> str:
    """Returns the etag of a record, which differs after every change."""
    return f'"{digest(record.SerializeToString(deterministic=True)).hex()}"'


def timestamp(moment: datetime) -> Timestamp:
    """Returns a time as a protobuf message."""
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def duration(length: timedelta) -> Duration:
    message = Duration()
    message.FromTimedelta(length)
    return message
