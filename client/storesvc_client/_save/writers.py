"""The writer of one process in an upload: begin, finish, commit.

A process that saves alone is the only writer of its upload. The processes of a job
share one: process 0 begins the upload and publishes its name; the others join it, each
with its own plan of the same tree. Each process then writes its own chunks and finishes
its writer without waiting for the others; only the result of the save waits for all.

One process commits: the one that finishes last, as they count on the board of the job.
It publishes the checkpoint there. The others wait for that, and look at the upload in
turn, so that a large job does not ask for its state more often than a small one. If all
have finished and the commit is late, because its process has died, one of them claims
the next turn on the board and commits; and so on.

A process that fails publishes its error, and the other saves raise it. A process that
dies publishes nothing: the others wait until the lease expires, then raise an error
that names the processes that have not finished. The upload stays until it is collected,
so saving the same step again resumes it.
"""

import logging
import os
import time
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from platform import node
from typing import Any, Final, SupportsFloat, TypeVar

import grpc

from storesvc.format.checksums import DIGEST_BYTES, digest
from storesvc.format.chunks import MAX_PART_ROWS, Sums, pack_sums
from storesvc.format.names import CheckpointName, RunName, UploadName
from storesvc.format.trees import Tree, pack_leaves
from storesvc_client._job.job import JointSave, Outcome, process_name
from storesvc_client._rpc.connection import Connection
from storesvc_client._telemetry.progress import Meter
from storesvc_client._telemetry.reports import WriterReport
from storesvc_client._values.arguments import (
    DurationLike,
    as_timedelta,
    checked_labels,
    checked_metrics,
    duration_message,
)
from storesvc_client._values.models import Checkpoint
from storesvc_client.errors import (
    AlreadyExistsError,
    ConflictError,
    PeerFailedError,
    PreconditionError,
    StoreError,
    UnavailableError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api

T = TypeVar("T")
_Opening = TypeVar("_Opening", api.BeginUploadRequest, api.JoinUploadRequest)

_log = logging.getLogger("storesvc_client")

_JOBS: Final = ("STORESVC_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables with the name of the job; the first one that is set is used."""

_MAX_OWNER_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The attributes of a checkpoint, except its tree."""

    run: RunName
    step: int
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base: CheckpointName | None
    """Checkpoint whose chunks need not be sent again."""
    lease: timedelta
    """Lease of the upload."""

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def checked_description(
    run: RunName,
    step: int,
    *,
    metrics: Mapping[str, SupportsFloat] | None,
    labels: Mapping[str, str] | None,
    base: CheckpointName | None,
    lease: DurationLike,
) -> Description:
    """Returns the description of a checkpoint.

    Raises:
        InvalidRequestError: A metric, a label or the lease is invalid.
    """
    what = f"save to {run}"
    return Description(
        run=run,
        step=step,
        labels=checked_labels(what, labels),
        metrics=checked_metrics(what, metrics),
        base=base,
        lease=as_timedelta(f"{what}: lease=", lease),
    )


_MAX_ONE_CALL_BYTES: Final = (1 << 20) + (256 << 10)
"""Maximum bytes of a CreateCheckpointRequest, and of a CommitUploadRequest."""

_MAX_END_BYTES: Final = 1 << 20
"""The part of that for the end of a writer."""


class NotInOneCallError(Exception):
    """A save is too large for one call, or its server of an earlier release."""


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
        self._stub = connection.uploads
        self._tree = tree
        self._meter = meter

    def begin(self) -> api.Upload:
        """Begins the upload and returns it; retries transient errors.

        Raises:
            StoreError: As the contract states for BeginUpload.
        """
        return self._with_request_ids("BeginUpload", self._begin)

    def create(self, data: bytes, report: WriterReport) -> "tuple[str, Checkpoint]":
        """Begins the upload, stores all its chunks and commits it, in one call; returns
        its name and the checkpoint; retries transient errors.

        Args:
            report: What this process measured so far, which the checkpoint keeps.

        Raises:
            StoreError: As the contract states for CreateCheckpoint.
            NotInOneCallError: The server would not take it; nothing was sent.
        """
        request = api.CreateCheckpointRequest(
            parent=self.described.run.resource,
            upload=self._describe_upload(base=""),
            leaves=tree_pb2.LeafTable.FromString(b"".join(pack_leaves(self._tree))),
            report=replace(report, owner=_owner()).to_message(),
            data=data,
        )

        if request.ByteSize() > _MAX_ONE_CALL_BYTES:  # the names of its leaves are long
            raise NotInOneCallError

        def create(request_id: str) -> Checkpoint:
            request.request_id = request_id
            timeout = self._connection.timeout
            with self._meter.phase("commit"):
                try:
                    answer = self._stub.CreateCheckpoint(request, timeout=timeout)
                except grpc.RpcError as e:
                    if e.code() is grpc.StatusCode.UNIMPLEMENTED:
                        self._connection.creates_in_one_call = False
                        raise NotInOneCallError from None
                    raise
            return Checkpoint.from_message(answer.checkpoint)

        checkpoint = self._with_request_ids("CreateCheckpoint", create)
        upload = uuid.UUID(request.request_id).hex
        return UploadName(self.described.run, upload).resource, checkpoint

    def _with_request_ids(self, call: str, act: Callable[[str], T]) -> T:
        """Returns the result of a call that takes the step; retries transient errors
        with the same request id."""
        for last_try in (False, False, True):
            request_id = str(uuid.uuid4())
            try:
                return self._connection.retry(call, partial(act, request_id))
            except ConflictError as e:
                # The step was freed in the meantime; a request id begins only once.
                if last_try or e.reason != "UPLOAD_NOT_FOUND":
                    raise
        raise AssertionError

    def ref(self, upload: api.Upload) -> api.WriterRef:
        """Returns the reference to this writer."""
        return api.WriterRef(upload=upload.name, epoch=upload.epoch, writer=self.index)

    def finish(self, ref: api.WriterRef, sums: Sums, report: WriterReport) -> None:
        """Sends the checksums of the chunks that this process stored, and a report that
        the checkpoint keeps, and finishes the writer.

        Raises:
            StoreError: As the contract states for FinishWriter.
        """
        message = replace(report, owner=_owner()).to_message()

        def requests() -> Iterator[api.FinishWriterRequest]:
            yield api.FinishWriterRequest(
                open=ref,
                chunk_count=len(sums),
                report=message,
                skip_unfinished_count=True,  # processes of a job count on its board
            )
            for part in pack_sums(sums):
                yield api.FinishWriterRequest(chunks=part)

        def finish() -> None:
            with self._meter.phase("finish"):
                self._stub.FinishWriter(requests(), timeout=self._connection.timeout)

        self._connection.retry("FinishWriter", finish)

    def describe_end(
        self, sums: Sums, placed: tree_pb2.ChunkTable | None, report: WriterReport
    ) -> api.WriterEnd | None:
        """Returns what ``commit`` sends instead of ``finish``; None if ``finish`` must
        be called, once the chunks of `placed` were reported."""
        if len(sums) > MAX_PART_ROWS:
            return None
        (chunks,) = pack_sums(sums)
        message = replace(report, owner=_owner()).to_message()
        end = api.WriterEnd(chunks=chunks, placed=placed, report=message)
        return end if end.ByteSize() <= _MAX_END_BYTES else None

    def commit(
        self, ref: api.WriterRef, end: api.WriterEnd | None = None
    ) -> Checkpoint:
        """Commits the upload and returns the checkpoint.

        Args:
            end: From ``describe_end``; None if the writer has finished.

        Raises:
            StoreError: As the contract states for CommitUpload.
        """
        return Checkpoint.from_message(self._commit(ref, end))

    def _commit(
        self, ref: api.WriterRef, end: api.WriterEnd | None = None
    ) -> checkpoint_api.Checkpoint:
        request = api.CommitUploadRequest(name=ref.upload, epoch=ref.epoch, end=end)

        def commit() -> checkpoint_api.Checkpoint:
            timeout = self._connection.timeout
            with self._meter.phase("commit"):
                return self._stub.CommitUpload(request, timeout=timeout).checkpoint

        return self._connection.retry("CommitUpload", commit)

    def fail(self, error: BaseException) -> None:
        """Publishes to other processes that this one failed; does nothing here."""

    def check_others(self) -> None:
        """Raises the failure of another process, if there is one.

        Raises:
            ConflictError: Another process failed; the message gives the cause.
        """

    def _begin(self, request_id: str) -> api.Upload:
        described = self.described
        base = described.base.resource if described.base else ""
        first = api.BeginUploadRequest(
            parent=described.run.resource,
            request_id=request_id,
            upload=self._describe_upload(base),
            leaf_count=len(self._tree.leaves),
        )
        return self._send_leaves(self._stub.BeginUpload, first)

    def _describe_upload(self, base: str) -> api.Upload:
        described = self.described
        return api.Upload(
            step=described.step,
            writer_count=self.writer_count,
            labels=described.labels,
            metrics=described.metrics,
            lease_duration=duration_message(described.lease, "lease="),
            base=base,
            owner=_owner(),
        )

    def _send_leaves(self, method: Callable[..., Any], first: _Opening) -> api.Upload:
        """Sends a request and the leaf table, with the digests of its leaves, in one
        stream; returns the upload of the response."""
        # Awaited here: gRPC only cancels the call if its request iterator raises.
        digests = self._await_digests()

        def requests() -> Iterator[_Opening]:
            yield first
            at = 0
            for packed in pack_leaves(self._tree):
                part = tree_pb2.LeafTable.FromString(packed)
                end = at + len(part.key) * DIGEST_BYTES
                yield type(first)(leaves=part, leaf_digests=digests[at:end])
                at = end

        return self._send(method, requests())

    def _await_digests(self) -> bytes:
        return self.leaf_digests.result() if self.leaf_digests else b""

    def _send(
        self, method: Callable[..., Any], requests: Iterable[_Opening]
    ) -> api.Upload:
        response = method(iter(requests), timeout=self._connection.timeout)
        upload: api.Upload = response.upload
        return upload


def _owner() -> str:
    """Returns host, process id and, if known, job of this process, for people."""
    job = next(filter(None, map(os.environ.get, _JOBS)), None)
    text = f"host {node()}, process {os.getpid()}" + (f", job {job}" if job else "")
    one_line = " ".join(text.split())
    return one_line.encode()[:_MAX_OWNER_BYTES].decode(errors="ignore")


POLL_SECONDS: Final = 5.0
"""Shortest interval at which a process asks for the state of the upload; what other
processes publish arrives sooner. All processes together ask twice in that time."""

LATE_SECONDS: Final = 10.0
"""Time for a commit before another process makes it; doubles with each turn."""

MIN_POLL_SECONDS: Final = 0.1
"""Shortest such interval."""

LOG_SECONDS: Final = 10.0
"""Seconds before a wait is logged; doubles with each log line."""

HEARTBEAT_SECONDS: Final = 100.0
"""Seconds that jax waits for the heartbeat of a process before it aborts all others,
unless ``jax.distributed.initialize(heartbeat_timeout_seconds=)`` sets another value.
jax does not expose the value in use."""

_SHOWN: Final = 4


class JointWriter(Writer):
    """The writer of one process of a job."""

    def __init__(
        self,
        connection: Connection,
        description: Description,
        tree: Tree,
        meter: Meter,
        joint: JointSave,
    ) -> None:
        """Creates the writer; nothing is sent yet. The description of process 0 takes
        effect."""
        super().__init__(connection, description, tree, meter)
        self._joint = joint
        self.index = joint.job.index
        self.writer_count = joint.job.count
        self._is_last = False
        """True if this process finished last."""
        self._turn = 0
        """Turns to commit that were claimed, as far as this process knows."""

    def begin(self) -> api.Upload:
        """Begins the upload in process 0, joins it in the others, and returns it.

        Raises:
            StoreError: As the contract states for BeginUpload and JoinUpload.
            UnavailableError: Process 0 has not begun the upload in time.
            PeerFailedError: Process 0 failed.
            ConflictError: Process 0 began the upload in another store.
        """
        if self.index == 0:
            lease_seconds = self.described.lease.total_seconds()
            if lease_seconds >= HEARTBEAT_SECONDS:
                _warn_heartbeat(lease_seconds)
            upload = super().begin()
            # Only then: the others join what they read here.
            self._joint.begin(upload.name)
            return upload
        opening = api.JoinOpening(
            upload=self._begun_upload(),
            writer=self.index,
            writer_count=self.writer_count,
        )
        try:
            return self._join(opening)
        except ConflictError as e:
            self.check_others()
            if e.reason != "UPLOAD_NOT_FOUND":
                raise
            raise ConflictError(
                f"save of {self.described}: the upload that "
                f"{self._name(0)} began is not, or not any more, in "
                f"the store at {self._connection.address}; connect all processes to "
                "one store, and save again"
            ) from e

    def _join(self, opening: api.JoinOpening) -> api.Upload:
        """Joins an upload by the digests of the plan; by the whole plan if they do not
        suffice, or the server is of an earlier release."""
        brief = api.JoinUploadRequest(open=opening)
        brief.open.tree_digest = digest(b"".join(pack_leaves(self._tree)))
        if digests := self._await_digests():
            brief.open.values_digest = digest(digests)
        try:
            return self._connection.retry(
                "JoinUpload", lambda: self._send(self._stub.JoinUpload, [brief])
            )
        except StoreError as e:
            if e.reason != "PLAN_MISMATCH":
                raise
        first = api.JoinUploadRequest(open=opening, leaf_count=len(self._tree.leaves))
        return self._connection.retry(
            "JoinUpload", lambda: self._send_leaves(self._stub.JoinUpload, first)
        )

    def describe_end(
        self, sums: Sums, placed: tree_pb2.ChunkTable | None, report: WriterReport
    ) -> None:
        """Returns None: the others must finish, too."""

    def finish(self, ref: api.WriterRef, sums: Sums, report: WriterReport) -> None:
        try:
            super().finish(ref, sums, report)
        except AlreadyExistsError:
            # The response to an earlier attempt was lost, and others committed.
            if self._get_upload(ref.upload).state != api.Upload.STATE_COMMITTED:
                raise
            return
        with suppress(StoreError):  # else the others find out by the store
            self._is_last = self._joint.finish()

    def commit(
        self,
        ref: api.WriterRef,
        end: api.WriterEnd | None = None,  # noqa: ARG002 - none of these has one
    ) -> Checkpoint:
        """Waits for all processes to finish, then returns the committed checkpoint.

        Raises:
            StoreError: As the contract states for CommitUpload.
            PeerFailedError: Another process failed; the message gives the cause.
            UnavailableError: No process made progress for one lease; the message names
                those that have not finished.
        """
        try:
            while True:
                if not (self._is_last and self._claim_turn()):
                    with self._meter.phase("await others"):
                        outcome = self._await_commit(ref)
                    if outcome is not None:
                        return self._parse_checkpoint(outcome)
                try:
                    return self._commit_for_all(ref)
                except PreconditionError as e:
                    if e.reason != "WRITER_UNFINISHED":
                        raise
                    self._is_last = False  # the board has counted a process twice
        finally:
            self._joint.leave()

    def _parse_checkpoint(self, outcome: Outcome) -> Checkpoint:
        """Returns the checkpoint that another process has committed."""
        self.last_process = outcome.last
        message = checkpoint_api.Checkpoint.FromString(b64decode(outcome.committed))
        return Checkpoint.from_message(message)

    def _commit_for_all(self, ref: api.WriterRef) -> Checkpoint:
        """Commits the upload, and publishes the checkpoint, or why there is none."""
        try:
            committed = self._commit(ref)
        except UnavailableError:  # not to this process: another one takes its turn
            raise
        except StoreError as e:
            if e.reason != "WRITER_UNFINISHED":
                self._joint.fail(e)
            raise
        with suppress(StoreError):  # committed, even if others cannot be notified
            last = self._name(self.index) if self._is_last else ""
            self._joint.end(ref.upload, committed.SerializeToString(), last=last)
            self.last_process = last
        return Checkpoint.from_message(committed)

    def _claim_turn(self) -> bool:
        """Returns whether this process is the one to commit in the next turn."""
        try:
            is_own = self._joint.claim_commit(self._turn)
        except UnavailableError:  # no process can claim it: each commits when it looks
            return True
        self._turn += 1
        return is_own

    def fail(self, error: BaseException) -> None:
        """Publishes to the other processes why this one failed."""
        self._joint.fail(error)

    def check_others(self) -> None:
        outcome = self._read_outcome()
        if outcome is not None:
            self._check(outcome)

    def _begun_upload(self) -> str:
        """Waits until process 0 has begun the upload; returns its name."""
        seconds = self.described.lease.total_seconds()
        outcome = self._joint.begun(seconds=seconds)
        if outcome is None:
            raise UnavailableError(
                f"save of {self.described}: {self._label(0)} of {self.writer_count} "
                f"has not begun it in {seconds:g} s; every process of the job must "
                "save each step, and run still"
            )
        self._check(outcome)
        return outcome.name

    def _await_commit(self, ref: api.WriterRef) -> Outcome | None:
        """Waits for the commit of another process, and returns its outcome; None if it
        is this one's turn to request the commit."""
        lease = self.described.lease.total_seconds()
        last, since = None, self._meter.clock()
        begun, log_seconds = since, LOG_SECONDS
        # The processes look at the upload in turn.
        most = max(POLL_SECONDS, self.writer_count * POLL_SECONDS / 2)
        interval = min(most, lease / 4)
        share = (self.index + 1) / self.writer_count
        seconds = max(min(POLL_SECONDS, interval), share * interval)
        while True:
            outcome = self._read_outcome(seconds=max(MIN_POLL_SECONDS, seconds))
            if outcome is not None:
                self._check(outcome)
                return outcome
            upload = self._get_upload(ref.upload)
            if upload.state == api.Upload.STATE_COMMITTED:
                return None  # the process that committed it could not publish it
            if upload.state == api.Upload.STATE_ENDED:
                raise ConflictError(
                    f"save of {self.described}: its upload was aborted, or its step "
                    f"taken over, before {self._missing(last)} had finished; save again"
                )
            if upload.finished_writer_count == self.writer_count:
                # the process that finished last may have died before its commit
                if self._claim_turn():
                    return None
                seconds = LATE_SECONDS * 2 ** (self._turn - 1)
                continue
            waited = self._meter.clock() - begun
            if waited >= log_seconds:
                _log.warning(
                    "save of %s waits for %s, for %.0f s now",
                    *(self.described, self._missing(upload), waited),
                )
                log_seconds *= 2
            # A renewal counts as progress: each process that still writes renews.
            if upload != last:
                last, since = upload, self._meter.clock()
            elif self._meter.clock() - since > lease:
                raise UnavailableError(
                    f"save of {self.described}: {self._missing(upload)} have not "
                    f"finished, and made no progress for {lease:g} s; restart "
                    "them and save the step again in all processes, which resumes "
                    "this save"
                )
            seconds = min(interval, since + lease - self._meter.clock())

    def _read_outcome(self, *, seconds: float = 0.0) -> Outcome | None:
        """Returns the published outcome of the save; None if there is none in time.

        If the process that runs the coordination service has died, nothing can be
        published, but the store still has the state of the upload."""
        try:
            return self._joint.ended(seconds=seconds)
        except UnavailableError:
            time.sleep(seconds)
            return None

    def _get_upload(self, name: str) -> api.Upload:
        request = api.GetUploadRequest(name=name)
        return self._connection.ask(self._stub.GetUpload, request).upload

    def _check(self, outcome: Outcome) -> None:
        if outcome.failure:
            raise PeerFailedError(
                f"save of {self.described} failed in another process of the job: "
                f"{outcome.failure}"
            )

    def _label(self, index: int) -> str:
        """Returns the name of a process that has not finished, for messages."""
        name, other = self._name(index), self._joint.other_step(index)
        return f"{name} (its last save is of step {other})" if other else name

    def _name(self, index: int) -> str:
        return process_name(self._joint.job, index)

    def _missing(self, upload: api.Upload | None) -> str:
        """Returns the processes that have not finished, for messages."""
        if upload is None:
            return "all processes"
        named = [self._label(writer) for writer in upload.unfinished_writers[:_SHOWN]]
        more = self.writer_count - upload.finished_writer_count - len(named)
        rest = f" and {more} more" if more else ""
        return f"{', '.join(named)}{rest} of {self.writer_count} processes"


@cache
def _warn_heartbeat(lease_seconds: float) -> None:
    """Warns, once for each lease length, that jax may abort the job before a lease
    expires."""
    _log.warning(
        "this job's saves report a dead process after their lease of %g s, but jax "
        "aborts the other processes sooner, after heartbeat_timeout_seconds (%g unless "
        "set): pass a larger value to jax.distributed.initialize, or save with a "
        "shorter Distributed(lease=); ignore this if you did",
        *(lease_seconds, HEARTBEAT_SECONDS),
    )
