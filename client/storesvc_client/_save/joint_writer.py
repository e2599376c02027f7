"""A process's part in an upload that several processes of a job write.

Process 0 begins the upload and tells its name, the others join it, with their own plan
of the same tree. From then on each writes its own chunks, finishes by itself, and waits
for nobody: only who asks for the result does. Whoever is the last to finish commits.

A process that fails says so, and the others fail with its words. One that dies says
nothing: its upload is waited for as long as its lease lasts, and then the processes
that have not finished are named. It stays until it is collected, so that a save of the
same step goes on where this one stopped.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Final

from storesvc.format.chunks import Sums
from storesvc.format.trees import Tree
from storesvc_client._job.job import JointSave, Outcome, process_name
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.writer import Description, Part
from storesvc_client._values.progress import Meter
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import (
    AlreadyExistsError,
    ConflictError,
    PeerFailedError,
    StoreError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import upload_service_pb2 as api

LOOK_SECONDS: Final = 5.0
"""How often the store is asked what became of an upload; news of it come sooner."""

TURN_SECONDS: Final = 0.1
"""How often at most."""

LOG_SECONDS: Final = 10.0
"""After which it is logged who is waited for; then after twice as long, and so on."""

LAST_SECONDS: Final = 1.0
"""How long who has finished last is waited for to say so."""

HEARTBEAT_SECONDS: Final = 100.0
"""How long jax waits for the heartbeat of a process before it aborts all others, unless
``jax.distributed.initialize(heartbeat_timeout_seconds=)`` says otherwise. jax does not
show what it was given."""

_SHOWN: Final = 4

_log = logging.getLogger(__name__)


class JointPart(Part):
    """The part of one process of a job."""

    def __init__(
        self,
        connection: Connection,
        description: Description,
        tree: Tree,
        meter: Meter,
        joint: JointSave,
    ) -> None:
        """Prepares.

        Args:
            connection: To the store.
            description: What is saved; that of process 0 counts.
            tree: As this process planned it.
            meter: Takes note of what is done.
            joint: The save of all processes.
        """
        super().__init__(connection, description, tree, meter)
        self._joint = joint
        self.writer = joint.job.index
        self.writer_count = joint.job.count
        self._unfinished = joint.job.count
        """Processes that have not finished, as far as is known."""

    def begin(self) -> api.Upload:
        """Returns the upload: process 0 begins it, the others join it.

        Raises:
            StoreError: As the contract says of BeginUpload and JoinUpload.
            UnavailableError: Process 0 has not begun it in time.
            PeerFailedError: It has failed.
            ConflictError: It began it in another store.
        """
        if self.writer == 0:
            lease_seconds = self.described.lease.total_seconds()
            if lease_seconds >= HEARTBEAT_SECONDS:
                _warn_of_heartbeat(lease_seconds)
            upload = super().begin()
            self._joint.begin(upload.name)
            return upload
        name = self._begun_upload()
        try:
            for attempt in self._connection.attempts("JoinUpload"):
                with attempt:
                    return self._join(name)
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
        raise AssertionError

    def finish(self, ref: api.WriterRef, sums: Sums) -> None:
        """See ``Part.finish``."""
        for attempt in self._connection.attempts("FinishWriter"):
            with attempt, self._meter.phase("finish"):
                try:
                    answer = self._finish(ref, sums)
                except AlreadyExistsError:
                    # where the answer to this was lost, others have committed since
                    if self._look(ref.upload).state != api.Upload.STATE_COMMITTED:
                        raise
                    return
                self._unfinished = answer.unfinished_writer_count
        if not self._unfinished:
            with suppress(StoreError):  # a figure of the report, and no more
                self._joint.tell_last()

    def commit(self, ref: api.WriterRef) -> Checkpoint:
        """Returns the checkpoint, once all processes have finished.

        Raises:
            StoreError: As the contract says of CommitUpload.
            PeerFailedError: Another process has failed; says why.
            UnavailableError: Nothing was heard of those that have not finished for as
                long as the lease is; names them.
        """
        if self._unfinished:
            with self._meter.phase("await others"):
                self._await_all(ref)
        checkpoint = super().commit(ref)
        with suppress(StoreError):  # it is committed, whoever can be told so
            self._joint.end(ref.upload)
            self.last_process = self._joint.last(seconds=LAST_SECONDS)
        return checkpoint

    def fail(self, error: BaseException) -> None:
        """Tells the others why this process has given up."""
        self._joint.fail(error)

    def check_others(self) -> None:
        """See ``Part.check_others``."""
        outcome = self._ended()
        if outcome is not None:
            self._check(outcome)

    def _begun_upload(self) -> str:
        """The name of the upload, once process 0 has begun it."""
        seconds = self.described.lease.total_seconds()
        outcome = self._joint.begun(seconds=seconds)
        if outcome is None:
            raise UnavailableError(
                f"save of {self.described}: {self._named(0)} of {self.writer_count} "
                f"has not begun it in {seconds:g} s; every process of the job must "
                "save each step, and run still"
            )
        self._check(outcome)
        return outcome.name

    def _join(self, name: str) -> api.Upload:
        opening = api.JoinOpening(
            upload=name, writer=self.writer, writer_count=self.writer_count
        )

        parts = self._leaves()

        def requests() -> Iterator[api.JoinUploadRequest]:
            yield api.JoinUploadRequest(open=opening, leaf_count=len(self._tree.leaves))
            for leaves, digests in parts:
                yield api.JoinUploadRequest(leaves=leaves, leaf_digests=digests)

        with translated(self._connection.address):
            response = self._stub.JoinUpload(
                requests(), timeout=self._connection.timeout
            )
        return response.upload

    def _await_all(self, ref: api.WriterRef) -> None:
        """Returns once all processes have finished."""
        lease = self.described.lease.total_seconds()
        last, since = None, self._meter.clock()
        begun, log_seconds = since, LOG_SECONDS
        seconds = 0.0
        while True:
            outcome = self._ended(seconds=seconds)
            if outcome is not None:
                self._check(outcome)
                return
            upload = self._look(ref.upload)
            if upload.state == api.Upload.STATE_COMMITTED or (
                upload.finished_writer_count == self.writer_count
            ):  # who finished last may have died since
                return
            if upload.state == api.Upload.STATE_ENDED:
                raise ConflictError(
                    f"save of {self.described}: its upload was aborted, or its step "
                    f"taken over, before {self._missing(last)} had finished; save again"
                )
            waited = self._meter.clock() - begun
            if waited >= log_seconds:
                _log.warning(
                    "save of %s waits for %s, for %.0f s now",
                    *(self.described, self._missing(upload), waited),
                )
                log_seconds *= 2
            if upload != last:
                last, since = upload, self._meter.clock()
            elif self._meter.clock() - since > lease:
                raise UnavailableError(
                    f"save of {self.described}: {self._missing(upload)} have not "
                    f"finished, and nothing was heard of them for {lease:g} s; start "
                    "them again and save the step again in all, which goes on where "
                    "this stopped"
                )
            left = since + lease - self._meter.clock()
            seconds = max(TURN_SECONDS, min(LOOK_SECONDS, lease / 4, left))

    def _ended(self, *, seconds: float = 0.0) -> Outcome | None:
        """How it ended, as the others tell; None: nothing in that time. Where they
        cannot tell any more, as the process that keeps the board has died, the store
        still knows whether it was committed."""
        try:
            return self._joint.ended(seconds=seconds)
        except UnavailableError:
            time.sleep(seconds)
            return None

    def _look(self, name: str) -> api.Upload:
        request = api.GetUploadRequest(name=name)
        return self._connection.ask(self._stub.GetUpload, request).upload

    def _check(self, outcome: Outcome) -> None:
        if outcome.failure:
            raise PeerFailedError(
                f"save of {self.described} was given up by another process of the job: "
                f"{outcome.failure}"
            )

    def _named(self, index: int) -> str:
        """A process that is waited for."""
        name, other = self._name(index), self._joint.other_step(index)
        return f"{name} (its last save is of step {other})" if other else name

    def _name(self, index: int) -> str:
        return process_name(self._joint.job, index)

    def _missing(self, upload: api.Upload | None) -> str:
        """The processes that have not finished, for messages."""
        if upload is None:
            return "all processes"
        named = [self._named(writer) for writer in upload.unfinished_writers[:_SHOWN]]
        more = self.writer_count - upload.finished_writer_count - len(named)
        rest = f" and {more} more" if more else ""
        return f"{', '.join(named)}{rest} of {self.writer_count} processes"


@cache
def _warn_of_heartbeat(lease_seconds: float) -> None:
    """Logs, once for each lease, that jax may end a job before the lease is over."""
    _log.warning(
        "this job's saves name a process that died after their lease of %g s, but jax "
        "aborts the other processes sooner, after heartbeat_timeout_seconds (%g unless "
        "set): pass jax.distributed.initialize a longer one, or save with a shorter "
        "Distributed(lease=); ignore this where you did",
        *(lease_seconds, HEARTBEAT_SECONDS),
    )
