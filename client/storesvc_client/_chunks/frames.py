"""Frames of chunks: packs the frames of a save, unpacks the frames of a restore."""

from collections.abc import Iterable, Iterator
from typing import Final

from storesvc.format import wire
from storesvc_client._chunks.slabs import FilledSlab, SumsInProgress
from storesvc_client._rpc.connection import MAX_FRAME_BYTES
from storesvc_client._values.progress import Meter
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import upload_service_pb2 as api

_RECEIVED: Final = wire.tag(chunk_api.ReadChunksResponse.FRAME_FIELD_NUMBER)
_SENT: Final = wire.tag(api.WriteChunksRequest.FRAME_FIELD_NUMBER)


class SentFrame:
    """A frame that is being filled with pieces of chunks."""

    def __init__(self) -> None:
        self._columns = api.ChunkFrame()
        self._data: list[bytes | memoryview] = []
        self.size = 0
        """Bytes of the pieces added so far."""

    def add(self, chunk: int, offset: int, *parts: bytes | memoryview) -> None:
        """Adds a piece of a chunk.

        Args:
            chunk: Ordinal of the chunk.
            offset: Offset of the piece within the stored chunk, in bytes.
            parts: Its bytes, one part after another: views of memory that must not
                change before ``request``.
        """
        length = sum(map(len, parts))
        self._columns.chunk.append(chunk)
        self._columns.offset.append(offset)
        self._columns.length.append(length)
        self._data += parts
        self.size += length

    def request(self) -> bytes:
        """Returns the serialized ``WriteChunksRequest`` with this frame."""
        return b"".join((wire.head(_SENT, self._columns, self.size), *self._data))


def frames(
    slabs: Iterable[FilledSlab], sums: SumsInProgress, meter: Meter
) -> Iterator[bytes]:
    """Yields the serialized requests that send slabs; small chunks share a request, a
    large one takes several.

    Args:
        slabs: FilledSlab slabs.
        sums: Checksums of the chunks, filled in here.
        meter: Measures the time of the checksums.
    """
    frame = SentFrame()
    for filled in slabs:
        for ordinal, size, parts in filled.stored(sums, meter):
            if frame.size and frame.size + size > MAX_FRAME_BYTES:
                yield frame.request()
                frame = SentFrame()
            if size <= MAX_FRAME_BYTES:
                frame.add(ordinal, 0, *parts)
                continue
            for at, piece in _cut(parts, MAX_FRAME_BYTES):
                frame.add(ordinal, at, *piece)
                yield frame.request()
                frame = SentFrame()
    if frame.size:
        yield frame.request()


def _cut(
    parts: Iterable[memoryview], size: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Cuts the concatenation of parts into pieces of a size; yields each with its
    offset."""
    piece: list[memoryview] = []
    begin = room = 0
    for part in parts:
        at = 0
        while at < len(part):
            room = room or size
            piece.append(part[at : at + room])
            at += len(piece[-1])
            room -= len(piece[-1])
            if not room:
                yield begin, piece
                piece, begin = [], begin + size
    if piece:
        yield begin, piece


def frame_of(response: bytes) -> wire.Frame:
    """Returns the frame of a serialized ``ReadChunksResponse``, without a copy.

    Raises:
        DecodeError: The response is invalid.
    """
    found = wire.split(response, _RECEIVED)
    if found is None:  # an unusual field order, so let protobuf parse it
        frame = chunk_api.ReadChunksResponse.FromString(response).frame
        found = wire.Frame(frame, memoryview(frame.data))
    return found
