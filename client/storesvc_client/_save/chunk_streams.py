"""Sends the chunks of an upload to the server in ``WriteChunks`` streams.

A stream carries frames of chunks, or, if this process writes the storage itself, tables
of the chunks that it has made durable. The server acknowledges durable chunks in the
order of sending; after a transient error, a new stream resends the rest.

The thread that feeds a broken stream may still be waiting for its next item and take it
later. So each stream counts its own sent items, and an item stays in the window until a
stream that sent it has received its acknowledgement. No chunk is lost, and no memory is
reused while it may be sent again, because of the order:

1. An item enters the window before any stream can send it.
2. A stream counts an item as sent before it sends it.
3. An acknowledged item leaves the window, and then its memory is released.

A server acknowledges one batch at a time. When the snapshot needs memory back before it
can fill the next slab, a stream that has sent less than a batch ends, which makes the
server store and acknowledge what it has.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeAlias, TypeVar

import grpc

from storesvc.storage.threads import Threads
from storesvc_client._chunks.memory import BATCH_BYTES, STREAM_BYTES
from storesvc_client._chunks.slabs import SLAB_BYTES, FilledSlab, SumsInProgress, frames
from storesvc_client._rpc.connection import MAX_FRAME_BYTES, Connection
from storesvc_client._rpc.retry import is_transient
from storesvc_client._save.snapshot import SlabQueue, StarvedError, WantedSlabs
from storesvc_client._telemetry.progress import Meter
from storesvc_client.errors import StoreError, translate_rpc_errors
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api

T = TypeVar("T")


class ResendWindow(Generic[T]):
    """Items of one or more chunks each on their way to the server: sent and not yet
    acknowledged, resent after a stream breaks."""

    def __init__(
        self,
        take: Callable[[], T | None],
        count: Callable[[T], int],
        done: Callable[[T], None],
        size_bytes: Callable[[T], int] = lambda _: 0,
    ) -> None:
        """Creates an empty window.

        Args:
            take: Returns the next item; None after the last. Several threads may wait
                in it.
            count: Returns the number of chunks of an item, at least 1.
            done: Called with each item once it is durable.
            size_bytes: Returns the bytes that an item adds to a stream; needed if
                ``take`` may raise ``StarvedError``.
        """
        self._take = take
        self.count = count
        self._done = done
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        self._open: dict[int, T] = {}
        """Items taken and not durable, by id, in the order of taking."""
        self._taking = 0
        """Threads waiting in ``take``, including threads of broken streams."""
        self._has_ended = False
        self._is_dropped = False

    @property
    def is_done(self) -> bool:
        """True if no item follows and all are durable."""
        with self._changed:
            return self._has_ended and not self._open and not self._taking

    def wait(self) -> bool:
        """Waits for an item to send; returns False if none follows.

        A stream is opened only then, because servers end streams that stay idle.
        """
        with self._changed:
            is_idle = not self._open and not self._has_ended
        while is_idle:
            with suppress(StarvedError):
                self.next()
                is_idle = False
        with self._changed:
            # items that the thread of a broken stream takes late must be sent, too
            self._changed.wait_for(lambda: self._open or not self._taking)
            return bool(self._open)

    def stream(self) -> "SendStream[T]":
        """Returns a new stream, which first resends all items that are not durable."""
        with self._changed:
            return SendStream(self, list(self._open.values()))

    def next(self) -> T | None:
        """Takes and returns the next new item; None after the last."""
        with self._changed:
            self._taking += 1
        found, has_ended = None, False
        try:
            found = self._take()
            has_ended = found is None
            return None if self._is_dropped else found
        finally:
            with self._changed:
                self._taking -= 1
                self._has_ended = self._has_ended or has_ended
                # 1. Under the lock that ends the taking: `wait` and `is_done` see
                # either a thread that takes or its item, so no item is overlooked.
                if found is not None:
                    self._open[id(found)] = found
                is_late = self._is_dropped
                self._changed.notify_all()
            if found is not None and is_late:
                self.close(found)

    def close(self, item: T) -> None:
        """Removes a durable item from the window."""
        with self._changed:
            was_open = self._open.pop(id(item), None) is not None
        # Once only: the second time its memory could belong to another slab already.
        if was_open:
            self._done(item)

    def drop(self) -> None:
        """Releases all items, durable or not."""
        with self._changed:
            # Set first: a thread that takes an item from now on releases it itself.
            self._is_dropped = True
            left = list(self._open.values())
        for item in left:
            self.close(item)


class SendStream(Generic[T]):
    """The items sent in one stream."""

    def __init__(self, window: ResendWindow[T], unacknowledged: list[T]) -> None:
        self._window = window
        self._unacknowledged = unacknowledged
        self._sent: deque[T] = deque()
        self._durable = 0
        """Durable chunks of the oldest item in ``_sent``."""

    def __iter__(self) -> Iterator[T]:
        for item in self._unacknowledged:
            self._sent.append(item)
            yield item
        while True:
            try:
                found = self._window.next()
            except StarvedError:
                if self._is_held_back:
                    return
                continue
            if found is None:
                return
            # 2. Counted first: another thread receives the acknowledgements, possibly
            # before this one continues after the yield.
            self._sent.append(found)
            yield found

    @property
    def _is_held_back(self) -> bool:
        """True if the server may be holding chunks of this stream back until a batch is
        full. A frame of the sent items may not have left yet, and part of the oldest
        slab may be durable, hence the margins."""
        sent = sum(map(self._window.size_bytes, list(self._sent)))
        return 0 < sent < BATCH_BYTES + SLAB_BYTES + MAX_FRAME_BYTES

    def acknowledge(self, chunks: int) -> None:
        """Records that `chunks` more chunks are durable, in the order of sending."""
        # 3. An item of several chunks is released when the last of them is durable.
        self._durable += chunks
        while self._sent and self._durable >= self._window.count(self._sent[0]):
            item = self._sent.popleft()
            self._durable -= self._window.count(item)
            self._window.close(item)


STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Maximum streams of one save, each over a socket of its own."""

