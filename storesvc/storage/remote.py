"""Makes the calls of GCS and S3 that are not safe with TensorStore.

Google Cloud Storage is listed with Google's own client and its credentials.
TensorStore's lists cannot be used, because a page that fails with 400, 401, 403 or 404
ends a list as if nothing followed: by such a list, a collector would delete data in
use.

Both clients, this one and TensorStore, search for credentials in the same places: the
file that GOOGLE_APPLICATION_CREDENTIALS names, gcloud's own, the metadata server of the
machine or pod (workload identity). Without any, TensorStore silently continues as an
anonymous caller, so this client is opened first.

On S3, TensorStore reads an object's version and then deletes the object without a
condition: a slot that another process has taken in between would lose its checkpoint.
S3 itself checks If-Match on DELETE; this module sends that request, which obstore
signs. Through obstore it reads the sizes of objects, too.
"""

import asyncio
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar

from storesvc.errors import InvalidFieldError, StorageUnavailableError, StoreError
from storesvc.storage.bucket import (
    Generation,
    PreconditionError,
    denied_error,
    failure_error,
    is_unauthenticated,
    no_bucket,
    translate_errors,
    unauthenticated_error,
)
from storesvc.storage.location import GRPC_DRIVER, Storage, shows_plaintext
from storesvc.storage.requests import (
    answer,
    retrieve_error,
    run_in_daemon_thread,
    send,
    shared_window,
)
from storesvc.storage.throttle import Outcome

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport import Request
    from google.cloud.storage import Bucket
    from obstore import ObjectMeta
    from obstore.store import S3Store

DELETE_TIMEOUT_SECONDS: Final = 4.0
"""Timeout of one attempt: `send` makes several."""

AT_ONCE: Final = 32
"""Maximum concurrent calls, each of which blocks a thread."""

_SEARCH: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
_CLIENT: Final = {"connect_timeout": "2s", "timeout": "5s"}

_SIGNED_FOR: Final = timedelta(minutes=5)

_KIND: Final = b"\0"
"""TensorStore's generations begin with a byte for their kind; then follow the ETag of
S3, or the 8 bytes of Google's number, the lowest first."""

_SHOWN_FIELDS: Final = ("Code", "Message")
_MAX_ERROR_BYTES: Final = 1 << 16

T = TypeVar("T")


