"""The envelope of small objects: a version and a checksum around a record.

Since version 2 of the format a seal binds a record to its place and to its kind: one
that was copied to another place, or to the place of another kind, is refused there,
and the refusal names what it is. Seals of version 1 bind only their bytes; they stay
readable, and the next write of their place replaces them.
"""

import re
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from storesvc.format.checksums import crc32c
from storesvc_proto.v1 import bucket_pb2 as pb

FORMAT_VERSION: Final = 2
"""The version of the bucket's format that this code writes."""

OLDEST_VERSION: Final = 1
"""The oldest version that this code reads."""

_SHOWN: Final = 200
"""Characters of a foreign place that a message shows."""

M = TypeVar("M", bound=Message)


class CorruptRecordError(ValueError):
    """An object that does not hold the record that was written there."""


class FormatVersionError(ValueError):
    """An object of another version of the format."""


def seal(record: Message, *, place: str, nonce: bytes = b"") -> bytes:
    """Returns the object that holds a record.

    Args:
        record: The record.
        place: Where it is to be written, relative to the root of the store.
        nonce: Bytes that no other write of the place has; conditional writes need them.
    """
    bound = pb.BoundRecord(
        place=place,
        kind=record.DESCRIPTOR.name,
        record=record.SerializeToString(deterministic=True),
    )
    payload = bound.SerializeToString(deterministic=True)
    return pb.Sealed(
        format_version=FORMAT_VERSION,
        crc32c=_checksum(payload, nonce, FORMAT_VERSION),
        payload=payload,
        nonce=nonce,
    ).SerializeToString(deterministic=True)


def unseal(data: bytes, kind: type[M], *, place: str) -> M:
    """Returns the record that an object holds.

    Args:
        data: The bytes of the object.
        kind: The expected kind of record.
        place: Where the object was read, relative to the root of the store.

    Raises:
        CorruptRecordError: The bytes are not those that ``seal`` made, or it made them
            for another place or of another kind of record.
        FormatVersionError: They are of a version that this code cannot read.
    """
    try:
        sealed = pb.Sealed.FromString(data)
    except DecodeError as e:
        raise CorruptRecordError("expected a sealed record") from e
    # The checksum comes first, and is the same in all versions: damage is not to be
    # mistaken for another version.
    if (
        not sealed.format_version  # an empty object is the sum of nothing
        or _checksum(sealed.payload, sealed.nonce, sealed.format_version)
        != sealed.crc32c
    ):
        raise CorruptRecordError("its checksum does not match its bytes")
    if not OLDEST_VERSION <= sealed.format_version <= FORMAT_VERSION:
        raise FormatVersionError(
            f"expected format version {OLDEST_VERSION} to {FORMAT_VERSION}, got "
            f"{sealed.format_version}"
        )
    payload = sealed.payload
    try:
        if sealed.format_version > OLDEST_VERSION:
            payload = _record_of(pb.BoundRecord.FromString(payload), kind, place)
        return kind.FromString(payload)
    except DecodeError as e:
        raise CorruptRecordError("expected another kind of record") from e


def _record_of(bound: pb.BoundRecord, kind: type[Message], place: str) -> bytes:
    """Returns the serialised record; refuses that of another kind or place."""
    expected = kind.DESCRIPTOR.name
    if (bound.kind, bound.place) != (expected, place):
        raise CorruptRecordError(
            f"expected the {_words(expected)} of this place, got the "
            f"{_words(bound.kind)} of {bound.place[:_SHOWN]}"
        )
    return bound.record


def _words(kind: str) -> str:
    """Returns the name of a kind as words, such as "tag record"."""
    return re.sub(r"(?<=.)(?=[A-Z])", " ", kind[:_SHOWN]).lower()


def _checksum(payload: bytes, nonce: bytes, format_version: int) -> int:
    """Returns the CRC-32C of the payload and the nonce, continued from the version."""
    return crc32c(nonce, crc32c(payload, format_version))
