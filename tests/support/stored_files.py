"""Files of a store on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError

from storesvc_proto.v1 import bucket_pb2 as pb


def files(root: Path) -> dict[str, bytes]:
    """Returns every file below a root; records without their nonces, so that a record
    that is written again is unchanged."""
    return {str(p): _said(p) for p in root.rglob("*") if p.is_file()}


def _said(file: Path) -> bytes:
    data = file.read_bytes()
    if file.suffix != ".binpb":
        return data
    try:
        sealed = pb.Sealed.FromString(data)
    except DecodeError:  # a table, say
        return data
    sealed.ClearField("nonce")
    sealed.ClearField("crc32c")  # which sums it up, too
    return sealed.SerializeToString(deterministic=True)


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Asserts that a block changes no file."""
    before = files(root)
    yield
    assert before == files(root)