class S3Deletes:
    """Deletes objects of a bucket below a root. Thread-safe."""

    def __init__(self, storage: Storage, store: "S3Store") -> None:
        self._storage = storage
        self._store = store
        self._slots = asyncio.Semaphore(AT_ONCE)

    @classmethod
    async def for_storage(cls, storage: Storage) -> Self:
        """Returns the deletions of a storage on S3; sends no request to it."""
        try:
            from obstore.store import S3Store
        except ModuleNotFoundError as e:
            raise InvalidFieldError(
                f"root {storage.name}: a bucket on S3 needs {e.name}; pip install "
                "'storesvc[server,s3]'"
            ) from e
        # obstore sends requests only to search for credentials.
        client: dict[str, Any] = dict(_CLIENT)
        options: dict[str, Any] = {"retry_config": _SEARCH, "client_options": client}
        if "endpoint" in storage.spec:
            options["endpoint"] = storage.spec["endpoint"]
            client["allow_http"] = True
        if "aws_region" in storage.spec:
            options["region"] = storage.spec["aws_region"]
        deletes = cls(storage, S3Store(storage.spec["bucket"], **options))
        try:
            await answer(storage, run_in_daemon_thread(deletes._sign_url, ""))
        except _UnsignedError as e:
            raise InvalidFieldError(
                f"root {storage.name}: expected credentials of S3, got none ({e}); set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the workload an "
                "identity"
            ) from e
        return deletes

    async def delete(self, path: str, generation: Generation) -> None:
        """Deletes an object, if it still has that generation.

        Raises:
            PreconditionError: It has another generation, or is absent.
            StorageDeniedError: The storage rejects the credentials, or denies the
                deletion.
            StorageUnavailableError: The storage failed, or does not answer.
        """
        ask = partial(run_in_daemon_thread, self._try, path, generation)
        if not await answer(self._storage, self._send(ask)):
            raise PreconditionError(path)

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of objects in a folder by path; raises as ``versions``."""
        found = await self._list_all(prefix)
        return {path: one["size"] for path, one in found.items()}

    async def versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        """Returns the generations of the objects that begin with a prefix, by path.

        Args:
            limit: Returns at most so many, the first ones; None: all.

        Raises:
            StorageUnavailableError: The storage failed, or does not answer.
        """
        found = await self._list_all(prefix, after, limit)
        return {
            path: Generation(_KIND + (one["e_tag"] or "").encode())
            for path, one in found.items()
        }

    async def _list_all(
        self, prefix: str, after: str = "", limit: int | None = None
    ) -> dict[str, "ObjectMeta"]:
        ask = partial(run_in_daemon_thread, self._list, prefix, after, limit)
        return await answer(self._storage, self._send(ask))

    def _list(
        self, prefix: str, after: str, limit: int | None
    ) -> "dict[str, ObjectMeta]":
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError

        root = self._storage.spec["path"]
        offset = f"{root}{after}" if after else None
        pages = obstore.list(self._store, f"{root}{prefix}", offset=offset)
        try:
            return {
                one["path"].removeprefix(root): one
                for one in islice(chain.from_iterable(pages), limit)
            }
        except BaseError as e:
            is_denied = isinstance(e, PermissionDeniedError)
            raise (denied_error if is_denied else failure_error)(
                self._storage, prefix, str(e).partition("\n")[0]
            ) from e

    async def _send(self, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await send(shared_window(self._storage), ask)

    def _try(self, path: str, generation: Generation) -> bool:
        try:
            url = self._sign_url(path)
        except _UnsignedError as e:
            raise unauthenticated_error(self._storage, path, str(e)) from e
        etag = generation.removeprefix(_KIND).decode()
        request = urllib.request.Request(  # noqa: S310 - of an endpoint over HTTP
            url, method="DELETE", headers={"If-Match": etag}
        )
        try:
            with urllib.request.urlopen(request, timeout=DELETE_TIMEOUT_SECONDS):  # noqa: S310
                return True
        except urllib.error.HTTPError as e:
            if e.code in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.NOT_FOUND):
                return False
            raise self._error(path, e) from e
        except (OSError, http.client.HTTPException) as e:
            broken = OSError(f"HTTP error: {e}")
            raise failure_error(self._storage, path, str(e)) from broken

    def _sign_url(self, path: str) -> str:
        import obstore
        from obstore.exceptions import BaseError

        key = f"{self._storage.spec['path']}{path}"
        try:
            return obstore.sign(self._store, "DELETE", key, _SIGNED_FOR)
        except BaseError as e:
            raise _UnsignedError(str(e).partition("\n")[0]) from e

    def _error(self, path: str, cause: urllib.error.HTTPError) -> Exception:
        reason = _reason_s3(cause)
        if cause.code == HTTPStatus.UNAUTHORIZED or is_unauthenticated(reason):
            return unauthenticated_error(self._storage, path, reason)
        if cause.code == HTTPStatus.FORBIDDEN:
            return denied_error(self._storage, path, reason)
        return failure_error(self._storage, path, reason)


def _reason_s3(cause: urllib.error.HTTPError) -> str:
    """The code and message of a response, formatted as TensorStore does."""
    with suppress(OSError, http.client.HTTPException):
        text = cause.read(_MAX_ERROR_BYTES).decode(errors="replace")
        found = [re.search(f"<{kind}>(.*?)</{kind}>", text) for kind in _SHOWN_FIELDS]
        if words := [match[1] for match in found if match]:
            return ": ".join(words)
    return f"{cause.code} {cause.reason}"


class _UnsignedError(Exception):
    """There are no credentials to sign with."""


CREDENTIALS_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"

ENDPOINT: Final = "TENSORSTORE_GCS_HTTP_URL"
TOKEN: Final = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # noqa: S105 - a name
"""Environment variables of TensorStore; both clients must reach the same storage."""

SEARCH_SECONDS: Final = 5.0
"""Maximum time for a response of a metadata server. An absent one can look like a slow
one."""

TIMEOUT_SECONDS: Final = (10.0, 20.0)
"""Timeouts of one attempt: to connect, and between bytes of the response."""

MAX_EMPTY_PAGES: Final = 1000
"""Consecutive pages without a name after which a list counts as endless."""

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)

_REPEATED: Final = "a page of its list repeats names of the previous page"
_ENDLESS: Final = f"its list has {MAX_EMPTY_PAGES} consecutive empty pages"

_Field: TypeAlias = Literal["size", "generation"]
"""Field of an object that a list has, as well as its name."""

_environment_lock: Final = threading.RLock()


class GcsLists:
    """Lists the objects of a bucket below a root. Thread-safe."""

    def __init__(self, storage: Storage, bucket: "Bucket", path: str) -> None:
        self._storage = storage
        self._bucket = bucket
        self._path = path
        """Beginning of all names below the root."""
        self._probing: asyncio.Task[None] | None = None

    @classmethod
    async def for_storage(cls, storage: Storage) -> Self:
        """Returns the lists of the bucket of a storage; sends no request to it.

        Raises:
            InvalidFieldError: The client's packages are not installed, or there are no
                credentials.
        """
        bucket = await run_in_daemon_thread(make_bucket, storage)
        return cls(storage, bucket, storage.spec["path"])

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of all objects by path; raises as ``versions``."""
        return await self._list(prefix, "", None, "size")

    async def versions(
        self, prefix: str, after: str, limit: int | None
    ) -> dict[str, Generation]:
        """Returns the generations of all objects by path, ascending, or of the first
        ones.

        Raises:
            StorageDeniedError: The storage rejects the credentials or denies the list.
            StorageUnavailableError: A page cannot be read.
        """
        found = await self._list(prefix, after, limit, "generation")
        return {
            path: Generation(_KIND + number.to_bytes(8, "little"))
            for path, number in found.items()
        }

    async def _list(
        self, prefix: str, after: str, limit: int | None, field: _Field
    ) -> dict[str, int]:
        found: dict[str, int] = {}
        last, pages = "", self._pages(prefix, after, limit, field)
        with translate_errors(self._storage, prefix):
            # GCS orders names by their UTF-8, which is the order of Python's str.
            while page := await self._page(pages, prefix):
                if found and next(iter(page)) <= last:
                    raise failure_error(self._storage, prefix, _REPEATED)
                found |= page
                last = next(reversed(page))
        return found

    async def first_names(self, limit: int) -> list[str]:
        """Returns the names of up to `limit` objects, with one request."""
        with translate_errors(self._storage, ""):
            return [*await self._page(self._pages("", "", limit, "size"), "")]

    async def probe(self) -> None:
        """Asks whether the bucket answers, after a rejection; once for all that wait.
        The window waits as long as the response asks for: the other clients do not
        show ``Retry-After``."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(retrieve_error)
        await asyncio.shield(self._probing)

    async def _probe(self) -> None:
        with translate_errors(self._storage, ""):
            pages = self._pages("", "", 1, "size")
            await self._page(pages, "", answered=Outcome.PROBED)

    async def check_bucket(self) -> None:
        """Rejects a bucket that does not exist: reads from it would find nothing."""
        from google.api_core.exceptions import NotFound

        try:
            await self.first_names(1)
        except StorageUnavailableError as e:
            if not isinstance(e.__cause__, NotFound):
                raise
            raise no_bucket(self._storage) from e

    async def _page(
        self, pages: "_Pages", prefix: str, *, answered: Outcome = Outcome.ANSWERED
    ) -> dict[str, int]:
        """The names of the next page, with their field; empty after the last one."""
        ask = partial(run_in_daemon_thread, self._next, pages, prefix)
        page = send(shared_window(self._storage), ask, answered=answered)
        return await answer(self._storage, page)

    def _pages(
        self, prefix: str, after: str, at_most: int | None, field: _Field
    ) -> "_Pages":
        """The pages of a list; each step sends one request."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return _Pages(
            partial(
                self._bucket.list_blobs,
                prefix=f"{self._path}{prefix}",
                start_offset=f"{self._path}{after}\0" if after else None,
                fields=f"items(name,{field}),nextPageToken",
                timeout=TIMEOUT_SECONDS,
                retry=DEFAULT_RETRY.with_timeout(0.0),  # marks transient errors
            ),
            at_most,
            field,
        )

    def _next(self, pages: "_Pages", prefix: str) -> dict[str, int]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            # An empty page need not be the last one.
            for number, page in enumerate(iter(pages.step, None)):
                if found := {
                    blob.name.removeprefix(self._path): getattr(blob, pages.field) or 0
                    for blob in page
                }:
                    return found
                if number >= MAX_EMPTY_PAGES:
                    raise failure_error(self._storage, prefix, _ENDLESS)
        except (GoogleAPIError, GoogleAuthError, RequestException) as e:
            raise _list_error(self._storage, prefix, e) from e
        return {}


