"""The writer of one process in an upload: begin, finish, commit.

A process that saves alone is the only writer of its upload.
"""

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from platform import node
from typing import Final

from storesvc.format.checksums import DIGEST_BYTES
from storesvc.format.chunks import Sums, pack_sums
from storesvc.format.trees import Tree, pack_leaves
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.description import Description
from storesvc_client._values.arguments import duration_message
from storesvc_client._values.progress import Meter
from storesvc_client._values.reports import WriterReport
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import ConflictError, translated
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

_JOBS: Final = ("STORESVC_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables with the name of the job; the first one that is set is used."""

_MAX_OWNER_BYTES: Final = 256


class Writer:
    """The only writer of an upload."""

    index = 0
    """Number of this writer within the upload."""
    writer_count = 1
    leaf_digests: Future[bytes] | None = None
    """Digests of the leaves that other processes hold, too; None in a process that
    saves alone."""
    last_process = ""
    """Name of the process that finished last; "" if unknown or alone."""

    def __init__(
        self, connection: Connection, description: Description, tree: Tree, meter: Meter
    ) -> None:
        self.described = description
        self._connection = connection
        self._stub = UploadServiceStub(connection.channel)
        self._tree = tree
        self._meter = meter

    def begin(self) -> api.Upload:
        """Begins the upload and returns it; retries transient errors.

        Raises:
            StoreError: As the contract states for BeginUpload.
        """
        for last_try in (False, False, True):
            request_id = str(uuid.uuid4())
            try:
                for attempt in self._connection.attempts("BeginUpload"):
                    with attempt:
                        return self._begin(request_id)
            except ConflictError as e:
                # The step was freed in the meantime; a request id begins only once.
                if last_try or e.reason != "UPLOAD_NOT_FOUND":
                    raise
        raise AssertionError

    def ref(self, upload: api.Upload) -> api.WriterRef:
        """Returns the reference to this writer."""
        return api.WriterRef(upload=upload.name, epoch=upload.epoch, writer=self.index)

    def finish(self, ref: api.WriterRef, sums: Sums, report: WriterReport) -> None:
        """Sends the checksums of the chunks that this process stored and finishes the
        writer.

        Args:
            ref: Reference to this writer.
            sums: The checksums.
            report: Measurements of this process, which the checkpoint keeps.

        Raises:
            StoreError: As the contract states for FinishWriter.
        """
        for attempt in self._connection.attempts("FinishWriter"):
            with attempt, self._meter.phase("finish"):
                self._finish(ref, sums, report)

    def commit(self, ref: api.WriterRef) -> Checkpoint:
        """Commits the upload and returns the checkpoint.

        Raises:
            StoreError: As the contract states for CommitUpload.
        """
        request = api.CommitUploadRequest(name=ref.upload, epoch=ref.epoch)
        timeout = self._connection.timeout
        for attempt in self._connection.attempts("CommitUpload"):
            with attempt, self._meter.phase("commit"):
                with translated(self._connection.address):
                    committed = self._stub.CommitUpload(request, timeout=timeout)
                return Checkpoint.from_message(committed.checkpoint)
        raise AssertionError

    def fail(self, error: BaseException) -> None:
        """Publishes to other processes that this one failed; does nothing here."""

    def check_others(self) -> None:
        """Raises the failure of another process, if there is one.

        Raises:
            ConflictError: Another process failed; the message gives the cause.
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
                owner=_owner(),
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
        # Awaited here: gRPC only cancels the call if its request iterator raises.
        digests = self.leaf_digests.result() if self.leaf_digests else b""

        def parts() -> Iterator[tuple[tree_pb2.LeafTable, bytes]]:
            at = 0
            for packed in pack_leaves(self._tree):
                part = tree_pb2.LeafTable.FromString(packed)
                end = at + len(part.key) * DIGEST_BYTES
                yield part, digests[at:end]
                at = end

        return parts()

    def _finish(
        self, ref: api.WriterRef, sums: Sums, report: WriterReport
    ) -> api.FinishWriterResponse:
        message = replace(report, owner=_owner()).to_message()

        def requests() -> Iterator[api.FinishWriterRequest]:
            yield api.FinishWriterRequest(
                open=ref, chunk_count=len(sums), report=message
            )
            for part in pack_sums(sums):
                yield api.FinishWriterRequest(chunks=part)

        with translated(self._connection.address):
            return self._stub.FinishWriter(requests(), timeout=self._connection.timeout)


def _owner() -> str:
    """Returns host, process id and, if known, job of this process, for people."""
    job = next(filter(None, map(os.environ.get, _JOBS)), None)
    text = f"host {node()}, process {os.getpid()}" + (f", job {job}" if job else "")
    one_line = " ".join(text.split())
    return one_line.encode()[:_MAX_OWNER_BYTES].decode(errors="ignore")
