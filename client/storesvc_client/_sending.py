"""Sending chunks: from the data of a snapshot to frames on the wire.

A stored chunk is its elements and their CRC-32C; it is cut into frames, and small
chunks share one. A broken stream goes on in a new one with what was not
acknowledged. Where the store may hold chunks already, their sums are sent first, and
only the chunks that it lacks follow.
"""

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np

from storesvc.format.checksums import Buffer, crc32c, digest
from storesvc.format.chunks import Sums, pack_sums
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.trees import Tree, pack_leaves
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._channel import MAX_FRAME_BYTES, Connection
from storesvc_client._framing import Frame, requests_of_large
from storesvc_client._keeping import KeptAlive
from storesvc_client._retrying import patiently
from storesvc_client._values import Checkpoint, SaveReport
from storesvc_client.errors import (
    ConflictError,
    PreconditionError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

_WRITE_CHUNKS: Final = "/storesvc.v1.UploadService/WriteChunks"


class Snapshot(Protocol):
    """A tree whose bytes stay as they are while it is sent."""

    @property
    def tree(self) -> Tree:
        """Its leaves."""

    def chunk(self, ordinal: int) -> Buffer:
        """Returns the elements of a chunk, in C order, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What goes with a tree into its checkpoint."""

    run: RunName
    step: int
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base: CheckpointName | None
    """Whose chunks need not be sent again."""


class Saved(NamedTuple):
    """What came of a save."""

    checkpoint: Checkpoint
    report: SaveReport


class Upload:
    """One save, from begin to commit."""

    def __init__(self, connection: Connection, description: Description) -> None:
        self._connection = connection
        self._stub = UploadServiceStub(connection.channel)
        # Of messages that are serialised already.
        self._write_chunks: Any = connection.channel.stream_stream(
            _WRITE_CHUNKS,
            response_deserializer=api.WriteChunksResponse.FromString,
        )
        self._description = description

    def send(self, snapshot: Snapshot) -> Saved:
        """Sends a snapshot and commits it; goes on through a server's restart.

        Raises:
            StoreError: As the contract says of each call.
        """
        upload = self._begun(snapshot.tree)
        ref = api.WriterRef(upload=upload.name, epoch=upload.epoch, writer=0)
        sums = _SumsInProgress(snapshot.tree.chunk_count)
        missing: Sequence[int] = range(snapshot.tree.chunk_count)
        sent: set[int] = set()
        with KeptAlive(self._stub, upload):
            if upload.base or upload.resumes:
                missing = self._missing(ref, snapshot, sums)
            for last_try in (False, True):
                self._write_all(ref, snapshot, missing, sums)
                sent.update(missing)
                try:
                    checkpoint = self._finish_and_commit(ref, sums.result())
                except PreconditionError as e:
                    # what was to be claimed is gone: damaged, or collected
                    if last_try or e.reason != "CHUNKS_INCOMPLETE":
                        raise
                    missing = self._missing(ref, snapshot, sums)
                else:
                    return Saved(checkpoint, _report(snapshot.tree, sent))
        raise AssertionError

    def _missing(
        self, ref: api.WriterRef, snapshot: Snapshot, sums: "_SumsInProgress"
    ) -> list[int]:
        """The chunks that the store does not hold."""
        for ordinal in range(snapshot.tree.chunk_count):
            sums.add(ordinal, memoryview(snapshot.chunk(ordinal)).cast("B"))
        for attempt in patiently():
            with attempt, translated(self._connection.address):
                found: set[int] = set()
                for response in self._stub.FindChunks(
                    _find_requests(ref, sums.result())
                ):
                    found.update(response.found)
        return [o for o in range(snapshot.tree.chunk_count) if o not in found]

    def _write_all(
        self,
        ref: api.WriterRef,
        snapshot: Snapshot,
        ordinals: Sequence[int],
        sums: "_SumsInProgress",
    ) -> None:
        durable = 0
        while durable < len(ordinals):
            for attempt in patiently():
                with attempt:
                    durable += self._write(ref, snapshot, ordinals[durable:], sums)

    def _finish_and_commit(self, ref: api.WriterRef, sums: Sums) -> Checkpoint:
        for attempt in patiently():
            with attempt:
                self._finish(ref, sums)
        # apart: a writer cannot finish again once a commit has landed whose answer
        # was lost, but the commit can be asked for again
        for attempt in patiently():
            with attempt:
                return self._commit(ref)
        raise AssertionError

    def _begun(self, tree: Tree) -> api.Upload:
        for last_try in (False, False, True):
            request_id = str(uuid.uuid4())
            try:
                for attempt in patiently():
                    with attempt:
                        return self._begin(request_id, tree)
            except ConflictError as e:
                # The step was freed meanwhile, and an id begins only once.
                if last_try or e.reason != "UPLOAD_NOT_FOUND":
                    raise
        raise AssertionError

    def _begin(self, request_id: str, tree: Tree) -> api.Upload:
        described = self._description
        first = api.BeginUploadRequest(
            parent=described.run.resource,
            request_id=request_id,
            upload=api.Upload(
                step=described.step,
                writer_count=1,
                labels=described.labels,
                metrics=described.metrics,
                base=described.base.resource if described.base else "",
            ),
            leaf_count=len(tree.leaves),
        )

        def requests() -> Iterator[api.BeginUploadRequest]:
            yield first
            for part in pack_leaves(tree):
                leaves = tree_pb2.LeafTable.FromString(part)
                yield api.BeginUploadRequest(leaves=leaves)

        with translated(self._connection.address):
            response = self._stub.BeginUpload(
                requests(), timeout=self._connection.timeout
            )
        return response.upload

    def _write(
        self,
        ref: api.WriterRef,
        snapshot: Snapshot,
        ordinals: Sequence[int],
        sums: "_SumsInProgress",
    ) -> int:
        """Sends chunks; returns how many of them became durable.

        Raises:
            UnavailableError: None did.
        """
        requests = _Failing(_write_requests(ref, snapshot, ordinals, sums))
        durable = 0
        try:
            with translated(self._connection.address):
                for response in self._write_chunks(requests):
                    durable = response.durable_count
        except UnavailableError:
            if not durable:
                raise
        finally:
            requests.raise_again()
        return durable

    def _finish(self, ref: api.WriterRef, sums: Sums) -> None:
        with translated(self._connection.address):
            self._stub.FinishWriter(
                _finish_requests(ref, sums), timeout=self._connection.timeout
            )

    def _commit(self, ref: api.WriterRef) -> Checkpoint:
        with translated(self._connection.address):
            committed = self._stub.CommitUpload(
                api.CommitUploadRequest(name=ref.upload, epoch=ref.epoch),
                timeout=self._connection.timeout,
            )
        return Checkpoint.from_message(committed.checkpoint)


class _Failing:
    """An iterator whose own error is not lost: gRPC only cancels the call."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._requests)
        except StopIteration:
            raise
        except BaseException as e:
            self._error = e
            raise

    def raise_again(self) -> None:
        """Raises what the iterator raised, if anything."""
        if self._error is not None:
            raise self._error


class _SumsInProgress:
    """The checksums of the chunks sent so far."""

    def __init__(self, count: int) -> None:
        self._crc32c = np.zeros(count, np.uint32)
        self._digests = np.zeros((count, 16), np.uint8)
        self._known = np.zeros(count, np.bool_)

    def add(self, ordinal: int, data: Buffer) -> int:
        """Keeps the sums of a chunk, and returns its CRC-32C."""
        if not self._known[ordinal]:
            self._crc32c[ordinal] = crc32c(data)
            self._digests[ordinal] = np.frombuffer(digest(data), np.uint8)
            self._known[ordinal] = True
        return int(self._crc32c[ordinal])

    def result(self) -> Sums:
        """Returns the sums of all chunks."""
        return Sums(
            ordinal=np.arange(len(self._crc32c)),
            crc32c=self._crc32c,
            digests=self._digests,
        )


def _write_requests(
    ref: api.WriterRef,
    snapshot: Snapshot,
    ordinals: Sequence[int],
    sums: _SumsInProgress,
) -> Iterator[bytes]:
    yield api.WriteChunksRequest(open=ref).SerializeToString()
    yield from frames(snapshot, ordinals, sums)


def frames(
    snapshot: Snapshot, ordinals: Sequence[int], sums: _SumsInProgress
) -> Iterator[bytes]:
    """Yields the serialised requests that carry chunks, and keeps the chunks' sums."""
    frame = Frame()
    for ordinal in ordinals:
        data = memoryview(snapshot.chunk(ordinal)).cast("B")
        tail = sums.add(ordinal, data).to_bytes(CHECKSUM_BYTES, "little")
        length = len(data) + len(tail)
        if frame.size and frame.size + length > MAX_FRAME_BYTES:
            yield frame.request()
            frame = Frame()
        if length > MAX_FRAME_BYTES:
            yield from requests_of_large(ordinal, data, tail)
            continue
        frame.add(ordinal, 0, data, tail)
    if frame.size:
        yield frame.request()


def _report(tree: Tree, sent: Collection[int]) -> SaveReport:
    lengths = tree.stored_lengths
    total, moved = int(lengths.sum()), int(lengths[list(sent)].sum())
    return SaveReport(total_bytes=total, sent_bytes=moved, reused_bytes=total - moved)


def _find_requests(ref: api.WriterRef, sums: Sums) -> Iterator[api.FindChunksRequest]:
    yield api.FindChunksRequest(open=ref)
    for part in pack_sums(sums):
        yield api.FindChunksRequest(chunks=part)


def _finish_requests(
    ref: api.WriterRef, sums: Sums
) -> Iterator[api.FinishWriterRequest]:
    yield api.FinishWriterRequest(open=ref, chunk_count=len(sums))
    for part in pack_sums(sums):
        yield api.FinishWriterRequest(chunks=part)