class _Pages:
    """A position in a list. A step that failed may be repeated, unlike that of an
    iterator of Google's client, which would end."""

    def __init__(
        self, begin: Callable[..., Any], at_most: int | None, field: _Field
    ) -> None:
        self.field = field
        self._begin = begin
        self._left = at_most
        self._token: str | None = ""

    def step(self) -> Any:
        """Returns the next page; None after the last one."""
        if self._token is None or self._left == 0:
            return None
        rest = self._begin(page_token=self._token or None, max_results=self._left)
        page = next(rest.pages, None)
        self._token = rest.next_page_token
        if self._left is not None and page is not None:
            self._left -= page.num_items
        return page


def make_bucket(storage: Storage) -> "Bucket":
    """Returns the client's bucket of a storage; sends no request to it.

    Raises:
        InvalidFieldError: The client's packages are not installed, or there are no
            credentials, or none in the file that the environment names.
    """
    try:
        from google.cloud.storage import Client
    except ModuleNotFoundError as e:
        raise _missing_package(storage, e) from e
    found, project = own_credentials(storage)
    endpoint = find_endpoint(storage)
    options = {"api_endpoint": endpoint} if endpoint else None
    client = Client(project, found, client_options=options)
    return client.bucket(storage.spec["bucket"], user_project=storage.user_project)


