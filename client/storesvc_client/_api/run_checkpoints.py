"""The checkpoints of a run as records: lookups, lists, and what changes after the
commit. Their data are read and written by ``Run``."""

from collections.abc import Iterator, Mapping

from storesvc.format.names import Which
from storesvc_client._api.lifecycle import (
    delete_checkpoint,
    purge_checkpoint,
    undelete_checkpoint,
    update_checkpoint,
)
from storesvc_client._rpc.run_stub import OnDamage, RunStub
from storesvc_client._values.arguments import DurationLike
from storesvc_client._values.notebook import listed
from storesvc_client._values.reports import SaveTrace, WriterReport
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import NotFoundError
from storesvc_proto.v1 import checkpoint_service_pb2 as api


class RunCheckpoints:
    """The part of ``Run`` that works on the records of checkpoints."""

    def __init__(self, stub: RunStub) -> None:
        self._stub = stub

    def checkpoint(self, which: Which) -> Checkpoint:
        """Returns a checkpoint: its step, metrics, labels, times and sizes.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such checkpoint; names the nearest steps.
        """
        name = self._stub.checkpoint_name(which)
        request = api.GetCheckpointRequest(name=name.resource)
        response = self._stub.ask(self._stub.service.GetCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def trace(self, which: Which) -> SaveTrace:
        """Returns the timeline of the save of a checkpoint.

        >>> print(run.trace("latest"))

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such checkpoint; names the nearest steps.
        """
        name = self._stub.checkpoint_name(which)
        request = api.GetCheckpointRequest(name=name.resource)
        response = self._stub.ask(self._stub.service.GetCheckpoint, request)
        checkpoint = Checkpoint.from_message(response.checkpoint)
        return SaveTrace(
            run=checkpoint.run,
            step=checkpoint.step,
            upload=checkpoint.uid,
            create_time=checkpoint.create_time,
            commit_time=checkpoint.commit_time,
            writers=tuple(map(WriterReport.from_message, response.writers)),
        )

    def latest(self) -> Checkpoint:
        """Returns the newest checkpoint.

        Raises:
            NotFoundError: The run has no checkpoint.
        """
        return self.checkpoint("latest")

    def latest_step(self) -> int | None:
        """Returns the newest committed step; None if the run has no checkpoint.

        >>> start = 0 if run.latest_step() is None else run.latest_step() + 1
        """
        try:
            return self.latest().step
        except NotFoundError:
            return None

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending; none if there is no such run.

        Raises:
            DataLossError: The record of a checkpoint is damaged; ``checkpoints`` can
                list the others.
        """
        try:
            return sorted(found.step for found in self.checkpoints())
        except NotFoundError:
            return []

    @listed("checkpoint")
    def checkpoints(
        self, *, deleted: bool = False, on_damage: OnDamage = None
    ) -> Iterator[Checkpoint]:
        """Yields the checkpoints, the highest step first.

        Args:
            deleted: Lists the deleted checkpoints that can be undeleted, instead of the
                others.
            on_damage: Called with a ``DataLossError`` for each checkpoint whose record
                is damaged; None raises the error in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next checkpoint is damaged.
        """
        request = api.ListCheckpointsRequest(
            parent=self._stub.name.resource, show_deleted=deleted
        )
        for message in self._stub.rows(
            self._stub.service.ListCheckpoints,
            request,
            lambda page: page.checkpoints,
            on_damage,
        ):
            if message.HasField("delete_time") == deleted:
                yield Checkpoint.from_message(message)

    def update(
        self,
        which: Which,
        *,
        labels: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        pinned: bool | None = None,
        etag: str | None = None,
    ) -> Checkpoint:
        """Sets labels, metrics or the pin of a checkpoint, and returns it.

        Args:
            which: A step, "latest" or a tag.
            labels: All labels of the checkpoint; None leaves them unchanged.
            metrics: All metrics of the checkpoint; None leaves them unchanged.
            pinned: Whether the checkpoint cannot be deleted; None leaves it unchanged.
            etag: ``Checkpoint.etag``: rejects the change if the checkpoint changed
                since.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            ConflictError: It changed since the etag was read.
            InvalidRequestError: Nothing is to be set, or a value is out of range.
        """
        return update_checkpoint(
            self._stub,
            which,
            labels=labels,
            metrics=metrics,
            pinned=pinned,
            etag=etag,
        )

    def delete(
        self,
        step: int,
        *,
        uid: str | None = None,
        etag: str | None = None,
        purge_delay: DurationLike | None = None,
    ) -> Checkpoint:
        """Deletes a checkpoint, and returns it with its ``purge_time``.

        Until then it can be undeleted. Deleting it again changes nothing.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.
            etag: ``Checkpoint.etag``: rejects the deletion if it changed since.
            purge_delay: How long it can be undeleted, a ``timedelta`` or seconds; None:
                the purge delay of the run.

        Raises:
            NotFoundError: There is no such checkpoint, or its uid is another one.
            PreconditionError: It is pinned or has a tag.
            ConflictError: It changed since the etag was read.
        """
        return delete_checkpoint(
            self._stub, step, uid=uid, etag=etag, purge_delay=purge_delay
        )

    def undelete(self, step: int, *, uid: str | None = None) -> Checkpoint:
        """Restores a deleted checkpoint to the list of the run, and returns it.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.

        Raises:
            NotFoundError: There is no such checkpoint, its uid is another one, or it
                was purged.
            ConflictError: It is being purged.
        """
        return undelete_checkpoint(self._stub, step, uid=uid)

    def purge(
        self, step: int, *, uid: str | None = None, etag: str | None = None
    ) -> None:
        """Removes a deleted checkpoint for good, and frees its step.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.
            etag: ``Checkpoint.etag``: rejects the purge if it changed since.

        Raises:
            NotFoundError: There is no such checkpoint, or its uid is another one.
            PreconditionError: It is not deleted, or a hold or an upload needs it.
            ConflictError: It changed since the etag was read.
        """
        purge_checkpoint(self._stub, step, uid=uid, etag=etag)
