"""Google's own client of a bucket, and whose credentials it shows.

Both clients, this one and TensorStore, look for credentials by themselves, in the same
places: the file that GOOGLE_APPLICATION_CREDENTIALS names, gcloud's own, the metadata
server of the machine or pod (workload identity). Where there are none TensorStore goes
on as nobody, silently, so this one is asked first.
"""

import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from storesvc.errors import InvalidFieldError
from storesvc.storage.location import GCS_DRIVERS, GRPC_DRIVER, JSON_DRIVER, Storage

if TYPE_CHECKING:
    from google.auth.transport import Request
    from google.cloud.storage import Bucket

FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"

ENDPOINT: Final = "TENSORSTORE_GCS_HTTP_URL"
TOKEN: Final = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # noqa: S105 - a name
"""What TensorStore reads from the environment: both must speak to the same storage."""

SEARCH_SECONDS: Final = 5.0
"""How long a metadata server may take to show that it is there. One that is not may
look like one that is slow."""

_LOOPBACK: Final = ("localhost", "::1")

_opening: Final = threading.Lock()

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)


def bucket_of(storage: Storage) -> "Bucket":
    """Returns the bucket of a storage; asks it nothing.

    Raises:
        InvalidFieldError: The packages that speak to it are not installed, or there
            are no credentials, or none in the file that the environment names.
    """
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud.storage import Client
        from google.oauth2.credentials import Credentials
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            f"root {storage.name}: a bucket needs {e.name}; pip install "
            "'storesvc[server,gcs]'"
        ) from e
    endpoint, token = endpoint_of(storage), os.environ.get(TOKEN)
    if storage.spec["driver"] == GRPC_DRIVER and endpoint is None:
        token = None  # Google's own storage takes none of it
    _check_plaintext(storage, endpoint, token)
    options = {"api_endpoint": endpoint} if endpoint else None
    if token is not None:
        credentials = Credentials(token) if token else AnonymousCredentials()
        client = Client("", credentials, client_options=options)
    else:
        try:
            found, project = _credentials(storage)
        except InvalidFieldError:
            if storage.endpoint is None or os.environ.get(FILE):
                raise
            found, project = AnonymousCredentials(), ""  # as emulators have it
        client = Client(project or "", found, client_options=options)
    return client.bucket(storage.spec["bucket"])


def endpoint_of(storage: Storage) -> str | None:
    """Returns the URL of the JSON API of a storage; None: Google's own.

    The option of the root comes before the environment.
    """
    if storage.spec["driver"] not in GCS_DRIVERS:
        return storage.endpoint
    endpoint = storage.endpoint or os.environ.get(ENDPOINT)
    is_grpc = storage.spec["driver"] == GRPC_DRIVER
    if is_grpc and bool(endpoint) is not ("endpoint" in storage.spec):
        raise InvalidFieldError(
            f"root {storage.name}: with driver={GRPC_DRIVER}, expected both endpoint= "
            "(of the JSON API, for lists) and grpc_endpoint=, or neither and no "
            f"{ENDPOINT} in the environment, got one of them; give both, or none"
        )
    return endpoint


@contextmanager
def endpoint_in_environment(storage: Storage) -> Generator[None]:
    """Has TensorStore open a bucket at the endpoint of its root inside.

    Its JSON driver has no such option, and reads the endpoint from the environment
    whenever it opens a bucket (seen in 0.1.86), in the call itself.
    """
    if storage.spec["driver"] != JSON_DRIVER:
        yield
        return
    with _opening:
        before = os.environ.get(ENDPOINT)
        if storage.endpoint is not None:
            os.environ[ENDPOINT] = storage.endpoint
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(ENDPOINT, None)
            else:
                os.environ[ENDPOINT] = before


def _check_plaintext(storage: Storage, endpoint: str | None, token: str | None) -> None:
    """Refuses to show credentials over plaintext to another machine."""
    if endpoint is None or token is not None:
        return
    url = urlsplit(endpoint)
    host = url.hostname or ""
    if url.scheme == "http" and host not in _LOOPBACK and not host.startswith("127."):
        raise InvalidFieldError(
            f"root {storage.name}: expected endpoint=https://..., or http:// on this "
            f"machine, got {endpoint}: credentials would go over plaintext; use https, "
            f"or set {TOKEN} to what may be shown (empty: nothing)"
        )


def _credentials(storage: Storage) -> tuple[Any, str | None]:
    """Application Default Credentials, and the project that they are of."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        return google.auth.default(_SCOPES, request=_searching())
    # the others come of a file that cannot be read, or holds other JSON
    except (DefaultCredentialsError, OSError, AttributeError) as e:
        if file := os.environ.get(FILE):
            raise InvalidFieldError(
                f"root {storage.name}: expected credentials in the file that {FILE} "
                f"names, got {file} ({_fault(file)}); correct one of them, or unset "
                "the variable"
            ) from e
        raise InvalidFieldError(
            f"root {storage.name}: expected Application Default Credentials, got none; "
            "run `gcloud auth application-default login`, or let the workload have an "
            "identity"
        ) from e


def _fault(file: str) -> str:
    """What is wrong with a file of credentials; tells nothing that it holds."""
    try:
        json.loads(Path(file).read_bytes())
    except OSError as e:
        return e.strerror or str(e)
    except ValueError:
        return "it is no JSON"
    return "it is JSON, and not of whole credentials"


def _searching() -> "Request":
    """Asks the metadata server, until the time for that is over."""
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import Request

    until = time.monotonic() + SEARCH_SECONDS

    class Searching(Request):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            left = until - time.monotonic()
            if left <= 0:
                raise DefaultCredentialsError("no metadata server answers")
            kwargs["timeout"] = min(left, kwargs.get("timeout") or left)
            return super().__call__(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Searching()
