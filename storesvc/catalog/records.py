"""Sealed records in the bucket: read, and changed without losing an answer."""

import logging
import os
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.errors import CorruptDataError, FormatUnsupportedError
from storesvc.format.checksums import digest
from storesvc.format.seal import CorruptRecordError, FormatVersionError, M, seal, unseal
from storesvc.storage.bucket import (
    Bucket,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)

T = TypeVar("T")

_NONCE_BYTES: Final = 8

_log = logging.getLogger(__name__)


async def read_record(
    bucket: Bucket, place: str, kind: type[M], *, of: str = ""
) -> tuple[M, Generation] | None:
    """Returns the record that a place holds, and its generation.

    Args:
        bucket: The bucket.
        place: In the bucket.
        kind: Of the record.
        of: What users call what it is the record of, if they can give that up by
            removing the object.

    What is damaged is read a second time: the answer may have been corrupted on its
    way.

    Raises:
        CorruptDataError: It does not hold the record that was written there.
        FormatUnsupportedError: It is of another version of the format.
    """
    stored = await bucket.read(place)
    if stored is None:
        return None
    try:
        return _unsealed(stored, kind, place), stored.generation
    except CorruptRecordError:
        again = await bucket.read(place)
    if again is None:
        return None
    try:
        record = _unsealed(again, kind, place)
    except CorruptRecordError as e:
        reads = "" if again.data == stored.data else ", and two reads of it differ"
        raise damaged(place, f"{e}{reads}", of=of) from e
    _log.warning("%s", on_its_way(place))
    return record, again.generation


def _unsealed(stored: Stored, kind: type[M], place: str) -> M:
    try:
        return unseal(stored.data, kind, place=place)
    except FormatVersionError as e:
        raise FormatUnsupportedError(f"{place}: {e}; use a newer release") from e


def on_its_way(place: str) -> str:
    """Returns what is logged where a second read finds sound what a first one did
    not."""
    return (
        f"{place}: an answer of the storage was corrupted on its way; read again, it "
        "is sound"
    )


async def read_listed(
    bucket: Bucket, place: str, kind: type[M], *, of: str = ""
) -> tuple[M, Generation] | None:
    """Returns what ``read_record`` does, and does not take one answer for it that a
    place holds nothing: where a list has the place, it is read a second time.

    For what a user asks for by its name, as it costs a list where there is nothing.

    Raises:
        CorruptDataError: See ``read_record``.
        FormatUnsupportedError: See ``read_record``.
    """
    found = await read_record(bucket, place, kind, of=of)
    if found is None and place in await bucket.list(place):
        found = await read_record(bucket, place, kind, of=of)
        if found is not None:
            _log.warning("%s: it was read as absent, and is there", place)
    return found


def damaged(place: str, how: str, *, of: str = "") -> CorruptDataError:
    """Returns the refusal of a record; the arguments are those of ``read_record``."""
    remedy = "restore this object from a copy"
    if not of:
        return CorruptDataError(f"{place} is damaged: {how}; {remedy}")
    return CorruptDataError(
        f"the record of {of} is damaged ({place}: {how}); {remedy}, or remove it to "
        f"give {of} up"
    )


async def or_damage(reading: Awaitable[T]) -> T | CorruptDataError:
    """Returns what was read, or that it is damaged: a list goes on with the next."""
    try:
        return await reading
    except CorruptDataError as e:
        return e


def sound(found: T | CorruptDataError) -> T:
    """Returns what was read.

    Raises:
        CorruptDataError: It is damaged.
    """
    if isinstance(found, CorruptDataError):
        raise found
    return found


def sealed(place: str, record: Message) -> bytes:
    """Returns the object that holds the record of a place, unlike that of any other
    write."""
    return seal(record, place=place, nonce=os.urandom(_NONCE_BYTES))


async def write_record(
    bucket: Bucket, place: str, record: Message, *, condition: WriteCondition
) -> Generation:
    """Writes a record on a condition, and returns its generation.

    A storage that retries below us may report as a conflict what it has written
    itself; the nonce of the seal tells.

    Raises:
        PreconditionError: The condition did not hold, and the place does not hold
            this very record.
    """
    data = sealed(place, record)
    try:
        return await bucket.write(place, data, condition=condition)
    except PreconditionError:
        stored = await bucket.read(place)
        if stored is None or stored.data != data:
            raise
        await bucket.settle(place)
        return stored.generation


def etag_of(record: Message) -> str:
    """Returns what changes with every change of a record."""
    return f'"{digest(record.SerializeToString(deterministic=True)).hex()}"'


def timestamp(moment: datetime) -> Timestamp:
    """Returns a moment as records hold it."""
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def duration(length: timedelta) -> Duration:
    """Returns a length of time as records hold it."""
    message = Duration()
    message.FromTimedelta(length)
    return message
