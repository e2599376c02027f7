"""The root of a store in a bucket, for which the server lends credentials.

There is no credential for the root itself: each upload and each run has its own.
"""

from collections.abc import Callable
from datetime import UTC
from importlib.util import find_spec
from typing import Final, Self

from storesvc.errors import InvalidFieldError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.storage.location import (
    GRPC_DRIVER,
    Storage,
    shows_plaintext,
    storage_at,
)
from storesvc.storage.remote import find_endpoint
from storesvc_client._rpc.connection import Connection
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._storage.objects import (
    GcsSecret,
    Lent,
    LentCredential,
    LentStore,
    S3Secret,
)
from storesvc_client.errors import (
    InvalidRequestError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub

LEND_SECONDS: Final = 40.0
"""Timeout of one call: the server waits 30 s for its provider."""


class LentBucket:
    """A bucket that this process reaches with lent credentials only. Thread-safe."""

    def __init__(self, storage: Storage, connection: Connection) -> None:
        self.storage = storage
        self._connection = connection
        self._stub = AccessServiceStub(connection.channel)

    @classmethod
    def open(cls, direct: object, connection: Connection) -> Self:
        """Opens the bucket of a root; sends no request.

        Args:
            direct: Value of ``direct=``.
            connection: Connection to the server that lends.

        Raises:
            InvalidRequestError: The root is not in a bucket, or a package is missing.
        """
        if not isinstance(direct, str):
            raise InvalidRequestError(
                "connect: lend_credentials=: expected direct= with the root of the "
                f"store in a bucket, got {direct!r}"
            )
        try:
            storage = storage_at(direct)
        except InvalidFieldError as e:
            raise InvalidRequestError(f"direct: {e}") from e
        _check(storage, direct)
        if find_spec("obstore") is None:
            extra = "s3" if storage.is_s3 else "gcs"
            raise InvalidRequestError(
                f"direct: lent credentials for {storage.name} need obstore; pip "
                f"install 'storesvc[server,{extra}]', or omit lend_credentials="
            )
        return cls(storage, connection)

    def __str__(self) -> str:
        return self.storage.name

    def to_write(self, ref: upload_api.WriterRef) -> BucketRoot:
        """Returns the root for the data files of a writer of an upload."""
        name = UploadName.from_resource(ref.upload)
        paths = RunPaths(name.run)
        expected = f"{paths.pool}{paths.data_prefix(name.upload)}"
        request = api.LendCredentialsRequest(upload=ref)
        return self._root(lambda: self._lent(request, expected))

    def to_read(self, run: RunName, hold: Callable[[], str]) -> BucketRoot:
        """Returns the root for the data files of a run.

        Args:
            run: The run.
            hold: Returns the name of a hold on a checkpoint of the run, for each
                credential; may wait.
        """
        expected = RunPaths(run).pool

        def lend() -> Lent:
            return self._lent(api.LendCredentialsRequest(hold=hold()), expected)

        return self._root(lend)

    def _root(self, lend: Callable[[], Lent]) -> BucketRoot:
        return BucketRoot(self.storage, LentStore(self.storage, LentCredential(lend)))

    def _lent(self, request: api.LendCredentialsRequest, expected: str) -> Lent:
        """Asks the server for a credential; retries transient errors.

        Raises:
            InvalidRequestError: The server lends for another root.
            StoreError: As the contract states for the call.
        """
        for attempt in self._connection.attempts("LendCredentials"):
            with attempt, translate_rpc_errors(self._connection.address):
                answer = self._stub.LendCredentials(request, timeout=LEND_SECONDS)
        prefix = f"{self.storage.name}/{expected}"
        if answer.prefix != prefix:
            raise InvalidRequestError(
                f"direct: expected the root of the server's store, got "
                f"{self.storage.name}: the server lends for {answer.prefix!r}, not for "
                f"{prefix!r}; give the same root as the server has"
            )
        return Lent(
            secret=self._secret(answer),
            expire_seconds=answer.expire_time.ToDatetime(UTC).timestamp(),
        )

    def _secret(self, answer: api.LendCredentialsResponse) -> GcsSecret | S3Secret:
        kind = "s3" if self.storage.is_s3 else "gcs_token"
        if answer.WhichOneof("credential") != kind:
            raise UnavailableError(
                f"{self._connection.address}: expected a credential for "
                f"{self.storage.name}, got none; is the server of this release?"
            )
        if kind == "gcs_token":
            return GcsSecret(token=answer.gcs_token)
        return S3Secret(
            access_key_id=answer.s3.access_key_id,
            secret_access_key=answer.s3.secret_access_key,
            session_token=answer.s3.session_token,
        )


def _check(storage: Storage, direct: str) -> None:
    """Rejects a root for which no credential can be lent, or safely used."""
    if not storage.is_remote:
        raise InvalidRequestError(
            f"direct: expected a root in a bucket with lend_credentials=, got "
            f"{direct!r}; leave lend_credentials= out"
        )
    if storage.uses_grpc:
        raise InvalidRequestError(
            f"direct: expected no driver= with lend_credentials=, got {GRPC_DRIVER}; "
            "lent credentials are used over HTTP, leave driver= out"
        )
    endpoint = find_endpoint(storage)
    if endpoint and shows_plaintext(endpoint):
        raise InvalidRequestError(
            f"direct: expected endpoint=https://..., or http:// on this machine, got "
            f"{endpoint}: lent credentials would go over plaintext"
        )
