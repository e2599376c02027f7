"""A save in the background: from the slabs of a snapshot to a committed checkpoint.

The snapshot fills an outbox while this begins an upload and stores what comes out: by
itself where it reaches the storage, else through the server. Where the store may hold
chunks already, their sums are sent first, and only the chunks that it lacks follow.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias, TypeVar

import grpc
import numpy as np

from storesvc.format.chunks import I64, Sums, pack_sums
from storesvc.format.layout import RunPlaces
from storesvc.format.names import UploadName
from storesvc_client._chunks.chunk_checksums import SumsInProgress
from storesvc_client._chunks.frames import frames
from storesvc_client._chunks.slabs import Filled
from storesvc_client._chunks.staging_pool import STREAM_BYTES
from storesvc_client._rpc.retry import is_transient
from storesvc_client._save.direct_writer import Placing
from storesvc_client._save.lease_renewer import KeptAlive
from storesvc_client._save.resend_window import Acknowledging, Stream
from storesvc_client._save.slab_queue import Outbox, Wanted
from storesvc_client._save.writer import Part
from storesvc_client._session import Session
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._values.durations import Deadline
from storesvc_client._values.progress import Meter
from storesvc_client._values.values import Checkpoint, SaveReport
from storesvc_client.errors import (
    ConflictError,
    PreconditionError,
    StoreError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

if TYPE_CHECKING:
    from storesvc_client._pytree.save_plan import Plan

CLAIM_SECONDS: Final = 2.0
"""How long a snapshot waits to learn that what did not change can be claimed."""

T = TypeVar("T")

STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Streams that a save sends chunks in at most, each over a socket of its own."""

_LOOK_SECONDS: Final = 0.05
"""How often meanwhile it is looked whether the server is there."""

_ABORT_SECONDS: Final = 5.0
"""How long a save that has failed tries to say so."""

_Method: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, api.WriteChunksResponse]"

_WRITE_CHUNKS: Final = "/storesvc.v1.UploadService/WriteChunks"


class Saved(NamedTuple):
    """What came of a save."""

    checkpoint: Checkpoint
    report: SaveReport
    sums: Sums
    """Of all chunks."""


