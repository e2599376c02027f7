"""Frames of chunks, serialised by hand.

protobuf would copy the bytes of a frame into a message, that one into another, and
both into what is sent. Here they are copied once. What comes out is what the generated
classes write, to the byte: https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from typing import Final

from storesvc_client._channel import MAX_FRAME_BYTES
from storesvc_proto.v1 import upload_service_pb2 as api

_DELIMITED: Final = 2
"""The wire type of bytes and messages."""


def _tag(field: int) -> bytes:
    return bytes([field << 3 | _DELIMITED])


_FRAME: Final = _tag(api.WriteChunksRequest.FRAME_FIELD_NUMBER)
_DATA: Final = _tag(api.ChunkFrame.DATA_FIELD_NUMBER)


class Frame:
    """A frame that is being filled with pieces of chunks."""

    def __init__(self) -> None:
        self._columns = api.ChunkFrame()
        self._data: list[bytes | memoryview] = []
        self.size = 0
        """Bytes of its pieces."""

    def add(self, chunk: int, offset: int, *parts: bytes | memoryview) -> None:
        """Adds a piece.

        Args:
            chunk: Ordinal of its chunk.
            offset: Where in the stored chunk it begins, in bytes.
            parts: Its bytes, one after another: views of memory that nobody changes
                before ``request``.
        """
        length = sum(map(len, parts))
        self._columns.chunk.append(chunk)
        self._columns.offset.append(offset)
        self._columns.length.append(length)
        self._data += parts
        self.size += length

    def request(self) -> bytes:
        """Returns the serialised ``WriteChunksRequest`` that holds it."""
        columns = self._columns.SerializeToString()
        data = _DATA + _varint(self.size)
        size = _varint(len(columns) + len(data) + self.size)
        return b"".join((_FRAME, size, columns, data, *self._data))


def requests_of_large(ordinal: int, data: memoryview, tail: bytes) -> Iterator[bytes]:
    """Yields the requests that carry a chunk that fills several frames.

    Args:
        ordinal: Of the chunk.
        data: Its elements.
        tail: What follows them.
    """
    for offset in range(0, len(data) + len(tail), MAX_FRAME_BYTES):
        piece = data[offset : offset + MAX_FRAME_BYTES]
        past = max(0, offset - len(data))  # of the tail, in a frame before
        frame = Frame()
        frame.add(
            ordinal, offset, piece, tail[past : past + MAX_FRAME_BYTES - len(piece)]
        )
        yield frame.request()


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
