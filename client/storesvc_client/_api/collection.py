"""Collecting garbage, and what runs take."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

from storesvc.format.names import RunName
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._rpc.run_stub import RunBase
from storesvc_client._values.durations import duration_message
from storesvc_client._values.resource_names import parent_resource, received
from storesvc_client.errors import UnavailableError, translated
from storesvc_proto.v1 import maintenance_service_pb2 as api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a pass of the collector did in a run, or would do."""

    run: str
    """``namespace/run``."""
    aborted_upload_count: int
    """Uploads that nothing was heard of."""
    deleted_checkpoint_count: int
    """Checkpoints that the retention policy does not keep."""
    purged_checkpoint_count: int
    """Deleted checkpoints whose time had come."""
    garbage_object_count: int
    """Objects that nothing needs."""
    deleted_object_count: int
    """Of those, how many are gone."""
    postponed: str
    """Why something was left for the next time; empty: nothing was."""

    @classmethod
    def from_message(cls, message: api.CollectGarbageResponse) -> "Collected":
        """Returns a pass of the contract."""
        return cls(
            run=str(received(RunName.from_resource, message.run)),
            aborted_upload_count=message.aborted_upload_count,
            deleted_checkpoint_count=message.deleted_checkpoint_count,
            purged_checkpoint_count=message.purged_checkpoint_count,
            garbage_object_count=message.garbage_object_count,
            deleted_object_count=message.deleted_object_count,
            postponed=message.postponed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a run takes."""

    run: str
    """``namespace/run``."""
    checkpoint_count: int
    """Without deleted ones."""
    deleted_checkpoint_count: int
    """Those that are not yet purged."""
    upload_count: int
    """Live ones."""
    logical_bytes: int
    """Of all leaves of all checkpoints, deleted ones included."""
    stored_bytes: int
    """Of their stored chunks, each counted as often as it is used."""
    distinct_bytes: int
    """Of their stored chunks, each counted once: for each data file the most that one
    checkpoint has of it."""
    file_count: int
    """Data files that they need."""

    @classmethod
    def from_message(cls, run: str, message: api.GetUsageResponse) -> "Usage":
        """Returns a usage of the contract."""
        return cls(
            run=run,
            checkpoint_count=message.checkpoint_count,
            deleted_checkpoint_count=message.deleted_checkpoint_count,
            upload_count=message.upload_count,
            logical_bytes=message.logical_bytes,
            stored_bytes=message.stored_bytes,
            distinct_bytes=message.distinct_bytes,
            file_count=message.file_count,
        )


class ClientCollection:
    """The collector of a store."""

    _connection: Connection

    def collect(
        self, parent: str | None = None, *, grace: timedelta | None = None
    ) -> Iterator[Collected]:
        """Collects garbage, run by run, and yields what was done in each.

        Servers do the same by themselves from time to time. What a checkpoint, a hold
        or a live upload needs stays, whatever else goes on meanwhile. It begins when
        the first run is asked for; what is not asked for is left for the next time. One
        that is cut off, as by a restart of the server, begins again, and tells of the
        run that it was at what it did since.

        Args:
            parent: A run, a namespace, or None for all.
            grace: How long ago something must have lost its use; None: an hour. With
                less, readers that have no hold may lose what they read.

        Raises:
            NotFoundError: There is no such run.
            InvalidRequestError: The parent is none, or the grace is negative.
        """
        return self._collected(_request(parent, grace))

    def preview_collection(
        self, parent: str | None = None, *, grace: timedelta | None = None
    ) -> Iterator[Collected]:
        """Yields what ``collect`` would do in each run, and changes nothing.

        Args:
            parent: A run, a namespace, or None for all.
            grace: As for ``collect``.

        Raises:
            NotFoundError: There is no such run.
            InvalidRequestError: The parent is none, or the grace is negative.
        """
        request = _request(parent, grace)
        request.validate_only = True
        return self._collected(request)

    def _collected(self, request: api.CollectGarbageRequest) -> Iterator[Collected]:
        told = set[str]()
        for left in reversed(range(BEGINNINGS)):
            with closing(self._passes(request)) as passes:
                try:
                    for message in passes:
                        if message.done and message.run not in told:
                            told.add(message.run)
                            yield Collected.from_message(message)
                except UnavailableError as e:
                    # a reason: not cut off, but answered by a server that lives
                    if e.reason or not left:
                        raise
                else:
                    return

    def _passes(
        self, request: api.CollectGarbageRequest
    ) -> Generator[api.CollectGarbageResponse]:
        """Yields what one call tells."""
        stub = MaintenanceServiceStub(self._connection.channel)
        for attempt in self._connection.attempts("CollectGarbage"):
            with attempt, translated(self._connection.address):
                stream = stub.CollectGarbage(request)
                first = next(stream, None)
        try:
            if first is not None:
                yield first
            with translated(self._connection.address):
                yield from stream
        finally:
            stream.cancel()  # who wants no more must not leave the server collecting


class RunUsage(RunBase):
    """What a run takes."""

    def usage(self) -> Usage:
        """Returns how many bytes the run takes.

        Raises:
            NotFoundError: There is no such run.
        """
        stub = MaintenanceServiceStub(self._connection.channel)
        request = api.GetUsageRequest(name=self._name.resource)
        response = self._ask(stub.GetUsage, request)
        return Usage.from_message(self.name, response)


def _request(parent: str | None, grace: timedelta | None) -> api.CollectGarbageRequest:
    request = api.CollectGarbageRequest(parent=parent_resource(parent))
    if grace is not None:
        request.grace.CopyFrom(duration_message(grace, "grace= of a collection"))
    return request
