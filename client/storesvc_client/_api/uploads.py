"""Uploads: checkpoints that are being written."""

from collections.abc import Iterator
from functools import partial

from storesvc.format.names import InvalidNameError, UploadName
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.paging import OnDamage, rows
from storesvc_client._rpc.run_stub import RunBase
from storesvc_client._values.resource_names import parent_resource
from storesvc_client._values.values import UploadInfo
from storesvc_client.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub


class ClientUploads:
    """Tells of the uploads of a store."""

    _connection: Connection

    def uploads(
        self, parent: str | None = None, *, on_damage: OnDamage = None
    ) -> Iterator[UploadInfo]:
        """Yields live uploads, by run and id; of a run that does not exist, none.

        Args:
            parent: A run, a namespace, or None for all. Those of a run that has no
                checkpoint yet are told, too, which is in no list of runs.
            on_damage: Called, with the error, for each one whose records are damaged;
                None raises it in its place.

        Raises:
            InvalidRequestError: The parent is none.
            DataLossError: The records of the next one are damaged.
            UnavailableError: The server does not answer, for longer than a restart
                takes.
        """
        found = rows(
            partial(self._connection.ask, _stub(self._connection).ListUploads),
            api.ListUploadsRequest(parent=parent_resource(parent)),
            lambda page: page.uploads,
            on_damage,
        )
        yield from map(UploadInfo.from_message, found)


class RunUploads(RunBase):
    """Tells of the uploads of a run, and ends them."""

    def uploads(self, *, on_damage: OnDamage = None) -> Iterator[UploadInfo]:
        """Yields the live uploads, by id; of a run that does not exist, none.

        Args:
            on_damage: Called, with the error, for each one whose records are damaged;
                None raises it in its place.

        Raises:
            DataLossError: The records of the next one are damaged.
            UnavailableError: The server does not answer, for longer than a restart
                takes.
        """
        request = api.ListUploadsRequest(parent=self._name.resource)
        method = _stub(self._connection).ListUploads
        found = self._rows(method, request, lambda page: page.uploads, on_damage)
        yield from map(UploadInfo.from_message, found)

    def upload(self, upload: str) -> UploadInfo:
        """Returns an upload, live or not; for a day at least after it ended.

        Args:
            upload: ``UploadInfo.id``, or the uid of a checkpoint, which is that of the
                upload that it was.

        Raises:
            InvalidRequestError: It is no id of an upload.
            NotFoundError: There is none.
        """
        request = api.GetUploadRequest(name=self._upload_name(upload))
        try:
            response = self._ask(_stub(self._connection).GetUpload, request)
        except ConflictError as e:  # to a writer, that it has lost its upload
            raise NotFoundError(
                f"{self.name} has no upload {upload}, or it ended days ago; list those "
                "that live",
                reason=e.reason,
                metadata=e.metadata,
            ) from e
        return UploadInfo.from_message(response.upload)

    def abort(self, upload: str) -> None:
        """Gives an upload up and frees its step: who writes it can no longer commit.
        One that is over, or does not exist, is left as it is.

        Args:
            upload: ``UploadInfo.id``.

        Raises:
            AlreadyExistsError: It is committed.
            ConflictError: It changed at the same moment.
            InvalidRequestError: It is no id of an upload.
        """
        request = api.AbortUploadRequest(name=self._upload_name(upload))
        self._ask(_stub(self._connection).AbortUpload, request)

    def _upload_name(self, upload: str) -> str:
        try:
            return UploadName(self._name, upload).resource
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self.name}: {e}") from e


def _stub(connection: Connection) -> UploadServiceStub:
    return UploadServiceStub(connection.channel)
