"""One process's part of a save, from the slabs of a snapshot to a commit.

While the snapshot fills the slab queue, ``Upload`` begins the upload and stores the
slabs: directly if this process reaches the storage, else through the server. If the
store may already hold chunks, their checksums are sent first, and then only the chunks
that it lacks. If nothing is known about the base, one chunk of each leaf is asked for,
and the others only if it was found.

The order makes a checkpoint complete or absent:

1. Begin the upload, and renew its lease in the background.
2. Make every chunk durable, in a data file or in the base.
3. Finish the writer: the server compares its receipts with the checksums sent now.
   The only writer of an upload does so in the call of step 4.
4. Commit, once all writers have finished.
"""

import threading
from collections.abc import Container, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import grpc
import numpy as np

from storesvc.format.chunks import I64, Sums, pack_sums
from storesvc.format.layout import RunPaths
from storesvc.format.names import InvalidNameError, UploadName
from storesvc.format.trees import Tree
from storesvc.storage.threads import Threads
from storesvc_client._chunks.slabs import FilledSlab, Slab, SumsInProgress
from storesvc_client._save.chunk_streams import ChunkStreams
from storesvc_client._save.direct import DirectWriter
from storesvc_client._save.snapshot import (
    SUM_THREADS,
    Probes,
    SlabQueue,
    SumsAhead,
    WantedSlabs,
)
from storesvc_client._save.writers import Writer
from storesvc_client._session import Session
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._storage.root import LentBucket
from storesvc_client._telemetry.progress import Meter
from storesvc_client._telemetry.reports import SaveReport, WriterReport
from storesvc_client._values.arguments import Deadline
from storesvc_client._values.models import Checkpoint
from storesvc_client.errors import (
    ConflictError,
    PreconditionError,
    StoreError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

_RENEWALS_PER_LEASE: Final = 3
"""So that one failed renewal does not let the lease expire."""

_CALL_SECONDS: Final = 10.0
"""Timeout of one renewal."""


class LeaseRenewer:
    """Renews the lease of an upload while the context lasts.

    A failed renewal is not an error: the next one may succeed, and if the upload has
    ended, the calls that write to it report that.
    """

    def __init__(self, stub: UploadServiceStub, upload: api.Upload) -> None:
        self._stub = stub
        self._request = api.KeepUploadAliveRequest(name=upload.name, epoch=upload.epoch)
        lease = upload.lease_duration.ToTimedelta().total_seconds()
        self._interval = lease / _RENEWALS_PER_LEASE
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, name="storesvc-lease", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined: a renewal in flight may take its whole timeout, and one that
        # arrives after the end of the upload is rejected.
        self._ended.set()

    def _renew(self) -> None:
        pause = self._interval
        while not self._ended.wait(pause):
            pause = self._interval
            try:
                self._stub.KeepUploadAlive(self._request, timeout=_CALL_SECONDS)
            except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
                # soon: after an outage, the lease may have expired already
                pause = min(pause, _AGAIN_SECONDS)


_AGAIN_SECONDS: Final = 5.0
"""Pause after a renewal that failed."""

FIND_SECONDS: Final = 2.0
"""Maximum time a snapshot waits for the store to look up unchanged chunks."""

_POLL_SECONDS: Final = 0.05
"""Interval at which that wait checks whether the server is available."""

_ABORT_SECONDS: Final = 5.0
"""Deadline for aborting the upload of a failed save."""


class UploadPlan(Protocol):
    """Plan of the chunks that a process stores; saves and transfers have one."""

    @property
    def tree(self) -> Tree:
        """Rows of the checkpoint."""

    @property
    def own(self) -> I64:
        """Ordinals of the chunks that this process writes, ascending."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """Slabs of these chunks."""

    @property
    def needs_like(self) -> tuple[str, ...]:
        """Containers that only a restore with ``like=`` rebuilds."""


class SaveResult(NamedTuple):
    checkpoint: Checkpoint
    report: SaveReport
    sums: Sums
    """Checksums of all chunks."""
    probes: Probes
    """Probes of all chunks."""
    reused: frozenset[str]
    """Keys of the leaves with chunks that were not sent."""


class Upload:
    """One process's part of a save, from begin to commit."""

    def __init__(
        self,
        session: Session,
        writer: Writer,
        plan: UploadPlan,
        slab_queue: SlabQueue,
        meter: Meter,
    ) -> None:
        """Creates the upload; nothing is sent yet."""
        tree = plan.tree
        self._meter = meter
        self._meter.total_bytes = int(tree.stored_lengths[plan.own].sum())
        self._connection = session.connection
        self._data_root = session.data_root
        self._stub = session.connection.uploads
        self._writer = writer
        self._tree = tree
        self._own = plan.own
        self._needs_like = plan.needs_like
        self._slabs = plan.slabs
        self._slab_queue = slab_queue
        self._sums = SumsInProgress(tree.chunk_count)
        self._reused = np.zeros(tree.chunk_count, np.bool_)
        self._asked = np.zeros(tree.chunk_count, np.bool_)
        """For each chunk, whether the store must be asked for it before it is sent."""
        self._unsampled = np.zeros(len(tree.leaves), np.bool_)
        """For each leaf, whether its next chunk decides if the others are asked for."""
        self.probes: Probes = np.zeros(tree.chunk_count, np.uint32)
        """Probes of all chunks, which the snapshot fills in."""
        self._begun: Future[api.Upload] = Future()
        self._end: api.WriterEnd | None = None
        """The end of the writer that the commit sends; None: it has finished."""

    @property
    def id(self) -> str:
        """Id of the upload; "" before it has begun."""
        begun = self._begun
        if not begun.done() or begun.exception() is not None:
            return ""
        try:
            return UploadName.from_resource(begun.result().name).upload
        except InvalidNameError:
            return ""

    def write(self, known_base: str, reused: Container[str] = ()) -> None:
        """Stores the slabs of the queue and finishes the writer; retries through a
        restart of the server.

        Args:
            known_base: The checkpoint whose chunks the snapshot leaves out; "" if it
                leaves out none.
            reused: Keys of leaves whose chunks are likely to be in another base.

        Raises:
            StoreError: As the contract states for each call.
        """
        ahead: AbstractContextManager[object] = nullcontext()
        if isinstance(self._data_root, Path):
            # The caller waits for the copies, with which a begin would compete for
            # processors and the interpreter; it takes milliseconds here.
            self._slab_queue.await_open()
        elif self._data_root is not None:
            # To begin takes long on a bucket. Elsewhere checksums are computed while
            # the bytes are sent or written, so that memory is read once.
            ahead = SumsAhead(self._slab_queue, self._sums, self._meter)
        try:
            # 1. Begin.
            with self._meter.phase("begin"), ahead:
                upload = self._writer.begin()
            self._begun.set_result(upload)
            with LeaseRenewer(self._stub, upload):
                self._write(upload, known_base, reused)
        except BaseException as e:
            if not self._begun.done():  # the snapshot may be waiting for it
                self._begun.set_exception(e)
            self._slab_queue.cancel()
            # The failure of another process explains why this one's upload has ended.
            if isinstance(e, ConflictError):
                self._writer.check_others()
            self._writer.fail(e)
            raise

    def commit(self) -> SaveResult:
        """Commits the upload once all writers have finished; returns the result.

        Raises:
            StoreError: As the contract states for each call.
        """
        checkpoint = self._commit()
        own, described = self._measure_writer(), self._writer.described
        report = SaveReport(
            run=str(described.run),
            step=described.step,
            start_time=own.start_time,
            total_bytes=own.total_bytes,
            sent_bytes=own.sent_bytes,
            reused_bytes=own.total_bytes - own.sent_bytes,
            seconds=own.seconds,
            blocking_seconds=min(own.seconds, self._meter.blocking_seconds),
            timings=self._meter.timings,
            timeline=own.timeline,
            slowest=self._meter.slowest.name,
            slowest_seconds=self._meter.slowest.seconds,
            last_process=self._writer.last_process,
            needs_like=self._needs_like,
            upload=self.id,
        )
        rows = np.unique(self._tree.locate_all(np.flatnonzero(self._reused))[0])
        reused = frozenset(self._tree.leaves[row].key for row in rows.tolist())
        return SaveResult(checkpoint, report, self._sums.result(), self.probes, reused)

    def _commit(self) -> Checkpoint:
        # 4. Commit.
        ref = self._writer.ref(self._begun.result())
        try:
            return self._writer.commit(ref, self._end)
        except PreconditionError as e:
            if e.reason == "WRITER_UNFINISHED" and self._end is not None:
                # The server is of an earlier release, and finishes in another call.
                rest, self._end = self._end.placed, None
                self._finish(ref, rest)
                return self._writer.commit(ref)
            self._explain(e)
            raise

    @contextmanager
    def named(self) -> Generator[None]:
        """Prefixes an ``UnavailableError`` with the name of this save."""
        what = f"save of {self._writer.described}"
        try:
            yield
        except UnavailableError as e:
            if str(e).startswith(what):
                raise
            raise UnavailableError(
                f"{what}, which resumes from the stored chunks "
                f"when the step is saved again: {e}",
                reason=e.reason,
                metadata=e.metadata,
            ) from e

    def reusable(self, known: Sums, chunks: I64) -> I64:
        """Returns the given chunks that the store holds with known checksums; none if
        it does not answer soon.

        Called from the thread of the snapshot, while the caller waits.
        """
        self._slab_queue.open()  # the upload must begin now
        try:
            upload = self._upload_soon()
            held = self._found(
                self._writer.ref(upload), known.take(chunks), FIND_SECONDS
            )
        except (StoreError, FutureTimeoutError):
            # Copied now, and asked about once more before they are sent.
            self.ask(chunks)
            return np.empty(0, np.int64)
        return self._reuse_known(known, held)

    @property
    def sums(self) -> Sums:
        """Checksums of all chunks, once ``write`` has ended."""
        return self._sums.result()

    def held(self, known: Sums) -> I64:
        """Returns the chunks that the store holds with known checksums, which then need
        neither be read nor be put into the queue.

        Waits until the upload has begun.

        Raises:
            StoreError: The upload did not begin, or the store does not answer.
        """
        upload = self._begun.result()
        found: set[int] = set()
        if upload.resumes or upload.base:
            found = self._find_chunks(self._writer.ref(upload), known)
        return self._reuse_known(known, found)

    def _upload_soon(self) -> api.Upload:
        """Returns the upload once it has begun; stops waiting if its server is
        unavailable or slow."""
        ends = Deadline.after(FIND_SECONDS)
        while True:
            try:
                return self._begun.result(_POLL_SECONDS)
            except FutureTimeoutError:
                if ends.left <= 0 or self._connection.waits.has_failed:
                    raise

    def ask(self, chunks: Sequence[int] | I64) -> None:
        """Marks chunks to ask the store about before they are sent."""
        self._asked[chunks] = True

    def _write(
        self, upload: api.Upload, known_base: str, reused: Container[str]
    ) -> None:
        ref = self._writer.ref(upload)
        if upload.resumes:
            self._asked[:] = True
        elif upload.base and upload.base != known_base:
            likely = np.array([leaf.key in reused for leaf in self._tree.leaves], bool)
            self._ask_leaves(np.flatnonzero(likely))
            self._unsampled = ~likely
        wanted = WantedSlabs(self._slab_queue, lambda slabs: self._choose(ref, slabs))
        streams = ChunkStreams(self._connection, ref, self._sums, self._meter)
        # 2. Make the chunks durable.
        rest = None
        try:
            if self._data_root is not None:
                rest = self._write_directly(ref, self._data_root, wanted, streams)
            else:
                streams.send_slabs(self._slab_queue, wanted)
            self._slab_queue.check()  # the snapshot may fail after its last slab
        except StoreError:
            raise
        except BaseException:  # the snapshot failed: discard what was stored
            request = api.AbortUploadRequest(name=ref.upload)
            ends = Deadline.after(_ABORT_SECONDS)
            with suppress(StoreError):  # the upload expires with its lease
                self._connection.ask(self._stub.AbortUpload, request, ends)
            raise
        finally:
            wanted.drop()
        # 3. Finish.
        self._end = self._writer.describe_end(
            self._sums.result(self._own), rest, self._measure_writer()
        )
        if self._end is None:
            self._finish(ref, rest)

    def _finish(self, ref: api.WriterRef, rest: tree_pb2.ChunkTable | None) -> None:
        """Reports the last durable chunks, and finishes the writer."""
        if rest is not None and rest.crc32c:
            streams = ChunkStreams(self._connection, ref, self._sums, self._meter)
            tables = iter([rest])
            streams.send_tables(lambda: next(tables, None))
        try:
            self._writer.finish(
                ref, self._sums.result(self._own), self._measure_writer()
            )
        except PreconditionError as e:
            self._explain(e)
            raise

    def _explain(self, e: PreconditionError) -> None:
        """Raises a clearer error if a precondition failed because the base has
        changed."""
        if e.reason != "CHUNKS_INCOMPLETE" or not self._reused.any():
            return
        raise PreconditionError(
            f"save of step {self._writer.described.step}: chunks of its base were "
            f"purged or damaged since it began; save again ({e})",
            reason=e.reason,
            metadata=e.metadata,
        ) from e

    def _choose(self, ref: api.WriterRef, slabs: Sequence[FilledSlab]) -> None:
        """Removes the chunks that the store already holds from `slabs`."""
        chunks = np.array(sorted(o for f in slabs for o in f.wanted), np.int64)
        samples = chunks[:0]
        if self._unsampled.any():
            # Most leaves that a step changes have no chunk of the base, and frozen ones
            # have all: so one chunk of each leaf decides whether to sum up the others
            # before they are sent, which reads memory twice.
            rows, first = np.unique(self._tree.locate_all(chunks)[0], return_index=True)
            samples = chunks[first[self._unsampled[rows]]]
            self._unsampled[rows] = False
            found = self._remove_found(ref, slabs, samples)
            self._ask_leaves(np.unique(self._tree.locate_all(found)[0]))
        asked = chunks[self._asked[chunks]]
        self._remove_found(ref, slabs, np.setdiff1d(asked, samples))

    def _ask_leaves(self, rows: I64) -> None:
        """Marks the chunks of leaves to ask the store about."""
        first = self._tree.first_chunk
        for row in rows.tolist():
            self._asked[first[row] : first[row + 1]] = True

    def _remove_found(
        self, ref: api.WriterRef, slabs: Sequence[FilledSlab], chunks: I64
    ) -> I64:
        """Asks the store for some chunks, removes the ones it holds from `slabs`, and
        returns these."""
        if not len(chunks):
            return chunks
        asked = frozenset(chunks.tolist())
        with Threads(SUM_THREADS, "storesvc-sums") as threads:  # the writers wait
            working = [
                threads.submit(filled.sum_up, self._sums, self._meter, asked)
                for filled in slabs
            ]
        for one in working:
            one.result()
        found = self._find_chunks(ref, self._sums.result(chunks))
        reused = np.array(sorted(found), np.int64)
        self._reuse(reused)
        for filled in slabs:
            filled.wanted = [o for o in filled.wanted if o not in found]
        return reused

    def _reuse_known(self, known: Sums, held: set[int]) -> I64:
        """Takes over known checksums of chunks that the store holds."""
        reused = np.array(sorted(held), np.int64)
        self._sums.copy(known, reused)
        self._reuse(reused)
        return reused

    def _reuse(self, chunks: I64) -> None:
        """Records chunks that the store holds and that are not sent."""
        self._reused[chunks] = True
        self._meter.add(int(self._tree.stored_lengths[chunks].sum()))

    def _find_chunks(self, ref: api.WriterRef, sums: Sums) -> set[int]:
        return self._connection.retry("FindChunks", lambda: self._found(ref, sums))

    def _found(
        self, ref: api.WriterRef, sums: Sums, timeout: float | None = None
    ) -> set[int]:
        found: set[int] = set()
        with self._meter.phase("find"), translate_rpc_errors(self._connection.address):
            parts = (api.FindChunksRequest(chunks=part) for part in pack_sums(sums))
            requests = chain([api.FindChunksRequest(open=ref)], parts)
            for response in self._stub.FindChunks(requests, timeout=timeout):
                found.update(response.found)
        return found

    def _write_directly(
        self,
        ref: api.WriterRef,
        root: Path | BucketRoot | LentBucket,
        wanted: WantedSlabs,
        streams: ChunkStreams,
    ) -> tree_pb2.ChunkTable | None:
        """Writes chunks to the pool and sends the server the tables of durable ones;
        returns the last table unsent."""
        name = UploadName.from_resource(ref.upload)
        places = RunPaths(name.run)
        if isinstance(root, LentBucket):
            root = root.to_write(ref)
        with DirectWriter(
            root,
            places.pool,
            places.data_prefix(name.upload),
            self._slab_queue,
            wanted,
            self._sums,
            self._meter,
            slabs=self._slabs,
            save_bytes=int(self._tree.stored_lengths.sum()),
        ) as writer:
            streams.send_tables(writer.take)
            return writer.take_rest()

    def _measure_writer(self) -> WriterReport:
        """Returns the measurements of this process so far."""
        lengths = self._tree.stored_lengths
        total = int(lengths[self._own].sum())
        return WriterReport(
            start_time=self._meter.start_time,
            seconds=self._meter.seconds,
            total_bytes=total,
            sent_bytes=total - int(lengths[self._reused].sum()),
            timeline=self._meter.timeline,
        )