class Upload:
    """What one process does of a save, from begin to commit."""

    def __init__(
        self,
        session: Session,
        part: Part,
        plan: "Plan",
        outbox: Outbox,
        meter: Meter,
    ) -> None:
        """Prepares.

        Args:
            session: With the store.
            part: Of this process in the upload.
            plan: The tree, and what of it this process writes.
            outbox: Brings that.
            meter: Takes note of what is done.
        """
        tree = plan.tree
        self._meter = meter
        self._meter.total_bytes = int(tree.stored_lengths[plan.own].sum())
        self._connection = session.connection
        self._data_root = session.data_root
        self._stub = UploadServiceStub(session.connection.channel)
        self._part = part
        self._tree = tree
        self._own = plan.own
        self._foreign = plan.foreign
        self._outbox = outbox
        self._sums = SumsInProgress(tree.chunk_count)
        self._claimed = np.zeros(tree.chunk_count, np.bool_)
        self._asked = np.zeros(tree.chunk_count, np.bool_)
        """Of each chunk, whether the store may hold it where it comes out of the
        outbox."""
        self._begun: Future[api.Upload] = Future()

    def write(self, known_base: str) -> None:
        """Stores what the outbox brings, and finishes; goes on through a server's
        restart.

        Args:
            known_base: The checkpoint whose chunks the snapshot leaves out by itself;
                "": it leaves out none.

        Raises:
            StoreError: As the contract says of each call.
        """
        try:
            with self._meter.phase("begin"):
                upload = self._part.begin()
            self._begun.set_result(upload)
            with KeptAlive(self._stub, upload):
                self._write(upload, known_base)
        except BaseException as e:
            if not self._begun.done():
                self._begun.set_exception(e)
            self._outbox.give_up()
            if isinstance(e, ConflictError):
                self._part.check_others()
            self._part.fail(e)
            raise

    def commit(self) -> Saved:
        """Returns what came of the save, once all of it is stored and committed.

        Raises:
            StoreError: As the contract says of each call.
        """
        try:
            checkpoint = self._part.commit(self._part.ref(self._begun.result()))
        except PreconditionError as e:
            self._explain(e)
            raise
        return Saved(checkpoint, self._report(), self._sums.result())

    @contextmanager
    def named(self) -> Generator[None]:
        """Raises what is unavailable as an error of this save."""
        what = f"save of {self._part.described}"
        try:
            yield
        except UnavailableError as e:
            if str(e).startswith(what):
                raise
            raise UnavailableError(
                f"{what}, which goes on from what was stored "
                f"where the step is saved again: {e}",
                reason=e.reason,
                metadata=e.metadata,
            ) from e

    def claimable(self, known: Sums, chunks: I64) -> I64:
        """Returns those of some chunks that the store holds with known sums; none
        where it does not say so soon.

        Called while the snapshot is taken, from its thread.
        """
        try:
            upload = self._upload_soon()
            held = self._found(
                self._part.ref(upload), known.take(chunks), CLAIM_SECONDS
            )
        except (StoreError, FutureTimeoutError):
            self._asked[:] = True
            return np.empty(0, np.int64)
        claimed = np.array(sorted(held), np.int64)
        self._sums.copy(known, claimed)
        self._claim(claimed)
        return claimed

    def _upload_soon(self) -> api.Upload:
        """The upload, once it has begun; where its server is not there, or does not
        answer soon, it is not waited for."""
        ends = Deadline.after(CLAIM_SECONDS)
        while True:
            try:
                return self._begun.result(_LOOK_SECONDS)
            except FutureTimeoutError:
                if ends.left <= 0 or self._connection.waits.has_failed:
                    raise

    def ask(self, chunks: Sequence[int]) -> None:
        """Has the store asked about chunks, before they are put into the outbox."""
        self._asked[chunks] = True

    def _write(self, upload: api.Upload, known_base: str) -> None:
        ref = self._part.ref(upload)
        if upload.resumes or upload.base != known_base:
            self._asked[:] = True
        wanted = Wanted(self._outbox, lambda slabs: self._choose(ref, slabs))
        try:
            if self._data_root is not None:
                self._place(ref, self._data_root, wanted)
            else:
                self._stream(ref, wanted)
            self._outbox.check()  # it may fail when nothing is left to be taken
        except StoreError:
            raise
        except BaseException:  # the snapshot failed: nothing of it shall stay
            self._abort(ref)
            raise
        finally:
            wanted.drop()
        try:
            self._part.finish(ref, self._sums.result(self._own))
        except PreconditionError as e:
            self._explain(e)
            raise

    def _explain(self, e: PreconditionError) -> None:
        """Raises what a refusal means to whoever saved, where it means more than it
        says."""
        if e.reason != "CHUNKS_INCOMPLETE" or not self._claimed.any():
            return
        raise PreconditionError(
            f"save of step {self._part.described.step}: what its base held when it "
            f"began is gone or damaged now; save again ({e})",
            reason=e.reason,
            metadata=e.metadata,
        ) from e

    def _choose(self, ref: api.WriterRef, slabs: Sequence[Filled]) -> None:
        """Takes out of slabs what the store holds already."""
        doubtful = [f for f in slabs if self._asked[f.wanted].any()]
        if not doubtful:
            return
        for filled in doubtful:
            filled.sum_up(self._sums, self._meter)
        ordinals = np.array([o for f in doubtful for o in f.wanted], np.int64)
        ordinals = np.sort(ordinals[self._asked[ordinals]])
        for attempt in self._connection.attempts("FindChunks"):
            with attempt:
                found = self._found(ref, self._sums.result(ordinals))
        self._claim(np.array(sorted(found), np.int64))
        for filled in doubtful:
            filled.wanted = [o for o in filled.wanted if o not in found]

    def _claim(self, chunks: I64) -> None:
        """Takes note of chunks that the store holds."""
        self._claimed[chunks] = True
        self._meter.add(int(self._tree.stored_lengths[chunks].sum()))

    def _found(
        self, ref: api.WriterRef, sums: Sums, timeout: float | None = None
    ) -> set[int]:
        found: set[int] = set()
        with self._meter.phase("find"), translated(self._connection.address):
            requests = _find_requests(ref, sums)
            for response in self._stub.FindChunks(requests, timeout=timeout):
                found.update(response.found)
        return found

    def _place(
        self, ref: api.WriterRef, files: Path | BucketRoot, wanted: Wanted
    ) -> None:
        """Puts chunks into the pool, and tells the server of them."""
        name = UploadName.from_resource(ref.upload)
        places = RunPlaces(name.run)
        prefix = places.data_prefix(name.upload)
        with Placing(
            files, places.pool, prefix, self._outbox, wanted, self._sums, self._meter
        ) as placing:
            tables: Acknowledging[tree_pb2.ChunkTable] = Acknowledging(
                placing.take,
                lambda table: len(table.crc32c),
                lambda table: None,  # noqa: ARG005 - nothing is held of it
            )
            self._send_all(
                ref,
                tables,
                lambda stream: (
                    api.WriteChunksRequest(placed=table).SerializeToString()
                    for table in stream
                ),
                self._connection.channel,
            )

    def _stream(self, ref: api.WriterRef, wanted: Wanted) -> None:
        """Sends chunks to the server, over several streams: no more than can bring
        whole batches, as each would wait for the others' memory, and they for its."""
        count = max(1, min(STREAMS, self._outbox.budget_bytes // STREAM_BYTES))
        with ThreadPoolExecutor(count, "storesvc-send") as pool:
            channels = self._connection.channels(count)
            futures = [pool.submit(self._share, ref, wanted, c) for c in channels]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: the others must not go on
                self._outbox.give_up()
                raise

    def _share(self, ref: api.WriterRef, wanted: Wanted, channel: grpc.Channel) -> None:
        """Sends what it can take of the chunks."""
        take_next = wanted.taker()

        def take() -> Filled | None:
            if (filled := take_next()) is not None:
                self._meter.add(filled.wanted_bytes)
            return filled

        slabs = Acknowledging(
            take,
            lambda filled: len(filled.wanted),
            self._outbox.give_back,
            lambda filled: filled.wanted_bytes,
        )
        try:
            with self._meter.part("stream"):
                self._send_all(
                    ref,
                    slabs,
                    lambda stream: frames(stream, self._sums, self._meter),
                    channel,
                )
        finally:
            slabs.drop()

    def _send_all(
        self,
        ref: api.WriterRef,
        things: Acknowledging[T],
        serialized: Callable[[Stream[T]], Iterator[bytes]],
        channel: grpc.Channel,
    ) -> None:
        # not the generated stub, whose requests are messages
        method: _Method = channel.stream_stream(
            _WRITE_CHUNKS,
            response_deserializer=api.WriteChunksResponse.FromString,
        )
        while things.wait():
            failed: BaseException | None = None
            for attempt in self._connection.attempts("WriteChunks"):
                with attempt:
                    failed = self._send(method, ref, things.stream(), serialized)
            if failed is not None:  # on this side: another try would fail, too
                raise failed

    def _send(
        self,
        method: "_Method",
        ref: api.WriterRef,
        stream: Stream[T],
        serialized: Callable[[Stream[T]], Iterator[bytes]],
    ) -> BaseException | None:
        """Sends what it can in one stream; returns what failed on this side.

        Raises:
            UnavailableError: Nothing became durable.
            LimitError: As above, as the server had no room.
        """

        def requests() -> Iterator[bytes]:
            yield api.WriteChunksRequest(open=ref).SerializeToString()
            yield from serialized(stream)

        sent, durable = _Failing(requests(), self._meter), 0
        try:
            with translated(self._connection.address):
                for response in method(sent):
                    stream.acknowledge(response.durable_count - durable)
                    durable = response.durable_count
        except StoreError as e:
            is_retried = durable and is_transient(e)
            if sent.error is None and not is_retried:
                raise
        finally:
            sent.end()
        return sent.error

    def _abort(self, ref: api.WriterRef) -> None:
        request = api.AbortUploadRequest(name=ref.upload)
        try:
            ends = Deadline.after(_ABORT_SECONDS)
            self._connection.ask(self._stub.AbortUpload, request, ends)
        except StoreError:  # its lease ends, too
            return

    def _report(self) -> SaveReport:
        lengths = self._tree.stored_lengths
        total = int(lengths[self._own].sum())
        reused = int(lengths[self._claimed].sum())
        return SaveReport(
            total_bytes=total,
            sent_bytes=total - reused,
            reused_bytes=reused,
            seconds=self._meter.seconds,
            timings=self._meter.timings,
            slowest=self._meter.slowest.name,
            slowest_seconds=self._meter.slowest.seconds,
            last_process=self._part.last_process,
            needs_like=self._foreign,
        )


class _Failing:
    """An iterator whose own error is not lost: gRPC only cancels the call.

    It times gRPC too, which asks for a request once the one before is on its way.
    """

    def __init__(self, requests: Iterator[bytes], meter: Meter) -> None:
        self._requests = requests
        self._meter = meter
        self._answered = meter.clock()
        self._has_ended = False
        self.error: BaseException | None = None
        """What the iterator raised, if anything."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        self._meter.times["send"] += self._meter.clock() - self._answered
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
        """Ends with the call."""
        if self._has_ended:
            self._meter.times["acknowledge"] += self._meter.clock() - self._answered


def _find_requests(ref: api.WriterRef, sums: Sums) -> Iterator[api.FindChunksRequest]:
    yield api.FindChunksRequest(open=ref)
    for part in pack_sums(sums):
        yield api.FindChunksRequest(chunks=part)
