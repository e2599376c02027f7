"""Receiving chunks: from where they lie into the buffers of a restore.

``Assembly`` is the plan and its progress: which chunks are needed, where the
bytes of each go, and when a buffer is whole. A ``ChunkSource`` brings the bytes:
today by ``ReadChunks``; whatever else can read stored chunks fits in its place.
Nothing is believed: a piece that was not asked for is refused, and every chunk is
checked against the manifest.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part
from storesvc.format.manifests import Manifest
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._channel import Connection
from storesvc_client._retrying import patiently
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from storesvc_proto.v1.upload_service_pb2 import ChunkFrame

STREAMS: Final = 2
"""Streams of one restore."""

CHUNKS_A_CALL: Final = 4096
"""Chunks that one call asks for."""

ALIGNMENT: Final = 64
"""Bytes; what XLA asks of host memory that it uses without a copy."""

NDArrayAny = NDArray[Any]


@dataclass(eq=False)
class Buffer:
    """A part of a leaf in memory, to be filled."""

    row: int
    """Of the leaf in the manifest."""
    region: Region
    array: NDArrayAny
    chunks_left: int


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk on its way."""

    buffers: list[Buffer]
    into: NDArray[np.uint8] | None = None
    """Where its elements go: into a buffer, or beside it to be spread."""
    beside: NDArrayAny | None = None
    received: int = 0
    """Bytes, checksum included."""
    checksum: int = 0
    tail: bytes = b""


class ChunkSource(Protocol):
    """Where stored chunks come from."""

    def read(self, ordinals: Sequence[int], assembly: "Assembly") -> None:
        """Gives each of the chunks to ``Assembly.add``, its pieces in order.

        Raises:
            StoreError: Some chunks could not be read.
        """


