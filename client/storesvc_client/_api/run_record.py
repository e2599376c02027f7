"""The record of a run: its labels, purge delay and retention policy."""

import uuid
from collections.abc import Mapping

from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.arguments import (
    DurationLike,
    checked_labels,
    checked_text,
    duration_message,
)
from storesvc_client._values.values import RunInfo
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api


def get_run(stub: RunStub) -> api.Run:
    """Returns the record of a run.

    Raises:
        NotFoundError: There is no such run.
    """
    request = api.GetRunRequest(name=stub.name.resource)
    return stub.ask(stub.service.GetRun, request).run


def update_run(
    stub: RunStub, message: api.Run, paths: list[str], etag: str | None
) -> RunInfo:
    """Sets the fields of a run at ``paths``, and returns the run.

    Raises:
        InvalidRequestError: A value is out of range.
        ConflictError: The run has another etag.
    """
    message.name = stub.name.resource
    request = api.UpdateRunRequest(
        run=message,
        etag=checked_text(f"{stub.name}: etag=", etag),
        request_id=str(uuid.uuid4()),
    )
    request.update_mask.paths.extend(paths)
    # The request id makes retries of this request idempotent.
    return RunInfo.from_message(stub.ask(stub.service.UpdateRun, request).run)


def set_purge_delay(stub: RunStub, message: api.Run, delay: DurationLike) -> None:
    """Sets the purge delay in the message of a run.

    Raises:
        InvalidRequestError: It is no duration.
    """
    what = f"purge_delay= of {stub.name}"
    message.purge_delay.CopyFrom(duration_message(delay, what))


def configure_run(
    stub: RunStub,
    *,
    labels: Mapping[str, str] | None,
    purge_delay: DurationLike | None,
    etag: str | None,
) -> RunInfo:
    """Sets labels or the purge delay of a run; see ``Run.configure``."""
    message, paths = api.Run(), []
    if labels is not None:
        paths.append("labels")
        message.labels.update(checked_labels(str(stub.name), labels))
    if purge_delay is not None:
        paths.append("purge_delay")
        set_purge_delay(stub, message, purge_delay)
    if not paths:
        raise InvalidRequestError(
            f"{stub.name}: expected labels= or purge_delay= to configure, got none"
        )
    return update_run(stub, message, paths, etag)
