"""Stored chunks over the wire, by ``ReadChunks``."""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import cycle
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from storesvc_client._chunks.frames import frame_of
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.memory_budget import BUDGET_BYTES
from storesvc_client._rpc.connection import Connection
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2 import ChunkFrame

STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Streams of one restore, each over a socket of its own. On two cores a second socket
saves a tenth of the CPU; a third stream costs as much."""

CHUNKS_A_CALL: Final = 4096
"""Chunks that one call asks for."""

_METHOD: Final = "/storesvc.v1.ChunkService/ReadChunks"

_Method: TypeAlias = "grpc.UnaryStreamMultiCallable[api.ReadChunksRequest, bytes]"


def shares(
    ordinals: Sequence[int], sizes: Sequence[int], count: int
) -> Iterator[Sequence[int]]:
    """Cuts chunks into what single calls ask for: as many bytes each, so that streams
    end together.

    Args:
        ordinals: Of the chunks.
        sizes: Bytes of each.
        count: How many shares there are, unless these have too many chunks.
    """
    least = -(-sum(sizes) // count)
    begin = size = 0
    for end, more in enumerate(sizes, 1):
        size += more
        if size >= least or end - begin == CHUNKS_A_CALL or end == len(ordinals):
            yield ordinals[begin:end]
            begin, size = end, 0


class StreamedSource:
    """Stored chunks by ``ReadChunks``, over several streams."""

    def __init__(self, connection: Connection, *, name: str, uid: str) -> None:
        self._connection = connection
        self._name = name
        self._uid = uid
        self.budget_bytes = BUDGET_BYTES
        self._streams: set[grpc.Call] = set()
        self._stopped = False

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``; a broken stream goes on where it stopped.

        Chunks are asked for in windows: the server chooses the order within one, and
        its buffers fit the budget. Chunks ascend by leaf, so that a window completes
        most of the buffers that it begins.
        """
        left = ordinals
        while left and not self._stopped:
            count = assembly.count_fitting(left, self.budget_bytes)
            self._read_window(left[:count], assembly)
            left = left[count:]

    def _read_window(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """Reads chunks over several streams, and returns once all are whole."""
        sizes = [assembly.length(ordinal) for ordinal in ordinals]
        calls = list(shares(ordinals, sizes, STREAMS))
        channels = cycle(self._connection.channels(min(STREAMS, len(calls))))
        with ThreadPoolExecutor(STREAMS, "storesvc-restore") as pool:
            futures = [
                pool.submit(self._read, call, assembly, next(channels))
                for call in calls
            ]
            try:
                self._wait(futures, assembly)
            except BaseException:  # one failed, or Ctrl-C: the others must not go on
                self._stopped = True
                for future in futures:
                    future.cancel()
                for stream in tuple(self._streams):
                    stream.cancel()
                raise

    def _wait(self, futures: "Sequence[Future[None]]", assembly: Assembly) -> None:
        """Waits for streams; a server may have nothing to send."""
        left = assembly.seconds_left
        try:
            for future in as_completed(futures, None if left == math.inf else left):
                future.result()
        except TimeoutError:
            assembly.check_time()
            for future in futures:  # which have just brought the last of it
                future.result()

    def _read(
        self, ordinals: Sequence[int], assembly: Assembly, channel: grpc.Channel
    ) -> None:
        # not the generated stub, whose responses are messages
        method: _Method = channel.unary_stream(
            _METHOD, request_serializer=api.ReadChunksRequest.SerializeToString
        )
        left = list(ordinals)
        while left and not self._stopped:
            for attempt in self._connection.attempts("ReadChunks"):
                assembly.check_time()
                with attempt:
                    left = self._read_some(method, left, assembly)

    def _read_some(
        self, method: _Method, ordinals: Sequence[int], assembly: Assembly
    ) -> list[int]:
        """Reads chunks, and returns those that a broken stream left.

        Raises:
            UnavailableError: It left all of them.
        """
        try:
            self._stream(method, ordinals, assembly)
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

    def _stream(
        self, method: _Method, ordinals: Sequence[int], assembly: Assembly
    ) -> None:
        request = api.ReadChunksRequest(name=self._name, uid=self._uid, chunk=ordinals)
        stream = method(request)
        self._streams.add(stream)
        try:
            if self._stopped:  # meanwhile: nobody else cancels it
                return
            with (
                translated(self._connection.address),
                assembly.meter.part(f"stream from chunk {ordinals[0]}"),
            ):
                while True:
                    with assembly.meter.phase("read"):
                        response = next(stream, None)
                    if response is None:
                        break
                    self._take(response, assembly)
        finally:
            self._streams.discard(stream)
            stream.cancel()  # a refusal on this side must not leave it flowing

    def _take(self, response: bytes, assembly: Assembly) -> None:
        try:
            frame, data = frame_of(response)
        except DecodeError:
            frame, data = ChunkFrame(length=[0]), memoryview(b"")
        if (
            not len(frame.chunk) == len(frame.offset) == len(frame.length)
            or 0 in frame.length
            or sum(frame.length) != len(data)
        ):
            raise DataLossError(
                f"store {self._connection.address} sent a frame that contradicts itself"
            )
        at = 0
        for ordinal, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            assembly.add(ordinal, offset, data[at : at + length])
            at += length
