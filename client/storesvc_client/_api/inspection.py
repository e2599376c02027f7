"""Looking into the checkpoints of a run without restoring them."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

from storesvc.format.names import CheckpointName, Which
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._rpc.run_stub import RunBase
from storesvc_client._values.findings import Damage, Diff, LeafDifference, Verification
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import (
    InvalidRequestError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

Progress: TypeAlias = Callable[[Verification], object]


class RunInspection(RunBase):
    """Inspections of the checkpoints of a run."""

    def verify(
        self, which: Which = "latest", *, progress: Progress | None = None
    ) -> Verification:
        """Returns what is damaged of a checkpoint, after every byte was read again.

        The server reads; nothing but the findings is sent. One that is cut off, as by
        a restart of the server, begins again.

        Args:
            which: A step, "latest", or a tag.
            progress: Called about once a second with what was found so far.

        Raises:
            NotFoundError: There is no such run or checkpoint, or it was purged
                meanwhile.
            DataLossError: The manifest itself is damaged, so that nobody knows what
                was saved.
            UnavailableError: The server, or its storage, does not answer.
        """
        name = self._checkpoint_name(which)
        for left in reversed(range(BEGINNINGS)):
            with closing(self._findings(name)) as findings:
                found = next(findings)
                try:
                    for found in findings:
                        if progress is not None:
                            progress(found)
                except UnavailableError as e:
                    # a reason: not cut off, but answered by a server that lives
                    if e.reason or not left:
                        raise
                else:
                    return found
        raise AssertionError

    def diff(
        self, base: Which, which: Which = "latest", *, of: RunBase | None = None
    ) -> Diff:
        """Returns what differs between two checkpoints, leaf by leaf.

        Decided from digests: no data is read.

        Args:
            base: The one before: a step, "latest", or a tag.
            which: The one after.
            of: The run of the one after; None: this one.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            DataLossError: A manifest is damaged.
            InvalidRequestError: The other run is one of another client.
        """
        other = self if of is None else of
        request = api.DiffCheckpointsRequest(
            base=self._checkpoint_name(base).resource,
            name=self._checkpoint_of(other, which).resource,
        )
        for attempt in self._connection.attempts("DiffCheckpoints"):
            with attempt:
                return self._difference(request)
        raise AssertionError

    def _checkpoint_of(self, run: RunBase, which: Which) -> CheckpointName:
        """A checkpoint of a run that the same server knows."""
        # asked so that a name, which people may give, is refused too
        if getattr(run, "_connection", None) is not self._connection:
            raise InvalidRequestError(
                f"diff of {self.name}: expected a run of the same client, got {run!r}"
            )
        return run._checkpoint_name(which)  # noqa: SLF001 - of its own base

    def _findings(self, name: CheckpointName) -> Generator[Verification]:
        """Yields what a verification has found; first, once it began, nothing yet."""
        stub = MaintenanceServiceStub(self._connection.channel)
        request = maintenance_api.VerifyCheckpointRequest(name=name.resource)
        for attempt in self._connection.attempts("VerifyCheckpoint"):
            with attempt, translated(self._connection.address):
                stream = stub.VerifyCheckpoint(request)
                checkpoint = Checkpoint.from_message(next(stream).checkpoint)
        damages = list[Damage]()
        yield Verification(
            checkpoint=checkpoint, chunk_count=0, stored_bytes=0, damages=()
        )
        try:
            with translated(self._connection.address):
                for report in stream:
                    damages += map(Damage.from_message, report.damages)
                    yield Verification(
                        checkpoint=checkpoint,
                        chunk_count=report.chunk_count,
                        stored_bytes=report.stored_bytes,
                        damages=tuple(damages),
                    )
        finally:
            stream.cancel()  # who wants no more must not leave the server reading

    def _difference(self, request: api.DiffCheckpointsRequest) -> Diff:
        summary, found = api.DiffSummary(), list[LeafDifference]()
        with translated(self._connection.address):
            for response in self._stub.DiffCheckpoints(
                request, timeout=self._connection.timeout
            ):
                if response.HasField("summary"):
                    summary = response.summary
                found += map(LeafDifference.from_message, response.differences)
        return Diff(
            base=Checkpoint.from_message(summary.base),
            checkpoint=Checkpoint.from_message(summary.checkpoint),
            same_leaf_count=summary.same_leaf_count,
            differences=tuple(found),
        )
