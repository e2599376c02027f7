"""Sends the chunks of an upload to the server in ``WriteChunks`` streams.

A stream carries frames of chunks, or, if this process writes the storage itself, tables
of the chunks that it has made durable. The server acknowledges durable chunks in the
order of sending; after a transient error, a new stream resends the rest.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from typing import Final, Self, TypeAlias, TypeVar

import grpc

from storesvc.storage.threads import Threads
from storesvc_client._chunks.host_memory import STREAM_BYTES
from storesvc_client._chunks.slabs import FilledSlab, SumsInProgress, frames
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.retry import is_transient
from storesvc_client._save.resend_window import ResendWindow, SendStream
from storesvc_client._save.slab_queue import SlabQueue, WantedSlabs
from storesvc_client._values.progress import Meter
from storesvc_client.errors import StoreError, translated
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api

STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Maximum streams of one save, each over a socket of its own."""

_WRITE_CHUNKS: Final = "/storesvc.v1.UploadService/WriteChunks"

_Method: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, api.WriteChunksResponse]"

T = TypeVar("T")


class ChunkStreams:
    """The streams of one writer of an upload."""

    def __init__(
        self,
        connection: Connection,
        ref: api.WriterRef,
        sums: SumsInProgress,
        meter: Meter,
    ) -> None:
        """Creates the sender; nothing is sent yet.

        Args:
            connection: Connection to the store.
            ref: The writer.
            sums: Checksums of all chunks, filled in here.
            meter: Measures phases and bytes.
        """
        self._connection = connection
        self._ref = ref
        self._sums = sums
        self._meter = meter

    def send_slabs(self, slab_queue: SlabQueue, wanted: WantedSlabs) -> None:
        """Sends slabs over several streams until the queue ends.

        There are no more streams than the staging memory can fill with whole batches,
        because incomplete batches would hold memory that other streams wait for.

        Args:
            slab_queue: Queue that takes the memory of durable slabs back.
            wanted: Slabs to send.

        Raises:
            StoreError: As the contract states for WriteChunks.
            Exception: The snapshot's error.
        """
        count = max(1, min(STREAMS, slab_queue.budget_bytes // STREAM_BYTES))
        with Threads(count, "storesvc-send") as pool:
            futures = [
                pool.submit(self._send_share, slab_queue, wanted, channel)
                for channel in self._connection.channels(count)
            ]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: stop the others
                slab_queue.cancel()
                raise

    def send_tables(self, take: Callable[[], tree_pb2.ChunkTable | None]) -> None:
        """Sends tables of durable chunks over one stream.

        Args:
            take: Waits for the next table and returns it; None after the last.

        Raises:
            StoreError: As the contract states for WriteChunks.
        """
        self._send_all(
            ResendWindow(
                take,
                lambda table: len(table.crc32c),
                lambda table: None,  # noqa: ARG005 - a table holds no memory
            ),
            lambda stream: (
                api.WriteChunksRequest(placed=table).SerializeToString()
                for table in stream
            ),
            self._connection.channel,
        )

    def _send_share(
        self, slab_queue: SlabQueue, wanted: WantedSlabs, channel: grpc.Channel
    ) -> None:
        """Sends slabs over one channel until the queue ends."""
        take_next = wanted.taker()

        def take() -> FilledSlab | None:
            if (filled := take_next()) is not None:
                self._meter.add(filled.wanted_bytes)
            return filled

        window = ResendWindow(
            take,
            lambda filled: len(filled.wanted),
            slab_queue.give_back,
            lambda filled: filled.wanted_bytes,
        )
        try:
            with self._meter.part("stream"):
                self._send_all(
                    window,
                    lambda stream: frames(stream, self._sums, self._meter),
                    channel,
                )
        finally:
            window.drop()

    def _send_all(
        self,
        window: ResendWindow[T],
        serialized: Callable[[SendStream[T]], Iterator[bytes]],
        channel: grpc.Channel,
    ) -> None:
        """Sends the items of a window in one stream after another, with retries."""
        # Not the generated stub: its requests are messages, which would copy the data.
        method: _Method = channel.stream_stream(
            _WRITE_CHUNKS,
            response_deserializer=api.WriteChunksResponse.FromString,
        )
        while window.wait():
            failed: BaseException | None = None
            for attempt in self._connection.attempts("WriteChunks"):
                with attempt:
                    failed = self._send(method, window.stream(), serialized)
            if failed is not None:  # an error of this process: not retried
                raise failed

    def _send(
        self,
        method: "_Method",
        stream: SendStream[T],
        serialized: Callable[[SendStream[T]], Iterator[bytes]],
    ) -> BaseException | None:
        """Sends items in one stream; returns the error raised on this side, if any.

        Raises:
            UnavailableError: The stream broke before a chunk became durable.
            LimitError: The server had no memory before a chunk became durable.
        """

        def requests() -> Iterator[bytes]:
            yield api.WriteChunksRequest(open=self._ref).SerializeToString()
            yield from serialized(stream)

        sent, durable = _Requests(requests(), self._meter), 0
        try:
            with translated(self._connection.address):
                # Acknowledged at once: if the stream breaks, the next one resends only
                # what is not durable.
                for response in method(sent):
                    stream.acknowledge(response.durable_count - durable)
                    durable = response.durable_count
        except StoreError as e:
            # A stream that made progress does not count as a failed attempt.
            is_retried = durable and is_transient(e)
            if sent.error is None and not is_retried:
                raise
        finally:
            sent.end()
        return sent.error


class _Requests:
    """The requests of one stream; keeps the error that the iterator raised, for which
    gRPC only cancels the call.

    It also measures sending: gRPC asks for the next request once the previous one has
    left.
    """

    def __init__(self, requests: Iterator[bytes], meter: Meter) -> None:
        self._requests = requests
        self._meter = meter
        self._answered = meter.clock()
        self._has_ended = False
        self.error: BaseException | None = None
        """Error raised by the iterator, if any."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        self._meter.spend("send", self._answered)
        try:
            return next(self._requests)
        except StopIteration:
            self._has_ended = True
            raise
        except BaseException as e:
            self.error = e
            raise
        finally:
            self._answered = self._meter.clock()

    def end(self) -> None:
        """Records the time between the last request and the end of the call."""
        if self._has_ended:
            self._meter.spend("acknowledge", self._answered)
