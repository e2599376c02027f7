"""Seals small objects: a format version and a checksum around a record.

Since version 2 of the format a seal binds a record to its path and its kind: a record
that was copied to another path, or to the path of another kind, is rejected there, and
the error names what it is. Seals of version 1 bind only their bytes; they stay
readable, and the next write of their path replaces them.
"""

import re
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from storesvc.format.checksums import crc32c
from storesvc_proto.v1 import bucket_pb2 as pb

FORMAT_VERSION: Final = 2
"""The newest version of the bucket's format; all records are sealed in it, if their
store has it."""

OLDEST_WRITTEN: Final = 2
"""The oldest version of a store that this code writes to."""

OLDEST_VERSION: Final = 1
"""The oldest version that this code reads."""

_SHOWN: Final = 200
"""Maximum characters of a foreign path in a message."""

M = TypeVar("M", bound=Message)


class CorruptRecordError(ValueError):
    """An object is not the record that was written at its path."""


class FormatVersionError(ValueError):
    """An object has another version of the format."""


def seal(record: Message, *, place: str, nonce: bytes = b"") -> bytes:
    """Returns the sealed object of a record.

    Args:
        place: Path of the object, relative to the root of the store.
        nonce: Unique bytes of this write; conditional writes need them.
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
    """Returns the record in a sealed object.

    Args:
        data: The bytes of the object.
        place: Path that the object was read from, relative to the root of the store.
    """
    try:
        sealed = pb.Sealed.FromString(data)
    except DecodeError as e:
        raise CorruptRecordError("expected a sealed record") from e
    # 1. The checksum, whose definition all versions share: damage must not look like
    #    another version.
    if (
        not sealed.format_version  # the checksum of an empty object would match
        or _checksum(sealed.payload, sealed.nonce, sealed.format_version)
        != sealed.crc32c
    ):
        raise CorruptRecordError("its checksum does not match its bytes")
    # 2. The version.
    if not OLDEST_VERSION <= sealed.format_version <= FORMAT_VERSION:
        raise FormatVersionError(
            f"expected format version {OLDEST_VERSION} to {FORMAT_VERSION}, got "
            f"{sealed.format_version}"
        )
    # 3. The path and the kind, since version 2.
    payload = sealed.payload
    try:
        if sealed.format_version > OLDEST_VERSION:
            payload = _check_record(pb.BoundRecord.FromString(payload), kind, place)
        return kind.FromString(payload)
    except DecodeError as e:
        raise CorruptRecordError("expected another kind of record") from e


def _check_record(bound: pb.BoundRecord, kind: type[Message], place: str) -> bytes:
    """Returns the serialised record; rejects another kind or path."""
    expected = kind.DESCRIPTOR.name
    if (bound.kind, bound.place) != (expected, place):
        raise CorruptRecordError(
            f"expected the {_words(expected)} of this path, got the "
            f"{_words(bound.kind)} of {bound.place[:_SHOWN]}"
        )
    return bound.record


def _words(kind: str) -> str:
    """Splits the name of a kind into words, such as "tag record"."""
    return re.sub(r"(?<=.)(?=[A-Z])", " ", kind[:_SHOWN]).lower()


def _checksum(payload: bytes, nonce: bytes, format_version: int) -> int:
    """Returns the CRC-32C of the payload and the nonce, continued from the version."""
    return crc32c(nonce, crc32c(payload, format_version))