def own_credentials(storage: Storage) -> tuple["Credentials", str]:
    """Returns the credentials of this process for a storage, which may be anonymous,
    and their project.

    Raises:
        InvalidFieldError: There are none, or packages are missing; or they would be
            sent over plaintext.
    """
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.oauth2.credentials import Credentials
    except ModuleNotFoundError as e:
        raise _missing_package(storage, e) from e
    endpoint, token = find_endpoint(storage), os.environ.get(TOKEN)
    if storage.uses_grpc and endpoint is None:
        token = None  # Google's own storage accepts no such token over gRPC
    if endpoint and token is None and shows_plaintext(endpoint):
        raise InvalidFieldError(
            f"root {storage.name}: expected endpoint=https://..., or http:// on this "
            f"machine, got {endpoint}: credentials would go over plaintext; use https, "
            f"or set {TOKEN} to a token that may be sent (empty: none)"
        )
    if token is not None:
        return Credentials(token) if token else AnonymousCredentials(), ""
    try:
        found, project = _credentials(storage)
    except InvalidFieldError:
        if storage.endpoint is None or os.environ.get(CREDENTIALS_FILE):
            raise
        return AnonymousCredentials(), ""  # emulators need none
    return found, project or ""


def _missing_package(storage: Storage, e: ModuleNotFoundError) -> InvalidFieldError:
    return InvalidFieldError(
        f"root {storage.name}: a bucket needs {e.name}; pip install "
        "'storesvc[server,gcs]'"
    )


def find_endpoint(storage: Storage) -> str | None:
    """Returns the URL of the JSON API of a storage; None for Google's own.

    The option of the root takes precedence over the environment.
    """
    if not storage.is_gcs:
        return storage.endpoint
    endpoint = storage.endpoint
    if endpoint is None:
        with _environment_lock:  # which may have the endpoint of another root
            endpoint = os.environ.get(ENDPOINT)
    if storage.uses_grpc and bool(endpoint) is not ("endpoint" in storage.spec):
        raise InvalidFieldError(
            f"root {storage.name}: with driver={GRPC_DRIVER}, expected both endpoint= "
            "(of the JSON API, for lists) and grpc_endpoint=, or neither and no "
            f"{ENDPOINT} in the environment, got one of them; give both, or none"
        )
    return endpoint


