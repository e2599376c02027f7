"""Reads and creates objects with the credentials of this process.

TensorStore reads. It copies what it writes twice, so obstore creates the objects if it
can do so with the same credentials, and TensorStore writes them otherwise:

- obstore, or the package that finds the credentials, is not installed;
- the driver is `gcs_grpc`, which obstore does not have;
- the region of a bucket on S3 is not given, which TensorStore requests;
- no credentials are found: what TensorStore does then is unchanged;
- the path of the root has empty parts, which obstore has no name for.

An `OwnStore` has the two methods of TensorStore's key-value store that `BucketRoot`
calls. The search for credentials begins with the first write, and may take seconds.
"""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from storesvc.errors import InvalidFieldError
from storesvc.format.checksums import Buffer
from storesvc.storage.bucket import denied, failed, unauthenticated
from storesvc.storage.gcs import endpoint_of, own_credentials
from storesvc.storage.location import JSON_DRIVER, S3_DRIVER, Storage
from storesvc_client._storage.object_requests import (
    PAUSES,
    create,
    gcs_objects,
    is_rejected,
    reason_of,
    s3_objects,
    started,
)

if TYPE_CHECKING:
    import tensorstore as ts
    from botocore.credentials import Credentials as S3Credentials
    from google.auth.credentials import Credentials as GcsCredentials
    from google.auth.transport import Request
    from obstore.store import (
        GCSCredential,
        GCSCredentialProvider,
        GCSStore,
        S3Credential,
        S3CredentialProvider,
        S3Store,
    )

KEPT_KEYS: Final = timedelta(minutes=10)
"""Time for which temporary keys of S3 are used before they are requested again;
botocore renews them at least as long before their end."""


class OwnStore:
    """Objects below the root of a store, reached with the credentials of this process.
    Thread-safe."""

    def __init__(self, storage: Storage, kvstore: "ts.KvStore") -> None:
        """Creates it; sends no request.

        Args:
            storage: The storage.
            kvstore: The same objects as TensorStore has them.
        """
        self._storage = storage
        self._kvstore = kvstore
        self._opening = threading.Lock()
        self._is_opened = False
        self._objects: GCSStore | S3Store | None = None

    # ``Any`` stands for a future of TensorStore.
    def read(self, path: str, *, byte_range: slice | None = None) -> Any:
        """Starts a read of an object, or of bytes of it."""
        if byte_range is None:
            return self._kvstore.read(path)
        return self._kvstore.read(path, byte_range=byte_range)

    def write(self, path: str, data: Sequence[Buffer]) -> Any:
        """Starts the creation of an object."""
        objects = self._opened()
        if objects is None:
            return self._kvstore.write(path, b"".join(data))
        return started(self._create(objects, path, data))

    @property
    def copies_writes(self) -> bool:
        """True if an object that is being written is in memory several times."""
        return self._opened() is None

    def _opened(self) -> "GCSStore | S3Store | None":
        with self._opening:
            if not self._is_opened:
                self._objects = _objects_of(self._storage)
                self._is_opened = True
            return self._objects

    async def _create(
        self, objects: "GCSStore | S3Store", path: str, data: Sequence[Buffer]
    ) -> None:
        import obstore
        from obstore.exceptions import BaseError

        key = f"{self._storage.spec['path']}{path}"

        async def is_stored() -> bool | None:
            try:
                found = await obstore.get_async(objects, key)
                content = memoryview(await found.bytes_async())
            except (BaseError, FileNotFoundError):
                return None
            return _is_joined(content, data)

        try:
            await create(objects, key, data, is_stored)
        except BaseError as e:
            raise self._error(path, e) from e

    def _error(self, path: str, cause: Exception) -> Exception:
        from obstore.exceptions import PermissionDeniedError

        reason = reason_of(cause)
        if isinstance(cause, PermissionDeniedError):
            return denied(self._storage, path, reason)
        if is_rejected(cause):
            return unauthenticated(self._storage, path, reason)
        return failed(self._storage, path, reason)


def _is_joined(content: memoryview, parts: Sequence[Buffer]) -> bool:
    """Returns whether a content is that of parts, one after another."""
    start = 0
    for part in parts:
        end = start + len(part)
        if content[start:end] != memoryview(part):
            return False
        start = end
    return start == len(content)


def _objects_of(storage: Storage) -> "GCSStore | S3Store | None":
    """Returns obstore's client of a bucket; None: TensorStore must write."""
    spec = storage.spec
    parts = spec["path"].rstrip("/").split("/") if spec["path"] else []
    if find_spec("obstore") is None or not {"", ".", ".."}.isdisjoint(parts):
        return None
    if spec["driver"] == JSON_DRIVER:
        return _gcs_objects(storage)
    if spec["driver"] == S3_DRIVER and "aws_region" in spec:
        return _s3_objects(storage)
    return None


def _gcs_objects(storage: Storage) -> "GCSStore | None":
    try:
        found = own_credentials(storage)
    except InvalidFieldError:
        return None
    from google.auth.credentials import AnonymousCredentials

    if not isinstance(found, AnonymousCredentials):
        return gcs_objects(storage, _gcs_provider(found))
    # obstore sends a token in any case; only emulators accept an empty one.
    nothing: GCSCredential = {"token": "", "expires_at": None}
    return gcs_objects(storage, lambda: nothing) if endpoint_of(storage) else None


def _gcs_provider(credentials: "GcsCredentials") -> "GCSCredentialProvider":
    """Returns a function that returns a valid token; it renews one that expires."""
    from google.auth.transport.requests import Request

    request, renewing = Request(), threading.Lock()

    def token() -> "GCSCredential":
        with renewing:
            if not credentials.valid:
                _refresh(credentials, request)
            expiry = credentials.expiry  # in UTC, without a time zone
            return {
                "token": str(credentials.token),
                "expires_at": expiry and expiry.replace(tzinfo=UTC),
            }

    return token


def _refresh(credentials: "GcsCredentials", request: "Request") -> None:
    """Renews credentials; retries, since obstore takes any error for a rejection."""
    from google.auth.exceptions import GoogleAuthError

    for pause in PAUSES:
        try:
            credentials.refresh(request)
        except GoogleAuthError as e:
            if not e.retryable:
                raise
            time.sleep(pause)
        else:
            return
    credentials.refresh(request)


def _s3_objects(storage: Storage) -> "S3Store | None":
    if find_spec("botocore") is None:
        return None
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    try:
        found = get_session().get_credentials()
    except BotoCoreError:  # a profile that does not exist, a malformed file
        return None
    return None if found is None else s3_objects(storage, _s3_provider(found))


def _s3_provider(credentials: "S3Credentials") -> "S3CredentialProvider":
    """Returns a function that returns valid keys; botocore renews those that expire."""

    def keys() -> "S3Credential":
        found = credentials.get_frozen_credentials()
        is_temporary = found.token is not None
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + KEPT_KEYS if is_temporary else None,
        }

    return keys
