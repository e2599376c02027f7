"""Opens a checkpoint: reads its manifest in parts and verifies it."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from storesvc.format.manifests import CorruptManifestError, Manifest, unpack_manifest
from storesvc.format.names import CheckpointName
from storesvc_client._chunks.host_memory import collector_paused
from storesvc_client._job.job import Job
from storesvc_client._restore.checkpoint import OpenCheckpoint
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._rpc.connection import Connection
from storesvc_client._session import Session
from storesvc_client._values.arguments import NEVER, Deadline
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

MAX_MANIFEST_BYTES: Final = 2 << 30
"""Maximum size of a manifest: ten times that of 4 million chunks, the server's
limit."""

_log = logging.getLogger("storesvc_client")


def open_checkpoint(
    session: Session,
    name: CheckpointName,
    *,
    uid: str = "",
    held_by: Lease | None = None,
    job: Job | None = None,
    spread: bool | None = None,
    deadline: Deadline = NEVER,
    damaged: Mapping[int, str] = MappingProxyType({}),
) -> OpenCheckpoint:
    """Reads the manifest of a checkpoint and returns the open checkpoint.

    Args:
        session: Connection and data root.
        name: Name of the checkpoint.
        uid: Uid of exactly the checkpoint to open, even if it is deleted; "" opens the
            current one.
        held_by: A lease on it; None if each read takes its own hold.
        job: Job whose processes read it together; None if this process reads alone.
        spread: As for ``Distributed``.
        deadline: Deadline for the manifest.
        damaged: Newer checkpoints that were skipped because of damage, for reports.

    Raises:
        NotFoundError: There is no such checkpoint.
        DataLossError: Its manifest is corrupt.
        UnavailableError: The manifest could not be read before the deadline.
    """
    request = api.ReadManifestRequest(name=name.resource, uid=uid)
    try:
        message, manifest = _manifest_of(session.connection, name, request, deadline)
    except UnavailableError as e:
        if deadline.left > 0:
            raise
        raise UnavailableError(
            f"{name}: expected its manifest within {deadline.seconds:g} s, but it is "
            f"missing ({e}); check the storage, or pass a longer deadline="
        ) from e
    info = Checkpoint.from_message(message)
    return OpenCheckpoint(
        session,
        name.run,
        info,
        manifest,
        held_by=held_by,
        job=job,
        spread=spread,
        damaged=damaged,
    )


def _manifest_of(
    connection: Connection,
    name: CheckpointName,
    request: api.ReadManifestRequest,
    deadline: Deadline,
) -> tuple[api.Checkpoint, Manifest]:
    """Returns a checkpoint and its manifest; reads a corrupt manifest a second time,
    because the first read may have been corrupted in transit.

    Raises:
        DataLossError: The second read is corrupt, too.
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
                "the manifest of %s was corrupted in transit; the second read is "
                "correct",
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
            if size > message.manifest_bytes:  # keep no more in memory
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
    """Rejects a manifest whose announced size is out of range."""
    if not 0 <= message.manifest_bytes <= MAX_MANIFEST_BYTES:
        raise DataLossError(
            f"store {connection.address} announced a manifest of "
            f"{message.manifest_bytes} bytes, expected 0 to {MAX_MANIFEST_BYTES}; use "
            "another checkpoint",
            reason="CORRUPT_DATA",
        )
