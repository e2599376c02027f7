"""Changes of a checkpoint after its commit: update, delete, undelete, purge."""

import uuid
from collections.abc import Mapping

from storesvc.format.names import Which
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.arguments import (
    DurationLike,
    checked_flag,
    checked_labels,
    checked_metrics,
    checked_text,
    duration_message,
)
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api


def update_checkpoint(
    stub: RunStub,
    which: Which,
    *,
    labels: Mapping[str, str] | None,
    metrics: Mapping[str, float] | None,
    pinned: bool | None,
    etag: str | None,
) -> Checkpoint:
    """Sets labels, metrics or the pin of a checkpoint; see ``Run.update``."""
    place = f"update of {stub.name}"
    message = api.Checkpoint(
        labels=checked_labels(place, labels),
        metrics=checked_metrics(place, metrics),
        pinned=bool(checked_flag(f"{place}: pinned=", pinned)),
    )
    given = {"labels": labels, "metrics": metrics, "pinned": pinned}
    paths = [name for name, value in given.items() if value is not None]
    if not paths:
        raise InvalidRequestError(
            f"{place}: expected labels=, metrics= or pinned= to set, got none"
        )
    # Resolved once: a retry must change the same checkpoint, even if a tag moves.
    message.name = stub.step_name(which).resource
    request = api.UpdateCheckpointRequest(
        checkpoint=message, etag=_text(stub, "etag", etag), request_id=_new_id()
    )
    request.update_mask.paths.extend(paths)
    response = stub.ask(stub.service.UpdateCheckpoint, request)
    return Checkpoint.from_message(response.checkpoint)


def delete_checkpoint(
    stub: RunStub,
    step: int,
    *,
    uid: str | None,
    etag: str | None,
    purge_delay: DurationLike | None,
) -> Checkpoint:
    """Marks a checkpoint as deleted; see ``Run.delete``."""
    request = api.DeleteCheckpointRequest(
        name=_resource(stub, step),
        uid=_text(stub, "uid", uid),
        etag=_text(stub, "etag", etag),
        request_id=_new_id(),
    )
    if purge_delay is not None:
        request.purge_delay.CopyFrom(
            duration_message(purge_delay, f"purge_delay= of {stub.name}")
        )
    response = stub.ask(stub.service.DeleteCheckpoint, request)
    return Checkpoint.from_message(response.checkpoint)


def undelete_checkpoint(stub: RunStub, step: int, *, uid: str | None) -> Checkpoint:
    """Reverts the deletion of a checkpoint; see ``Run.undelete``."""
    request = api.UndeleteCheckpointRequest(
        name=_resource(stub, step),
        uid=_text(stub, "uid", uid),
        request_id=_new_id(),
    )
    response = stub.ask(stub.service.UndeleteCheckpoint, request)
    return Checkpoint.from_message(response.checkpoint)


def purge_checkpoint(
    stub: RunStub, step: int, *, uid: str | None, etag: str | None
) -> None:
    """Removes a deleted checkpoint for good; see ``Run.purge``."""
    request = api.PurgeCheckpointRequest(
        name=_resource(stub, step),
        uid=_text(stub, "uid", uid),
        etag=_text(stub, "etag", etag),
    )
    connection, may_be_purged = stub.connection, False
    for attempt in connection.attempts("PurgeCheckpoint"):
        with attempt:
            try:
                with translated(connection.address):
                    stub.service.PurgeCheckpoint(request, timeout=connection.timeout)
            except UnavailableError:
                may_be_purged = True  # only the response may have been lost
                raise
            except NotFoundError:
                if not may_be_purged:
                    raise


def _resource(stub: RunStub, step: int) -> str:
    name = stub.checkpoint_name(step)
    if isinstance(name.which, str):
        raise InvalidRequestError(
            f"{stub.name}: expected a step (int), got {step!r}, which can move to "
            "another checkpoint"
        )
    return name.resource


def _text(stub: RunStub, name: str, given: str | None) -> str:
    return checked_text(f"{stub.name}: {name}=", given)


def _new_id() -> str:
    return str(uuid.uuid4())
