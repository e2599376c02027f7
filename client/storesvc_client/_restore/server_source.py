"""Reads stored chunks from the server with ``ReadChunks``."""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextvars import copy_context
from functools import partial
from itertools import cycle
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from storesvc.storage.threads import Threads
from storesvc_client._chunks.slabs import frame_of
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.buffer_budget import BUDGET_BYTES
from storesvc_client._rpc.connection import Connection
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2 import ChunkFrame

STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Maximum streams of one restore, each over a socket of its own. On two cores a second
socket saves a tenth of the CPU time; a third stream costs as much."""

CHUNKS_A_CALL: Final = 4096
"""Maximum chunks requested by one call."""

_METHOD: Final = "/storesvc.v1.ChunkService/ReadChunks"

_Method: TypeAlias = "grpc.UnaryStreamMultiCallable[api.ReadChunksRequest, bytes]"


def shares(
    ordinals: Sequence[int], sizes: Sequence[int], count: int
) -> Iterator[Sequence[int]]:
    """Cuts chunks into the shares of single calls, of equal size in bytes, so that
    streams end together.

    Args:
        ordinals: The chunks.
        sizes: Stored size of each, in bytes.
        count: Number of shares; more if a share would have too many chunks.
    """
    least = -(-sum(sizes) // count)
    begin = size = 0
    for end, more in enumerate(sizes, 1):
        size += more
        if size >= least or end - begin == CHUNKS_A_CALL or end == len(ordinals):
            yield ordinals[begin:end]
            begin, size = end, 0


class ServerSource:
    """Reads stored chunks with ``ReadChunks`` over several streams."""

    def __init__(self, connection: Connection, *, name: str, uid: str) -> None:
        self._connection = connection
        self._name = name
        self._uid = uid
        self.budget_bytes = BUDGET_BYTES
        self._context = copy_context()
        """Context of the restore: the calls of all threads belong to its span."""
        self._streams: set[grpc.Call] = set()
        self._stopped = False

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``; resumes broken streams.

        Requests chunks in windows whose buffers fit the budget, because the server
        chooses the order within a window. Chunks ascend by leaf, so a window completes
        most of the buffers that it allocates.
        """
        left = ordinals
        while left and not self._stopped:
            count = assembly.count_fitting(left, self.budget_bytes)
            self._read_window(left[:count], assembly)
            left = left[count:]

    def _read_window(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """Reads chunks over several streams; returns when all are complete."""
        sizes = [assembly.length(ordinal) for ordinal in ordinals]
        calls = list(shares(ordinals, sizes, STREAMS))
        channels = cycle(self._connection.channels(min(STREAMS, len(calls))))
        with Threads(STREAMS, "storesvc-restore") as pool:
            futures = [
                pool.submit(
                    self._context.copy().run,
                    partial(self._read, call, assembly, next(channels)),
                )
                for call in calls
            ]
            try:
                self._wait(futures, assembly)
            except BaseException:  # one failed, or Ctrl-C: stop the others
                self._stopped = True
                for future in futures:
                    future.cancel()
                for stream in tuple(self._streams):
                    stream.cancel()
                raise

    def _wait(self, futures: "Sequence[Future[None]]", assembly: Assembly) -> None:
        """Waits for the streams until the deadline; a server may send nothing."""
        left = assembly.seconds_left
        try:
            for future in as_completed(futures, None if left == math.inf else left):
                future.result()
        except TimeoutError:
            assembly.check_time()
            for future in futures:  # the last chunks have just arrived
                future.result()

    def _read(
        self, ordinals: Sequence[int], assembly: Assembly, channel: grpc.Channel
    ) -> None:
        # Not the generated stub: it would parse the chunks into messages, a copy.
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
        """Reads chunks in one stream; returns those missing when it broke.

        Raises:
            UnavailableError: The stream completed no chunk.
        """
        try:
            self._stream(method, ordinals, assembly)
            left = assembly.restart(ordinals)
            if left:
                raise UnavailableError(
                    f"store {self._connection.address} ended a stream early: "
                    f"{len(left)} chunks are missing or were corrupted in transit"
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
            if self._stopped:  # set before the stream was in the set to be cancelled
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
            stream.cancel()  # after an error here the server must stop sending

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
                f"store {self._connection.address} sent an inconsistent frame: its "
                "lengths do not match its chunks or its data"
            )
        at = 0
        for ordinal, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            assembly.add(ordinal, offset, data[at : at + length])
            at += length
