"""Opening a checkpoint: its manifest comes, in parts, and is checked."""

from storesvc.format.manifests import CorruptManifestError, unpack_manifest
from storesvc.format.names import CheckpointName
from storesvc_client._channel import Connection
from storesvc_client._durations import NEVER, Deadline
from storesvc_client._jobs import Job
from storesvc_client._leasing import Lease
from storesvc_client._opened import OpenCheckpoint
from storesvc_client._pausing import collector_paused
from storesvc_client._values import Checkpoint
from storesvc_client.errors import DataLossError, UnavailableError, translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub


def open_checkpoint(
    connection: Connection,
    name: CheckpointName,
    *,
    uid: str = "",
    held_by: Lease | None = None,
    job: Job | None = None,
    deadline: Deadline = NEVER,
) -> OpenCheckpoint:
    """Returns a checkpoint with its manifest.

    Args:
        connection: To the store.
        name: Which one.
        uid: The very one of this uid, also where it was deleted; "": any.
        held_by: What holds it; None: each read holds it for itself.
        job: Whose processes read it together; None: this one does.
        deadline: By when.

    Raises:
        NotFoundError: There is none.
        DataLossError: Its manifest is damaged.
        UnavailableError: It is not there in time.
    """
    request = api.ReadManifestRequest(name=name.resource, uid=uid)
    try:
        message, data = connection.until(
            "ReadManifest",
            deadline,
            lambda: _manifest_bytes(
                connection, request, timeout=connection.seconds(deadline)
            ),
        )
    except UnavailableError as e:
        if deadline.left > 0:
            raise
        raise UnavailableError(
            f"{name}: expected to be read after {deadline.seconds:g} s, but its "
            f"manifest is outstanding ({e}); look for what makes its storage slow, or "
            "allow more time"
        ) from e
    try:
        with collector_paused():
            manifest = unpack_manifest(
                data,
                size_bytes=message.manifest_bytes,
                expected=message.manifest_digest,
            )
    except CorruptManifestError as e:
        raise DataLossError(
            f"{name.run}@{message.step}: {e}; use another checkpoint",
            reason="CORRUPT_DATA",
        ) from e
    info = Checkpoint.from_message(message)
    return OpenCheckpoint(
        connection, name.run, info, manifest, held_by=held_by, job=job
    )


def _manifest_bytes(
    connection: Connection, request: api.ReadManifestRequest, *, timeout: float
) -> tuple[api.Checkpoint, bytes]:
    stub = CheckpointServiceStub(connection.channel)
    message, parts = api.Checkpoint(), []
    with translated(connection.address):
        for response in stub.ReadManifest(request, timeout=timeout):
            if response.HasField("checkpoint"):
                message = response.checkpoint
            parts.append(response.part)
    return message, b"".join(parts)