class Assembly:
    """The buffers of a restore, and how far they are."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: Iterable[tuple[int, Region]],
        *,
        name: str,
        place: Callable[[Buffer], None],
    ) -> None:
        """Plans a restore.

        Args:
            manifest: Of the checkpoint.
            wanted: Rows of leaves, and the regions of them to read.
            name: What messages call the checkpoint.
            place: Called with each buffer once it is filled and checked, from
                the thread that brought its last piece.
        """
        self._manifest = manifest
        self._name = name
        self._place = place
        self._lock = threading.Lock()
        self._chunks: dict[int, _Chunk] = {}
        for row, region in wanted:
            self._plan(row, region)

    @property
    def missing(self) -> list[int]:
        """Chunks that are not whole yet, ascending."""
        with self._lock:
            return sorted(self._chunks)

    def restart(self, ordinals: Iterable[int]) -> list[int]:
        """Forgets the pieces of chunks that are not whole, and returns those."""
        with self._lock:
            left = [ordinal for ordinal in ordinals if ordinal in self._chunks]
        for ordinal in left:
            self._chunks[ordinal] = _Chunk(self._chunks[ordinal].buffers)
        return left

    def add(self, ordinal: int, offset: int, piece: memoryview) -> None:
        """Takes the next piece of a chunk.

        Raises:
            DataLossError: It is not what was asked for, or the chunk is not what
                was saved.
        """
        chunk = self._chunks.get(ordinal)
        length = int(self._manifest.tree.stored_lengths[ordinal]) if chunk else 0
        if chunk is None or offset != chunk.received or offset + len(piece) > length:
            raise DataLossError(
                f"{self._name}: the server sent bytes {offset} to "
                f"{offset + len(piece)} of chunk {ordinal}, which were not asked for"
            )
        if chunk.into is None:
            chunk.into, chunk.beside = self._destination(ordinal, chunk)
        elements = piece[: max(0, length - CHECKSUM_BYTES - offset)]
        # NumPy copies without the interpreter's lock; slices of memoryview do not.
        np.copyto(
            chunk.into[offset : offset + len(elements)],
            np.frombuffer(elements, np.uint8),
        )
        chunk.checksum = crc32c(elements, chunk.checksum)
        chunk.tail += bytes(piece[len(elements) :])
        chunk.received += len(piece)
        if chunk.received == length:
            self._finish(ordinal, chunk)

    def _plan(self, row: int, region: Region) -> None:
        tree = self._manifest.tree
        grid, dtype = tree.grids[row], DTYPES[tree.leaves[row].dtype]
        buffer = Buffer(row, region, aligned_empty(region, dtype), 0)
        first = int(tree.first_chunk[row])
        for within in grid.covering(region):
            self._chunks.setdefault(first + within, _Chunk([])).buffers.append(buffer)
            buffer.chunks_left += 1
        if not buffer.chunks_left:
            self._place(buffer)

    def _destination(
        self, ordinal: int, chunk: _Chunk
    ) -> tuple[NDArray[np.uint8], NDArrayAny | None]:
        """Where the elements of a chunk go: straight into the one buffer where
        they are one run, or else into an array of their own."""
        row, within = self._manifest.tree.locate(ordinal)
        grid = self._manifest.tree.grids[row]
        if len(chunk.buffers) == 1:
            buffer = chunk.buffers[0]
            run = part(buffer.array, buffer.region, grid.region(within))
            if run.nbytes == grid.chunk_bytes and run.flags.c_contiguous:
                return run.reshape(-1).view(np.uint8), None
        dtype = DTYPES[self._manifest.tree.leaves[row].dtype]
        beside = np.empty(grid.chunk_shape, dtype)
        return beside.reshape(-1).view(np.uint8), beside

    def _finish(self, ordinal: int, chunk: _Chunk) -> None:
        expected = int(self._manifest.sums.crc32c[ordinal])
        if chunk.checksum != expected or chunk.tail != expected.to_bytes(
            CHECKSUM_BYTES, "little"
        ):
            raise DataLossError(
                f"{self._name} {self._manifest.tree.describe_chunk(ordinal)}: expected "
                f"the checksum {expected:08x}, got {chunk.checksum:08x}; its stored "
                "bytes are damaged, use another checkpoint",
                reason="CORRUPT_DATA",
            )
        if chunk.beside is not None:
            row, within = self._manifest.tree.locate(ordinal)
            held = self._manifest.tree.grids[row].region(within)
            for buffer in chunk.buffers:
                into = part(buffer.array, buffer.region, held)
                into[...] = part(chunk.beside, held, buffer.region)
        with self._lock:
            del self._chunks[ordinal]
            for buffer in chunk.buffers:
                buffer.chunks_left -= 1
            whole = [buffer for buffer in chunk.buffers if not buffer.chunks_left]
        for buffer in whole:
            self._place(buffer)


class StreamedSource:
    """Stored chunks by ``ReadChunks``, over several streams."""

    def __init__(self, connection: Connection, *, name: str, uid: str) -> None:
        self._connection = connection
        self._stub = ChunkServiceStub(connection.channel)
        self._name = name
        self._uid = uid
        self._streams: set[grpc.Call] = set()
        self._stopped = False

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``; a broken stream goes on where it stopped."""
        share = max(1, min(CHUNKS_A_CALL, -(-len(ordinals) // STREAMS)))
        calls = [ordinals[at : at + share] for at in range(0, len(ordinals), share)]
        with ThreadPoolExecutor(STREAMS, "storesvc-restore") as pool:
            futures = [pool.submit(self._read, call, assembly) for call in calls]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: the others must not go on
                self._stopped = True
                for future in futures:
                    future.cancel()
                for stream in tuple(self._streams):
                    stream.cancel()
                raise

    def _read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        left = list(ordinals)
        while left and not self._stopped:
            for attempt in patiently():
                with attempt:
                    left = self._read_some(left, assembly)

    def _read_some(self, ordinals: Sequence[int], assembly: Assembly) -> list[int]:
        """Reads chunks, and returns those that a broken stream left.

        Raises:
            UnavailableError: It left all of them.
        """
        try:
            self._stream(ordinals, assembly)
            left = assembly.restart(ordinals)
            if left:
                raise UnavailableError(
                    f"store {self._connection.address} ended a stream early: "
                    f"{len(left)} chunks are missing"
                )
        except UnavailableError:
            if self._stopped:
                return []
            left = assembly.restart(ordinals)
            if len(left) == len(ordinals):
                raise
        return left

    def _stream(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        request = api.ReadChunksRequest(name=self._name, uid=self._uid, chunk=ordinals)
        stream = self._stub.ReadChunks(request)
        self._streams.add(stream)
        try:
            with translated(self._connection.address):
                for response in stream:
                    self._take(response.frame, assembly)
        finally:
            self._streams.discard(stream)
            stream.cancel()  # a refusal on this side must not leave it flowing

    def _take(self, frame: ChunkFrame, assembly: Assembly) -> None:
        if (
            not len(frame.chunk) == len(frame.offset) == len(frame.length)
            or 0 in frame.length
            or sum(frame.length) != len(frame.data)
        ):
            raise DataLossError(
                f"store {self._connection.address} sent a frame that contradicts itself"
            )
        data, at = memoryview(frame.data), 0
        for ordinal, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            assembly.add(ordinal, offset, data[at : at + length])
            at += length


def aligned_empty(region: Region, dtype: np.dtype[Any]) -> NDArrayAny:
    """Returns an array for a region, unfilled, aligned for XLA."""
    shape = tuple(stop - start for start, stop in region)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
