"""The envelope of small objects: a version and a checksum around a record."""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from storesvc.format.checksums import crc32c
from storesvc_proto.v1 import bucket_pb2 as pb

FORMAT_VERSION: Final = 1
"""The version of the bucket's format that this code writes and reads."""

M = TypeVar("M", bound=Message)


class CorruptRecordError(ValueError):
    """An object whose bytes are not those that were written."""


class FormatVersionError(ValueError):
    """An object of another version of the format."""


def seal(record: Message, nonce: bytes = b"") -> bytes:
    """Returns the object that holds a record.

    Args:
        record: The record.
        nonce: What no other write of the place has; needed of those on a condition.
    """
    payload = record.SerializeToString(deterministic=True)
    return pb.Sealed(
        format_version=FORMAT_VERSION,
        crc32c=_checksum(payload, nonce, FORMAT_VERSION),
        payload=payload,
        nonce=nonce,
    ).SerializeToString(deterministic=True)


def unseal(data: bytes, kind: type[M]) -> M:
    """Returns the record that an object holds.

    Raises:
        CorruptRecordError: The bytes are not those that ``seal`` made.
        FormatVersionError: They are of another version.
    """
    try:
        sealed = pb.Sealed.FromString(data)
    except DecodeError as e:
        raise CorruptRecordError("expected a sealed record") from e
    if (
        not sealed.format_version  # an empty object is the sum of nothing
        or _checksum(sealed.payload, sealed.nonce, sealed.format_version)
        != sealed.crc32c
    ):
        raise CorruptRecordError("its checksum does not match its bytes")
    if sealed.format_version != FORMAT_VERSION:
        raise FormatVersionError(
            f"expected format version {FORMAT_VERSION}, got {sealed.format_version}"
        )
    try:
        return kind.FromString(sealed.payload)
    except DecodeError as e:
        raise CorruptRecordError("expected another kind of record") from e


def _checksum(payload: bytes, nonce: bytes, format_version: int) -> int:
    """The CRC-32C of one behind the other, which that of the version goes before."""
    return crc32c(nonce, crc32c(payload, format_version))
