"""Frames on the wire, beside protobuf: which copies what a message holds several times.

A message that carries chunks holds one frame, and ends with the bytes of that. So all
before them, its head, can be made, and read, by itself; the bytes are copied once on
their way out, and on their way in not at all. What comes out is what the generated
classes write, to the byte; what comes in in another order than theirs is left to them.
Source: https://protobuf.dev/programming-guides/encoding.
"""

from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from storesvc_proto.v1 import upload_service_pb2 as api

_DELIMITED: Final = 2
"""The wire type of bytes and messages."""

_MAX_SHIFT: Final = 63


class Frame(NamedTuple):
    """A frame that came in."""

    columns: api.ChunkFrame
    """Without the bytes."""
    data: memoryview


def tag(field: int) -> bytes:
    """Returns what a field of bytes, or of a message, begins with."""
    return bytes([field << 3 | _DELIMITED])


_DATA: Final = tag(api.ChunkFrame.DATA_FIELD_NUMBER)


def head(outer: bytes, columns: api.ChunkFrame, size: int) -> bytes:
    """Returns what a message with a frame begins with.

    Args:
        outer: The tag of the frame in it.
        columns: The frame, without its bytes.
        size: Of the bytes that follow; at least 1.
    """
    before = columns.SerializeToString() + _DATA + _varint(size)
    return b"".join((outer, _varint(len(before) + size), before))


def split(message: bytes, outer: bytes) -> Frame | None:
    """Returns the frame of a message; None: it is none that the generated classes wrote
    with a frame, and they may read it.

    Args:
        message: Serialised.
        outer: The tag of the frame in it.
    """
    try:
        size, begin = _varint_at(message, len(outer))
        if not message.startswith(outer) or begin + size != len(message):
            return None
        end = begin
        while message[end] & 7 == _DELIMITED:
            size, data = _varint_at(message, end + 1)
            if message[end : end + 1] == _DATA and data + size == len(message):
                columns = api.ChunkFrame.FromString(message[begin:end])
                return Frame(columns, memoryview(message)[data:])
            end = data + size
    except (IndexError, DecodeError):  # cut off
        return None
    return None


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it; a longer one is cut."""
    number = shift = 0
    while data[at] > 0x7F and shift < _MAX_SHIFT:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
