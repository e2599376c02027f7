"""The root of a store whose files this process reads and writes itself.

If the server lends the credentials for a bucket, there is none for the root itself:
each upload and each run has its own.
"""

from collections.abc import Callable
from datetime import UTC
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from storesvc.errors import InvalidFieldError
from storesvc.format.layout import STORE, RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.storage.location import GRPC_DRIVER, Storage, shows_plaintext, storage_at
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.tls import is_root
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub

if TYPE_CHECKING:
    from obstore.store import GCSCredential, S3Credential

    from storesvc_client._storage.bucket import BucketRoot
    from storesvc_client._storage.objects import Lent

Root: TypeAlias = "Path | BucketRoot"
"""A directory, or a prefix in a bucket."""


def direct_root(target: str, direct: object) -> "Root | None":
    """Returns the root whose files a client reads itself, which may be its target; None
    if it reads none."""
    if direct is None:
        return _reach_root(storage_at(target)) if is_root(target) else None
    if not isinstance(direct, str):
        raise InvalidRequestError(
            f"direct: expected the root of the store, such as file:///PATH, got "
            f"{direct!r}"
        )
    try:
        root = _reach_root(storage_at(direct))
    except InvalidFieldError as e:
        raise InvalidRequestError(f"direct: {e}") from e
    if root is None:
        raise InvalidRequestError(
            f"direct: expected a root on this machine or in a bucket, got {direct!r}; "
            "connect without direct="
        )
    return root


def check_root(root: Root, *, store_uid: str, timeout: float) -> None:
    """Checks that a root is that of the server's store.

    Raises:
        InvalidRequestError: The root is not that of the store.
        PreconditionError: The bucket denies access.
        UnavailableError: The bucket does not answer in time.
    """
    # Imported late: commands that only list checkpoints do not need it.
    from storesvc.format.seal import CorruptRecordError, FormatVersionError, unseal

    data = _record(root, store_uid, timeout)
    try:
        found = unseal(data, pb.StoreRecord, place=STORE).uid
    except (CorruptRecordError, FormatVersionError) as e:
        raise InvalidRequestError(
            f"direct: expected the record of store {store_uid} at {root}/{STORE}: {e}; "
            "connect without direct="
        ) from e
    if found != store_uid:
        raise InvalidRequestError(
            f"direct: expected the root of store {store_uid}, which the server serves, "
            f"got that of store {found} at {root}; give the root of the same store, or "
            "connect without direct="
        )


def _record(root: Root, store_uid: str, timeout: float) -> bytes:
    expected = (
        f"direct: expected the root of store {store_uid}, which the server serves"
    )
    try:
        found = (
            (root / STORE).read_bytes()
            if isinstance(root, Path)
            else root.read(STORE, timeout=timeout)
        )
    except (PreconditionError, UnavailableError) as e:  # some are OSErrors, too
        raise type(e)(
            f"{expected}: {e}, or connect without direct=", reason=e.reason
        ) from e
    except OSError as e:
        raise InvalidRequestError(
            f"{expected}, cannot read {root}/{STORE}: {e.strerror}; give its root on "
            "this machine, or connect without direct="
        ) from e
    if found is None:
        raise InvalidRequestError(
            f"{expected}, found no {root}/{STORE}; give its root, or connect without "
            "direct="
        )
    return found


def _reach_root(storage: Storage) -> "Root | None":
    """Returns the root of a storage; None if other processes cannot reach it."""
    if storage.is_remote:
        from storesvc_client._storage.bucket import BucketRoot

        return BucketRoot.open(storage)
    path = storage.spec.get("path")
    return None if path is None else Path(path)


LEND_SECONDS: Final = 40.0
"""Timeout of one call: the server waits 30 s for its provider."""


