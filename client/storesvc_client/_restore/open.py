"""Opening a checkpoint: its manifest comes, in parts, and is checked."""

import logging
from typing import Final

from storesvc.format.manifests import CorruptManifestError, Manifest, unpack_manifest
from storesvc.format.names import CheckpointName
from storesvc_client._job.job import Job
from storesvc_client._restore.checkpoint import OpenCheckpoint
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._rpc.connection import Connection
from storesvc_client._session import Session
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client._values.gc_pause import collector_paused
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

MAX_MANIFEST_BYTES: Final = 2 << 30
"""Of a manifest: 4 million chunks, which no server exceeds, take a tenth of it."""

_log = logging.getLogger(__name__)


def open_checkpoint(
    session: Session,
    name: CheckpointName,
    *,
    uid: str = "",
    held_by: Lease | None = None,
    job: Job | None = None,
    spread: bool | None = None,
    deadline: Deadline = NEVER,
) -> OpenCheckpoint:
    """Returns a checkpoint with its manifest.

    Args:
        session: With the store.
        name: Which one.
        uid: The very one of this uid, also where it was deleted; "": any.
        held_by: What holds it; None: each read holds it for itself.
        job: Whose processes read it together; None: this one does.
        spread: As for ``Distributed``.
        deadline: By when.

    Raises:
        NotFoundError: There is none.
        DataLossError: Its manifest is damaged.
        UnavailableError: It is not there in time.
    """
    request = api.ReadManifestRequest(name=name.resource, uid=uid)
    try:
        message, manifest = _manifest_of(session.connection, name, request, deadline)
    except UnavailableError as e:
        if deadline.left > 0:
            raise
        raise UnavailableError(
            f"{name}: expected to be read after {deadline.seconds:g} s, but its "
            f"manifest is outstanding ({e}); look for what makes its storage slow, or "
            "allow more time"
        ) from e
    info = Checkpoint.from_message(message)
    return OpenCheckpoint(
        session, name.run, info, manifest, held_by=held_by, job=job, spread=spread
    )


def _manifest_of(
    connection: Connection,
    name: CheckpointName,
    request: api.ReadManifestRequest,
    deadline: Deadline,
) -> tuple[api.Checkpoint, Manifest]:
    """A checkpoint and its manifest; where that is damaged, of a second read: the
    answer may have been corrupted on its way.

    Raises:
        DataLossError: Both are damaged.
    """
    for is_last in (False, True):
        message, data = connection.until(
            "ReadManifest",
            deadline,
            lambda: _manifest_bytes(
                connection, request, timeout=connection.seconds(deadline)
            ),
        )
        try:
            with collector_paused():
                manifest = unpack_manifest(
                    data,
                    size_bytes=message.manifest_bytes,
                    expected=message.manifest_digest,
                )
        except CorruptManifestError as e:
            if is_last:
                raise DataLossError(
                    f"{name.run}@{message.step}: {e}; use another checkpoint",
                    reason="CORRUPT_DATA",
                ) from None
            continue
        if is_last:
            _log.warning(
                "the manifest of %s was corrupted on its way; read again, it is sound",
                name,
            )
        return message, manifest
    raise AssertionError


def _manifest_bytes(
    connection: Connection, request: api.ReadManifestRequest, *, timeout: float
) -> tuple[api.Checkpoint, bytes]:
    stub = CheckpointServiceStub(connection.channel)
    message, parts, size = api.Checkpoint(), [], 0
    with translated(connection.address):
        stream = stub.ReadManifest(request, timeout=timeout)
        for response in stream:
            if response.HasField("checkpoint"):
                message = response.checkpoint
                _check_size(connection, message)
            size += len(response.part)
            if size > message.manifest_bytes:  # what follows is not kept in memory
                stream.cancel()
                break
            parts.append(response.part)
    if size > message.manifest_bytes:
        raise DataLossError(
            f"store {connection.address} sent a manifest of more than the "
            f"{message.manifest_bytes} bytes that it announced; use another checkpoint",
            reason="CORRUPT_DATA",
        )
    return message, b"".join(parts)


def _check_size(connection: Connection, message: api.Checkpoint) -> None:
    """Refuses a manifest whose announced size cannot be."""
    if not 0 <= message.manifest_bytes <= MAX_MANIFEST_BYTES:
        raise DataLossError(
            f"store {connection.address} announced a manifest of "
            f"{message.manifest_bytes} bytes, expected 0 to {MAX_MANIFEST_BYTES}; use "
            "another checkpoint",
            reason="CORRUPT_DATA",
        )
