"""Reads and writes the records of a store in a directory, without a server."""

from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from storesvc.format.checksums import crc32c
from storesvc.format.seal import seal, unseal
from storesvc_proto.v1 import bucket_pb2 as pb

M = TypeVar("M", bound=Message)


def read(root: Path, place: str, kind: type[M]) -> M:
    """Returns the record of a place."""
    return unseal((root / place).read_bytes(), kind, place=place)


def write(root: Path, place: str, record: Message) -> None:
    """Writes the record of a place."""
    (root / place).write_bytes(seal(record, place=place))


def sealed_of_version_1(record: bytes) -> bytes:
    """Returns a serialised record, sealed as in version 1 of the format."""
    checksum = crc32c(b"nonce", crc32c(record, 1))
    sealed = pb.Sealed(
        format_version=1, crc32c=checksum, payload=record, nonce=b"nonce"
    )
    return sealed.SerializeToString(deterministic=True)


def downgrade(file: Path) -> None:
    """Seals the record of a file as in version 1 of the format."""
    sealed = pb.Sealed.FromString(file.read_bytes())
    assert 2 == sealed.format_version
    bound = pb.BoundRecord.FromString(sealed.payload)
    file.write_bytes(sealed_of_version_1(bound.record))
