"""Documents about trees: JSON objects, compressed by zlib.

They are ``LeafTable.structure`` of a checkpoint. What is in one, a client wrote; it
is data for the reader, whatever it says.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from storesvc_client.errors import StructureError

MAX_BYTES: Final = 256 << 20
"""Of a document, decompressed: few bytes must not become all of the memory."""

_PLACE: Final = "structure of the checkpoint"


def pack_document(fields: Mapping[str, Any]) -> bytes:
    """Returns a document."""
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    return zlib.compress(text.encode(), 1)


def unpack_document(document: bytes) -> dict[str, Any]:
    """Returns the fields of a document.

    Raises:
        StructureError: It is none.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(document, MAX_BYTES)
        if not unpacker.eof:
            raise StructureError(
                f"{_PLACE}: expected at most {MAX_BYTES} bytes, got more, or a part of "
                "it; use another checkpoint"
            )
        fields = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as e:
        if isinstance(e, StructureError):
            raise
        raise StructureError(
            f"{_PLACE}: expected compressed JSON, got other bytes ({e}); use "
            "run.restore(like=), or another checkpoint"
        ) from e
    if not isinstance(fields, dict):
        raise StructureError(
            f"{_PLACE}: expected fields, got a {type(fields).__name__}; use "
            "run.restore(like=), or another checkpoint"
        )
    return fields
