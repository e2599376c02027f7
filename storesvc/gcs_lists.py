"""Lists of buckets on Google Cloud Storage.

TensorStore's own lists are not for us: a page that is refused (400, 401, 403, 404) ends
one as if nothing followed. Who collects garbage by such a list deletes what is needed.
"""

import asyncio
import os
from typing import TYPE_CHECKING, Final, Self

from storesvc.errors import InvalidFieldError, StorageUnavailableError
from storesvc.storages import Storage

if TYPE_CHECKING:
    from google.cloud.storage import Bucket

ENDPOINT: Final = "TENSORSTORE_GCS_HTTP_URL"
TOKEN: Final = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # noqa: S105 - a name
"""What TensorStore reads from the environment: both must speak to the same storage."""

RETRY_SECONDS: Final = 30.0
"""How long a page is asked for again that fails in passing."""

TIMEOUT_SECONDS: Final = (10.0, 20.0)
"""Of one try: to connect, and between bytes of the answer."""

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)


class GcsLists:
    """The names in a bucket, below a root. Threads may share it."""

    def __init__(self, storage: Storage, bucket: "Bucket", path: str) -> None:
        self._storage = storage
        self._bucket = bucket
        self._path = path
        """What the names of the root begin with."""

    @classmethod
    async def of(cls, storage: Storage) -> Self | None:
        """Returns those of a storage, if it is a bucket there.

        Raises:
            InvalidFieldError: The packages that speak to it are not installed, or
                there are no credentials.
        """
        if storage.spec["driver"] not in ("gcs", "gcs_grpc"):
            return None
        bucket = await asyncio.to_thread(_bucket, storage)
        return cls(storage, bucket, storage.spec["path"])

    async def names(self, prefix: str, *, after: str = "") -> list[str]:
        """Returns all places that begin with a prefix, ascending.

        Args:
            prefix: What they begin with.
            after: Only those after this place.

        Raises:
            StorageUnavailableError: A page cannot be had.
        """
        return await asyncio.to_thread(self._names, prefix, after)

    async def check_bucket(self) -> None:
        """Refuses a bucket that is not there: to read from it finds nothing.

        Raises:
            InvalidFieldError: It is not.
            StorageUnavailableError: It does not answer, or lets nobody in.
        """
        from google.api_core.exceptions import NotFound

        try:
            await asyncio.to_thread(self._names, "", "", 1)
        except StorageUnavailableError as e:
            if not isinstance(e.__cause__, NotFound):
                raise
            raise InvalidFieldError(
                f"root {self._storage.name}: expected a bucket that exists, got none "
                "of this name; create it, or correct the name"
            ) from e

    def _names(self, prefix: str, after: str, at_most: int | None = None) -> list[str]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.retry import DEFAULT_RETRY
        from requests.exceptions import RequestException

        first = f"{self._path}{after}\0" if after else None
        pages = self._bucket.list_blobs(
            prefix=f"{self._path}{prefix}",
            start_offset=first,
            max_results=at_most,
            fields="items(name),nextPageToken",
            timeout=TIMEOUT_SECONDS,
            retry=DEFAULT_RETRY.with_timeout(RETRY_SECONDS),
        )
        try:
            # their order is that of UTF-8, as that of texts is
            return [blob.name.removeprefix(self._path) for blob in pages]
        except (GoogleAPIError, GoogleAuthError, RequestException) as e:
            raise _error(self._storage, prefix, e) from e


def _error(storage: Storage, prefix: str, cause: Exception) -> StorageUnavailableError:
    from google.api_core.exceptions import Forbidden, Unauthorized
    from google.auth.exceptions import GoogleAuthError

    place, told = storage.describe(prefix), str(cause).partition("\n")[0]
    if isinstance(cause, Forbidden | Unauthorized | GoogleAuthError):
        return StorageUnavailableError(
            f"{place}: the storage lets these credentials list nothing there "
            f"({told}); give them the role of an object user on {storage.name}"
        )
    return StorageUnavailableError(f"{place}: the storage failed: {told}")


def _bucket(storage: Storage) -> "Bucket":
    try:
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.storage import Client
        from google.oauth2.credentials import Credentials
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            f"root {storage.name}: a bucket needs {e.name}; pip install "
            "'storesvc[server,gcs]'"
        ) from e
    endpoint, token = os.environ.get(ENDPOINT), os.environ.get(TOKEN)
    options = {"api_endpoint": endpoint} if endpoint else None
    if token is not None:
        credentials = Credentials(token) if token else AnonymousCredentials()
        client = Client("", credentials, client_options=options)
    else:
        try:
            found, project = google.auth.default(_SCOPES)
        except DefaultCredentialsError as e:
            raise InvalidFieldError(
                f"root {storage.name}: expected Application Default Credentials, got "
                "none; run `gcloud auth application-default login`, or let the "
                "workload have an identity"
            ) from e
        client = Client(project or "", found, client_options=options)
    return client.bucket(storage.spec["bucket"])
