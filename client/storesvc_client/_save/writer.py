"""A process's part in an upload: how it begins, finishes and is committed.

Where one process saves by itself, its part is the whole.
"""

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

from storesvc.format.checksums import DIGEST_BYTES
from storesvc.format.chunks import Sums, pack_sums
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.trees import Tree, pack_leaves
from storesvc_client._rpc.connection import Connection
from storesvc_client._values.durations import duration_message
from storesvc_client._values.process_name import owner
from storesvc_client._values.progress import Meter
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import ConflictError, translated
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What goes with a tree into its checkpoint."""

    run: RunName
    step: int
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base: CheckpointName | None
    """Whose chunks need not be sent again."""
    lease: timedelta
    """How long the upload is kept after its last sign of life."""

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


class Part:
    """The one part of a save, from begin to commit."""

    writer = 0
    """Which writer of the upload this process is."""
    writer_count = 1
    leaf_digests: Future[bytes] | None = None
    """Brings the digests of the leaves that other processes hold, too; None: this
    process is alone."""
    last_process = ""
    """Which was the last to finish, as messages call it; "": not known, or alone."""

    def __init__(
        self, connection: Connection, description: Description, tree: Tree, meter: Meter
    ) -> None:
        self.described = description
        self._connection = connection
        self._stub = UploadServiceStub(connection.channel)
        self._tree = tree
        self._meter = meter

    def begin(self) -> api.Upload:
        """Returns the upload, begun; patient with a server that does not answer.

        Raises:
            StoreError: As the contract says of BeginUpload.
        """
        for last_try in (False, False, True):
            request_id = str(uuid.uuid4())
            try:
                for attempt in self._connection.attempts("BeginUpload"):
                    with attempt:
                        return self._begin(request_id)
            except ConflictError as e:
                # The step was freed meanwhile, and an id begins only once.
                if last_try or e.reason != "UPLOAD_NOT_FOUND":
                    raise
        raise AssertionError

    def ref(self, upload: api.Upload) -> api.WriterRef:
        """Returns how this writer of an upload calls itself."""
        return api.WriterRef(upload=upload.name, epoch=upload.epoch, writer=self.writer)

    def finish(self, ref: api.WriterRef, sums: Sums) -> None:
        """States what this process stored, and ends its part.

        Raises:
            StoreError: As the contract says of FinishWriter.
        """
        for attempt in self._connection.attempts("FinishWriter"):
            with attempt, self._meter.phase("finish"):
                self._finish(ref, sums)

    def commit(self, ref: api.WriterRef) -> Checkpoint:
        """Returns the checkpoint, once there is one.

        Raises:
            StoreError: As the contract says of CommitUpload.
        """
        for attempt in self._connection.attempts("CommitUpload"):
            with attempt, self._meter.phase("commit"):
                return self._commit(ref)
        raise AssertionError

    def fail(self, error: BaseException) -> None:
        """Tells whom it concerns that this process has given up its part."""

    def check_others(self) -> None:
        """Does nothing, unless another process has given up its part.

        Raises:
            ConflictError: It has; says why.
        """

    def _begin(self, request_id: str) -> api.Upload:
        described = self.described
        first = api.BeginUploadRequest(
            parent=described.run.resource,
            request_id=request_id,
            upload=api.Upload(
                step=described.step,
                writer_count=self.writer_count,
                labels=described.labels,
                metrics=described.metrics,
                lease_duration=duration_message(described.lease, "lease="),
                base=described.base.resource if described.base else "",
                owner=owner(),
            ),
            leaf_count=len(self._tree.leaves),
        )

        parts = self._leaves()

        def requests() -> Iterator[api.BeginUploadRequest]:
            yield first
            for leaves, digests in parts:
                yield api.BeginUploadRequest(leaves=leaves, leaf_digests=digests)

        with translated(self._connection.address):
            response = self._stub.BeginUpload(
                requests(), timeout=self._connection.timeout
            )
        return response.upload

    def _leaves(self) -> Iterator[tuple[tree_pb2.LeafTable, bytes]]:
        """Returns the parts of the leaf table, each with the digests of its leaves."""
        # Here, as gRPC would only cancel the call for what its iterator raises.
        digests = self.leaf_digests.result() if self.leaf_digests else b""

        def parts() -> Iterator[tuple[tree_pb2.LeafTable, bytes]]:
            at = 0
            for packed in pack_leaves(self._tree):
                part = tree_pb2.LeafTable.FromString(packed)
                end = at + len(part.key) * DIGEST_BYTES
                yield part, digests[at:end]
                at = end

        return parts()

    def _finish(self, ref: api.WriterRef, sums: Sums) -> api.FinishWriterResponse:
        def requests() -> Iterator[api.FinishWriterRequest]:
            yield api.FinishWriterRequest(open=ref, chunk_count=len(sums))
            for part in pack_sums(sums):
                yield api.FinishWriterRequest(chunks=part)

        with translated(self._connection.address):
            return self._stub.FinishWriter(requests(), timeout=self._connection.timeout)

    def _commit(self, ref: api.WriterRef) -> Checkpoint:
        with translated(self._connection.address):
            committed = self._stub.CommitUpload(
                api.CommitUploadRequest(name=ref.upload, epoch=ref.epoch),
                timeout=self._connection.timeout,
            )
        return Checkpoint.from_message(committed.checkpoint)