_WRITE_CHUNKS: Final = "/storesvc.v1.UploadService/WriteChunks"

_Method: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, api.WriteChunksResponse]"


@dataclass(eq=False, repr=False)
class ChunkStreams:
    """The streams of one writer of an upload."""

    connection: Connection
    ref: api.WriterRef
    sums: SumsInProgress
    """Get the checksums of all chunks."""
    meter: Meter

    def send_slabs(self, slab_queue: SlabQueue, wanted: WantedSlabs) -> None:
        """Sends slabs over several streams until the queue ends, and gives it the
        memory of durable ones back.

        There are no more streams than the staging memory can fill with whole batches,
        because incomplete batches would hold memory that other streams wait for.

        Raises:
            StoreError: As the contract states for WriteChunks.
            Exception: The snapshot's error.
        """
        count = max(1, min(STREAMS, slab_queue.budget_bytes // STREAM_BYTES))
        with Threads(count, "storesvc-send") as pool:
            futures = [
                pool.submit(self._send_share, slab_queue, wanted, channel)
                for channel in self.connection.channels(count)
            ]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: stop the others
                slab_queue.cancel()
                raise

    def send_tables(self, take: Callable[[], tree_pb2.ChunkTable | None]) -> None:
        """Sends tables of durable chunks over one stream, until `take` returns None.

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
            self.connection.channel,
        )

    def _send_share(
        self, slab_queue: SlabQueue, wanted: WantedSlabs, channel: grpc.Channel
    ) -> None:
        """Sends slabs over one channel until the queue ends."""
        take_next = wanted.taker()

        def take() -> FilledSlab | None:
            if (filled := take_next()) is not None:
                self.meter.add(filled.wanted_bytes)
            return filled

        window = ResendWindow(
            take,
            lambda filled: len(filled.wanted),
            slab_queue.give_back,
            lambda filled: filled.wanted_bytes,
        )
        try:
            with self.meter.part("stream"):
                self._send_all(
                    window,
                    lambda stream: frames(stream, self.sums, self.meter),
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
            _WRITE_CHUNKS, response_deserializer=api.WriteChunksResponse.FromString
        )
        while window.wait():
            failed: BaseException | None = None
            for attempt in self.connection.attempts("WriteChunks"):
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
            yield api.WriteChunksRequest(open=self.ref).SerializeToString()
            yield from serialized(stream)

        sent, durable = _Requests(requests(), self.meter), 0
        try:
            with translate_rpc_errors(self.connection.address):
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
