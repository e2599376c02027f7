"""Packs documents about trees: JSON objects, compressed by zlib.

A document is stored in ``LeafTable.structure`` of a checkpoint. Any client may have
written it, so sizes are checked before it is parsed, and it is never executed.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from storesvc_client.errors import StructureError

CONTAINERS: Final = b"storesvc.containers/1\n"
"""Prefix of documents that describe containers, and are not the caller's own."""

MAX_BYTES: Final = 128 << 20
"""Maximum bytes of a decompressed document, against decompression bombs."""

MAX_TOKENS: Final = 5_000_000
"""Maximum commas, colons and opening brackets: each may become a Python object, of 80
bytes on average. A module of 40,000 small layers has as many."""

_PLACE: Final = "structure of the checkpoint"
_ADVICE: Final = "use run.restore(like=), or another checkpoint"


def pack_document(fields: Mapping[str, Any]) -> bytes:
    """Returns a document.

    Raises:
        StructureError: It is larger than readers accept.
    """
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    _check_size(text)
    return zlib.compress(text, 1)


def unpack_document(document: bytes) -> dict[str, Any]:
    """Returns the fields of a document.

    Raises:
        StructureError: It is no document, or too large.
    """
    try:
        text = _decompressed(document)
        _check_size(text)
        fields = json.loads(text)
    except StructureError:
        raise
    except (zlib.error, ValueError, RecursionError) as e:
        what = ascii(str(e))[1:-1][:200]
        raise StructureError(
            f"{_PLACE}: expected compressed JSON, got other bytes ({what}); {_ADVICE}"
        ) from e
    except MemoryError as e:
        raise StructureError(
            f"{_PLACE}: expected what fits into memory, got more; {_ADVICE}"
        ) from e
    if not isinstance(fields, dict):
        raise StructureError(
            f"{_PLACE}: expected fields, got a {type(fields).__name__}; {_ADVICE}"
        )
    return fields


def _decompressed(document: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(document, MAX_BYTES + 1)
    if not unpacker.eof and len(text) <= MAX_BYTES:
        raise StructureError(
            f"{_PLACE}: expected all of it, got a document that was cut short; "
            f"{_ADVICE}"
        )
    if unpacker.unused_data:
        raise StructureError(
            f"{_PLACE}: expected nothing after its end, got "
            f"{len(unpacker.unused_data)} bytes; {_ADVICE}"
        )
    return text


def _check_size(text: bytes) -> None:
    if len(text) > MAX_BYTES:
        raise StructureError(
            f"{_PLACE}: too large: expected at most {MAX_BYTES} bytes, got more; "
            f"{_ADVICE}"
        )
    tokens = sum(map(text.count, (b",", b":", b"[", b"{")))
    if tokens > MAX_TOKENS:
        raise StructureError(
            f"{_PLACE}: too large: expected at most {MAX_TOKENS} values, got {tokens}; "
            f"{_ADVICE}"
        )
    if not text.isascii():  # one other character makes Python use 4 bytes each
        raise StructureError(f"{_PLACE}: expected ASCII, got other bytes; {_ADVICE}")