@contextmanager
def endpoint_in_environment(storage: Storage) -> Generator[None]:
    """Sets the endpoint of a root in the environment while TensorStore opens it.

    TensorStore's JSON driver has no option for it, and reads the environment on each
    open, within the call itself (seen in 0.1.86).
    """
    if not storage.is_gcs or storage.uses_grpc:
        yield
        return
    with _environment_lock:
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


def source_credentials(storage: Storage, scopes: Sequence[str]) -> "Credentials":
    """Returns the credentials of this process for a storage, with other scopes.

    Raises:
        InvalidFieldError: There are no credentials, or packages are missing.
    """
    try:
        from google.oauth2.credentials import Credentials
    except ModuleNotFoundError as e:
        raise _missing_package(storage, e) from e
    token = os.environ.get(TOKEN)
    if token:
        return Credentials(token)
    found: Credentials = _credentials(storage, scopes)[0]
    return found


def _credentials(
    storage: Storage, scopes: Sequence[str] = _SCOPES
) -> tuple[Any, str | None]:
    """Application Default Credentials, and their project."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        return google.auth.default(scopes, request=_bounded_search())
    # OSError and AttributeError: the file is unreadable, or holds other JSON.
    except (DefaultCredentialsError, OSError, AttributeError) as e:
        if file := os.environ.get(CREDENTIALS_FILE):
            raise InvalidFieldError(
                f"root {storage.name}: expected credentials in the file that "
                f"{CREDENTIALS_FILE} names, got {file} ({_file_fault(file)}); correct "
                "one of them, or unset the variable"
            ) from e
        raise InvalidFieldError(
            f"root {storage.name}: expected Application Default Credentials, got none; "
            "run `gcloud auth application-default login`, or give the workload an "
            "identity"
        ) from e


def _file_fault(file: str) -> str:
    """Describes the fault of a file of credentials, without any of its contents."""
    try:
        json.loads(Path(file).read_bytes())
    except OSError as e:
        return e.strerror or str(e)
    except ValueError:
        return "it is no JSON"
    return "it is JSON, and not of whole credentials"


def _bounded_search() -> "Request":
    """A transport for the metadata server that stops at a deadline."""
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import Request

    until = time.monotonic() + SEARCH_SECONDS

    class BoundedRequest(Request):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            left = until - time.monotonic()
            if left <= 0:
                raise DefaultCredentialsError("no metadata server answers")
            kwargs["timeout"] = min(left, kwargs.get("timeout") or left)
            return super().__call__(*args, **kwargs)  # type: ignore[no-untyped-call]

    return BoundedRequest()


def _list_error(storage: Storage, prefix: str, cause: Exception) -> StoreError:
    from google.api_core.exceptions import Forbidden, RetryError, Unauthorized
    from google.auth.exceptions import GoogleAuthError

    if isinstance(cause, RetryError) and cause.cause is not None:
        cause = cause.cause  # the RetryError itself has only the elapsed time
    reason = _reason(cause)
    is_about_tokens = isinstance(cause, GoogleAuthError) and not _is_transient(cause)
    if is_about_tokens or isinstance(cause, Unauthorized):
        return unauthenticated_error(storage, prefix, reason)
    if isinstance(cause, Forbidden):
        return denied_error(storage, prefix, reason)
    return failure_error(storage, prefix, reason)


def _is_transient(cause: "GoogleAuthError") -> bool:
    """Returns whether the token server did not answer, rather than reject a request."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    while cause.args and isinstance(cause.args[0], GoogleAuthError):
        cause = cause.args[0]
    # A second argument would be the response.
    is_unanswered = isinstance(cause, TransportError) and len(cause.args) == 1
    return cause.retryable or is_unanswered


def _reason(cause: object) -> str:
    """The message of an error, without the data that comes with it."""
    from google.api_core.exceptions import GoogleAPICallError

    if isinstance(cause, GoogleAPICallError) and cause.errors:
        return str(cause.errors[0].get("message", cause))
    while isinstance(cause, Exception) and cause.args:
        cause = cause.args[0]
    return str(cause).partition("\n")[0]
