"""Garbage collection, and the storage that runs use."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from storesvc.format.names import RunName
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.arguments import (
    DurationLike,
    duration_message,
    parent_resource,
    received,
)
from storesvc_client.errors import UnavailableError, translated
from storesvc_proto.v1 import maintenance_service_pb2 as api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of garbage collection in one run, or its preview; from
    ``Client.collect``."""

    run: str
    """Name of the run, ``namespace/run``."""
    aborted_upload_count: int
    """Uploads that were aborted because their lease had expired."""
    deleted_checkpoint_count: int
    """Checkpoints that were deleted because the retention policy does not keep them."""
    purged_checkpoint_count: int
    """Deleted checkpoints that were purged because their purge time had passed."""
    garbage_object_count: int
    """Objects in the storage that nothing refers to."""
    deleted_object_count: int
    """Number of those objects that were deleted."""
    postponed: str
    """Reason why something was left for the next collection; "" if nothing was."""

    @classmethod
    def from_message(cls, message: api.CollectGarbageResponse) -> "Collected":
        """Returns the value of a protobuf message."""
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
    """Storage that a run uses; from ``Run.usage``."""

    run: str
    """Name of the run, ``namespace/run``."""
    checkpoint_count: int
    """Checkpoints that are not deleted."""
    deleted_checkpoint_count: int
    """Deleted checkpoints that are not purged yet."""
    upload_count: int
    """Live uploads."""
    logical_bytes: int
    """Bytes of all leaves of all checkpoints, including deleted ones."""
    stored_bytes: int
    """Bytes of their stored chunks; a chunk counts once for each checkpoint that uses
    it."""
    distinct_bytes: int
    """Bytes of their stored chunks, each counted once: the sum over the data files of
    the largest number of bytes that one checkpoint uses of the file."""
    file_count: int
    """Data files that they need."""

    @classmethod
    def from_message(cls, run: str, message: api.GetUsageResponse) -> "Usage":
        """Returns the value of a protobuf message."""
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


def usage_of(stub: RunStub) -> Usage:
    """Returns the storage that a run uses; see ``Run.usage``."""
    service = MaintenanceServiceStub(stub.connection.channel)
    request = api.GetUsageRequest(name=stub.name.resource)
    return Usage.from_message(str(stub.name), stub.ask(service.GetUsage, request))


def collect(
    connection: Connection,
    parent: str | None,
    *,
    grace: DurationLike | None,
    dry_run: bool,
) -> Iterator[Collected]:
    """Collects garbage run by run; see ``Client.collect``."""
    request = api.CollectGarbageRequest(
        parent=parent_resource(parent), validate_only=dry_run
    )
    if grace is not None:
        request.grace.CopyFrom(duration_message(grace, "grace= of a collection"))
    return _collected(connection, request)


def _collected(
    connection: Connection, request: api.CollectGarbageRequest
) -> Iterator[Collected]:
    """Yields each run once, over as many calls as it takes."""
    seen = set[str]()
    for left in reversed(range(BEGINNINGS)):
        with closing(_passes(connection, request)) as passes:
            try:
                for message in passes:
                    if message.done and message.run not in seen:
                        seen.add(message.run)
                        yield Collected.from_message(message)
            except UnavailableError as e:
                # With a reason the server itself reports the error: no retry helps.
                if e.reason or not left:
                    raise
            else:
                return


def _passes(
    connection: Connection, request: api.CollectGarbageRequest
) -> Generator[api.CollectGarbageResponse]:
    """Yields the messages of one call."""
    stub = MaintenanceServiceStub(connection.channel)
    for attempt in connection.attempts("CollectGarbage"):
        with attempt, translated(connection.address):
            stream = stub.CollectGarbage(request)
            first = next(stream, None)
    try:
        if first is not None:
            yield first
        with translated(connection.address):
            yield from stream
    finally:
        stream.cancel()  # if the caller stops early, the server must stop, too
