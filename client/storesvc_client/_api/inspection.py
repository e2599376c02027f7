"""Verifies checkpoints and compares them, without restoring them."""

from collections.abc import Callable, Generator
from contextlib import closing

from storesvc.format.keys import is_item
from storesvc.format.names import CheckpointName, Which
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.values import (
    Checkpoint,
    Damage,
    Diff,
    ItemDifference,
    LeafDifference,
    Verification,
)
from storesvc_client.errors import (
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub


def verify_checkpoint(
    stub: RunStub, which: Which, *, progress: Callable[[Verification], object] | None
) -> Verification:
    """Returns the damage of a checkpoint; see ``Run.verify``."""
    name = stub.checkpoint_name(which)
    for left in reversed(range(BEGINNINGS)):
        with closing(_findings(stub, name)) as findings:
            found = next(findings)
            try:
                for found in findings:
                    if progress is not None:
                        progress(found)
            except UnavailableError as e:
                # With a reason the server itself reports the error: no retry helps.
                if e.reason or not left:
                    raise
            else:
                return found
    raise AssertionError


def diff_checkpoints(stub: RunStub, base: CheckpointName, name: CheckpointName) -> Diff:
    """Returns the differences between two checkpoints; see ``Run.diff``."""
    request = api.DiffCheckpointsRequest(base=base.resource, name=name.resource)
    for attempt in stub.connection.attempts("DiffCheckpoints"):
        with attempt:
            return _difference(stub, request)
    raise AssertionError


def _findings(stub: RunStub, name: CheckpointName) -> Generator[Verification]:
    """Yields the findings so far: first none, once the server has begun."""
    connection = stub.connection
    service = MaintenanceServiceStub(connection.channel)
    request = maintenance_api.VerifyCheckpointRequest(name=name.resource)
    for attempt in connection.attempts("VerifyCheckpoint"):
        with attempt, translated(connection.address):
            stream = service.VerifyCheckpoint(request)
            checkpoint = Checkpoint.from_message(next(stream).checkpoint)
    damages = list[Damage]()
    yield Verification(checkpoint=checkpoint, chunk_count=0, stored_bytes=0, damages=())
    try:
        with translated(connection.address):
            for report in stream:
                damages += map(Damage.from_message, report.damages)
                yield Verification(
                    checkpoint=checkpoint,
                    chunk_count=report.chunk_count,
                    stored_bytes=report.stored_bytes,
                    damages=tuple(damages),
                )
    finally:
        stream.cancel()  # if the caller stops early, the server must stop, too


def _difference(stub: RunStub, request: api.DiffCheckpointsRequest) -> Diff:
    summary = api.DiffSummary()
    found, items = list[LeafDifference](), list[ItemDifference]()
    with translated(stub.connection.address):
        for response in stub.service.DiffCheckpoints(
            request, timeout=stub.connection.timeout
        ):
            if response.HasField("summary"):
                summary = response.summary
            for difference in response.differences:
                if is_item(difference.key):
                    items.append(ItemDifference.from_message(difference))
                else:
                    found.append(LeafDifference.from_message(difference))
    return Diff(
        base=Checkpoint.from_message(summary.base),
        checkpoint=Checkpoint.from_message(summary.checkpoint),
        same_leaf_count=summary.same_leaf_count,
        differences=tuple(found),
        items=tuple(items),
    )
