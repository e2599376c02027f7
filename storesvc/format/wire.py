"""Encodes and decodes frames without protobuf, which copies their data several times.

A message that carries chunks holds one frame, and ends with the frame's data. So all
bytes before the data, the head, can be encoded and decoded separately: the data are
copied once when sent, and not at all when received. The encoding equals that of the
generated classes byte for byte; messages in another field order are left to them.
Source: https://protobuf.dev/programming-guides/encoding.

All of a ``ReadChunksResponse`` before its data is known before the data are read from a
data file, so they are read directly behind it.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

_DELIMITED: Final = 2
"""Wire type of bytes and messages."""

_MAX_SHIFT: Final = 63


class Frame(NamedTuple):
    """A received frame."""

    columns: api.ChunkFrame
    """The frame without its data."""
    data: memoryview


def tag(field: int) -> bytes:
    """Returns the encoded tag of a field of bytes or of a message."""
    return bytes([field << 3 | _DELIMITED])


_DATA: Final = tag(api.ChunkFrame.DATA_FIELD_NUMBER)


def head(outer: bytes, columns: api.ChunkFrame, size: int) -> bytes:
    """Encodes the part of a message before its frame's data.

    Args:
        outer: The tag of the frame in it.
        columns: The frame, without its data.
        size: Bytes of the data, at least 1.
    """
    before = columns.SerializeToString() + _DATA + _varint(size)
    return b"".join((outer, _varint(len(before) + size), before))


def split(message: bytes, outer: bytes) -> Frame | None:
    """Decodes the frame of a message; returns None for a message in another form than
    the generated classes write, which they may parse.

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
    except (IndexError, DecodeError):  # truncated
        return None
    return None


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset of its end; truncates a long
    one."""
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


FRAME_BYTES: Final = 2 << 20
"""Maximum bytes of data in a frame, as many as clients send: both ends together take
0.1 CPU-s/GB more at 1 MiB, and 0.3 at 512 KiB."""

_SENT: Final = tag(chunk_api.ReadChunksResponse.FRAME_FIELD_NUMBER)


class Part(NamedTuple):
    """A message: a header, followed by a range of a data file."""

    head: bytes
    start: int
    stop: int


def cut_parts(
    start: int, chunks: Iterable[int], lengths: Iterable[int]
) -> Iterator[Part]:
    """Yields the responses that carry chunks.

    Args:
        start: Offset of the first chunk in its data file; the others follow it.
        lengths: Stored bytes of each.
    """
    columns = upload_api.ChunkFrame()
    begin = at = start
    for chunk, length in zip(chunks, lengths, strict=True):
        offset = 0
        while offset < length:
            piece = min(length - offset, FRAME_BYTES - (at - begin))
            columns.chunk.append(chunk)
            columns.offset.append(offset)
            columns.length.append(piece)
            offset += piece
            at += piece
            if at - begin == FRAME_BYTES:
                yield Part(head(_SENT, columns, FRAME_BYTES), begin, at)
                columns, begin = upload_api.ChunkFrame(), at
    if at > begin:
        yield Part(head(_SENT, columns, at - begin), begin, at)


def cut(data: bytes, start: int, parts: Iterable[Part]) -> list[bytes]:
    """Cuts a range of a data file, read at `start`, into the messages of its parts."""
    view = memoryview(data)
    return [
        b"".join((part.head, view[part.start - start : part.stop - start]))
        for part in parts
    ]
