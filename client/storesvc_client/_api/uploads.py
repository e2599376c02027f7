"""Uploads: checkpoints that are being written."""

from collections.abc import Iterator
from functools import partial

from storesvc.format.names import InvalidNameError, UploadName
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.run_stub import OnDamage, RunStub, rows
from storesvc_client._values.notebook import listed
from storesvc_client._values.values import UploadInfo
from storesvc_client.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub


class Uploads:
    """The uploads of a run; ``run.uploads``.

    >>> [upload.step for upload in run.uploads.list()]
    [200]
    """

    def __init__(self, stub: RunStub) -> None:
        self._stub = stub
        self._service = UploadServiceStub(stub.connection.channel)

    def __repr__(self) -> str:
        return f"<Uploads of {self._stub.name}>"

    def list(self, *, on_damage: OnDamage = None) -> Iterator[UploadInfo]:
        """Yields the live uploads, by id; none if the run does not exist.

        Args:
            on_damage: Called with a ``DataLossError`` for each upload whose records are
                damaged; None raises the error in its place.

        Raises:
            DataLossError: The records of the next upload are damaged.
            UnavailableError: The server does not answer for longer than a restart
                takes.
        """
        return list_uploads(
            self._stub.connection, self._stub.name.resource, on_damage=on_damage
        )

    def get(self, upload: str) -> UploadInfo:
        """Returns an upload, live or ended; ended uploads are kept for at least a day.

        Args:
            upload: ``UploadInfo.id``, or ``Checkpoint.uid``, which is the id of the
                upload that became the checkpoint.

        Raises:
            InvalidRequestError: It is no id of an upload.
            NotFoundError: There is no such upload.
        """
        request = api.GetUploadRequest(name=self._resource(upload))
        try:
            response = self._stub.ask(self._service.GetUpload, request)
        except ConflictError as e:  # for a writer: its upload was superseded
            raise NotFoundError(
                f"{self._stub.name} has no upload {upload}, or it ended days ago; list "
                "the live uploads",
                reason=e.reason,
                metadata=e.metadata,
            ) from e
        return UploadInfo.from_message(response.upload)

    def abort(self, upload: str) -> None:
        """Aborts an upload and frees its step: its writers can no longer commit.

        An upload that has ended, or does not exist, is no error.

        Args:
            upload: ``UploadInfo.id``.

        Raises:
            AlreadyExistsError: The upload is committed.
            ConflictError: The upload changed at the same moment.
            InvalidRequestError: It is no id of an upload.
        """
        request = api.AbortUploadRequest(name=self._resource(upload))
        self._stub.ask(self._service.AbortUpload, request)

    def _resource(self, upload: str) -> str:
        try:
            return UploadName(self._stub.name, upload).resource
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self._stub.name}: {e}") from e


@listed("upload")
def list_uploads(
    connection: Connection, parent: str, *, on_damage: OnDamage
) -> Iterator[UploadInfo]:
    """Yields the live uploads below the resource of a run, a namespace or the store."""
    service = UploadServiceStub(connection.channel)
    found = rows(
        partial(connection.ask, service.ListUploads),
        api.ListUploadsRequest(parent=parent),
        lambda page: page.uploads,
        on_damage,
    )
    yield from map(UploadInfo.from_message, found)