class LentBucket:
    """A bucket that this process reaches with lent credentials only. Thread-safe."""

    def __init__(self, storage: Storage, connection: Connection) -> None:
        self.storage = storage
        self._connection = connection
        self._stub = AccessServiceStub(connection.channel)

    @classmethod
    def open(cls, target: str, direct: object, connection: Connection) -> Self:
        """Opens the bucket of a root; sends no request.

        The record of the store is not read: a lent credential does not permit that.
        Each credential names the root that the server lends for.
        """
        if is_root(target):
            raise InvalidRequestError(
                "connect: lend_credentials=: expected the address of a server, which "
                f"lends, got the root {target!r}, which this process opens itself; "
                "leave it out"
            )
        if not isinstance(direct, str):
            raise InvalidRequestError(
                "connect: lend_credentials=: expected direct= with the root of the "
                f"store in a bucket, got {direct!r}"
            )
        try:
            storage = storage_at(direct)
        except InvalidFieldError as e:
            raise InvalidRequestError(f"direct: {e}") from e
        _check_lendable(storage, direct)
        if find_spec("obstore") is None:
            extra = "s3" if storage.is_s3 else "gcs"
            raise InvalidRequestError(
                f"direct: lent credentials for {storage.name} need obstore; pip "
                f"install 'storesvc[server,{extra}]', or omit lend_credentials="
            )
        return cls(storage, connection)

    def __str__(self) -> str:
        return self.storage.name

    def to_write(self, ref: upload_api.WriterRef) -> "BucketRoot":
        """Returns the root for the data files of a writer of an upload."""
        name = UploadName.from_resource(ref.upload)
        paths = RunPaths(name.run)
        return self._open_root(
            lambda: api.LendCredentialsRequest(upload=ref),
            f"{paths.pool}{paths.data_prefix(name.upload)}",
        )

    def to_read(self, run: RunName, hold: Callable[[], str]) -> "BucketRoot":
        """Returns the root for the data files of a run; `hold` returns the name of a
        hold on one of its checkpoints, for each credential, and may wait."""
        return self._open_root(
            lambda: api.LendCredentialsRequest(hold=hold()), RunPaths(run).pool
        )

    def _open_root(
        self, next_request: Callable[[], api.LendCredentialsRequest], expected: str
    ) -> "BucketRoot":
        from storesvc_client._storage.bucket import BucketRoot
        from storesvc_client._storage.objects import LentCredential, LentStore

        credential = LentCredential(lambda: self._lend(next_request(), expected))
        return BucketRoot(self.storage, LentStore(self.storage, credential))

    def _lend(self, request: api.LendCredentialsRequest, expected: str) -> "Lent":
        """Asks the server for a credential; retries transient errors.

        Raises:
            InvalidRequestError: The server lends for another root.
            StoreError: As the contract states for the call.
        """
        from storesvc_client._storage.objects import Lent

        answer = self._connection.retry(
            "LendCredentials",
            lambda: self._stub.LendCredentials(request, timeout=LEND_SECONDS),
        )
        prefix = f"{self.storage.name}/{expected}"
        if answer.prefix != prefix:
            raise InvalidRequestError(
                f"direct: expected the root of the server's store, got "
                f"{self.storage.name}: the server lends for {answer.prefix!r}, not for "
                f"{prefix!r}; give the same root as the server has"
            )
        kind = "s3" if self.storage.is_s3 else "gcs_token"
        if answer.WhichOneof("credential") != kind:
            raise UnavailableError(
                f"{self._connection.address}: expected a credential for "
                f"{self.storage.name}, got none; is the server of this release?"
            )
        secret: GCSCredential | S3Credential = {
            "token": answer.gcs_token,
            "expires_at": None,
        }
        if kind == "s3":
            secret = {
                "access_key_id": answer.s3.access_key_id,
                "secret_access_key": answer.s3.secret_access_key,
                "token": answer.s3.session_token,
                "expires_at": None,
            }
        expires = answer.expire_time.ToDatetime(UTC)
        return Lent(secret=secret, expire_seconds=expires.timestamp())


def _check_lendable(storage: Storage, direct: str) -> None:
    """Rejects a root for which no credential can be lent, or safely used."""
    # Imported late: a client that uses no bucket does not need it.
    from storesvc.storage.remote import find_endpoint

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
