"""Reads and creates objects in a bucket: with the credentials of this process, or with
credentials that the server lends.

`OwnStore` and `LentStore` have the two methods that `BucketRoot` calls; each sends one
request. obstore takes any credentials, and sends the buffer that it is given;
TensorStore takes credentials from the process only, one for all, and copies what it
writes twice. An object is created, never replaced: what exists already was written by
an earlier attempt of the same request, because its name is random.

With the credentials of this process, TensorStore reads. obstore creates the objects if
it can do so with the same credentials, and TensorStore writes them otherwise:

- obstore, or the package that finds the credentials, is not installed;
- the driver is `gcs_grpc`, which obstore does not have;
- the region of a bucket on S3 is not given, which TensorStore requests;
- no credentials are found: what TensorStore does then is unchanged;
- the path of the root has empty parts, which obstore has no name for.

The search for credentials begins with the first write, and may take seconds.

Lent credentials are renewed before they expire. All requests run on one event loop, so
concurrent ones share a renewal. At ``RENEWED_AT`` of its life a credential is renewed
in the background, while requests still use the old one; they wait only for the first
credential, for one that replaces an expired one, and for one that replaces a rejected
one: a request that the storage rejects (401, 403) is sent once more, with another
credential.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from storesvc.errors import InvalidFieldError, StorageDeniedError
from storesvc.format.checksums import Buffer
from storesvc.storage.bucket import denied_error, failure_error, unauthenticated_error
from storesvc.storage.location import Storage
from storesvc.storage.remote import find_endpoint, own_credentials
from storesvc.storage.requests import await_future, run_in_daemon_thread
from storesvc.storage.throttle import classify
from storesvc_client.errors import StoreError

if TYPE_CHECKING:
    import tensorstore as ts
    from google.auth.credentials import Credentials as GcsCredentials
    from google.auth.transport import Request
    from obstore import GetOptions
    from obstore.store import (
        ClientConfig,
        GCSCredential,
        GCSCredentialProvider,
        GCSStore,
        RetryConfig,
        S3Credential,
        S3CredentialProvider,
        S3Store,
    )

    Objects: TypeAlias = GCSStore | S3Store

RENEWED_AT: Final = 0.8
"""Share of its life after which a credential is renewed."""

LEAST_LIFE_SECONDS: Final = 1.0
"""Life of a credential that has expired by this machine's clock, which may be wrong."""

PAUSE_SECONDS: Final = 5.0
"""Pause after a renewal that failed while the credential is still valid."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lent:
    """A credential; each is another one."""

    secret: "GCSCredential | S3Credential" = field(repr=False)
    """An access token for Google Cloud Storage, or temporary keys for S3."""
    expire_seconds: float
    """When it expires, in seconds of the epoch."""


class LentCredential:
    """The credential in use for one upload or one run. For one event loop."""

    def __init__(
        self, lend: Callable[[], Lent], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Creates it; nothing is lent yet. `lend` asks the server for another
        credential, and blocks."""
        self._lend = lend
        self._clock = clock
        self._lent: Lent | None = None
        self._due = self._end = 0.0
        self._renewing: asyncio.Task[Lent] | None = None

    async def current(self) -> Lent:
        """Returns a credential that is valid now, as far as this machine knows.

        Raises:
            StoreError: The server lends none.
        """
        now = self._clock()
        if self._lent is None or now >= self._end:
            return await self._renew_lent()
        if now >= self._due:
            self._start()
        return self._lent

    async def replace_rejected(self, rejected: Lent) -> Lent:
        """Returns another credential than one that the storage has rejected.

        Raises:
            StoreError: The server lends none.
        """
        if self._lent is not None and self._lent is not rejected:
            return self._lent
        return await self._renew_lent()

    async def _renew_lent(self) -> Lent:
        # a request that is dropped must not end the renewal of the others
        return await asyncio.shield(self._start())

    def _start(self) -> "asyncio.Task[Lent]":
        """Returns the renewal in progress; begins one if there is none."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
            self._renewing.add_done_callback(self._on_ended)
        return self._renewing

    async def _renew(self) -> Lent:
        lent = await run_in_daemon_thread(self._lend)
        now = self._clock()
        life = max(lent.expire_seconds - now, LEAST_LIFE_SECONDS)
        self._lent, self._due, self._end = lent, now + RENEWED_AT * life, now + life
        return lent

    def _on_ended(self, renewing: "asyncio.Task[Lent]") -> None:
        self._renewing = None
        if renewing.cancelled():
            return
        error = renewing.exception()  # marks it as retrieved
        if error is None:
            return
        # Others may wait for the same renewal, and raise its error.
        level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
        if self._clock() < self._end:
            self._due = self._clock() + PAUSE_SECONDS
            _log.log(level, "a lent credential is not renewed yet: %s", error)


NO_RETRIES: Final["RetryConfig"] = {
    "max_retries": 0,
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=30),
}
"""No retries of obstore's own: `BucketRoot` repeats requests."""

PAUSES: Final = (0.1, 0.4, 1.6)
"""Backoff in seconds before each retry of a renewal of Google's credentials."""

CONNECT_SECONDS: Final = timedelta(seconds=5)

REQUEST_SECONDS: Final = timedelta(hours=1)
"""Timeout of a request. The hedging of `BucketRoot` drops a late one before that."""

DEFAULT_REGION: Final = "us-east-1"

_EXPIRED: Final = ("ExpiredToken", "InvalidToken")
"""Codes of S3, which rejects an expired credential with the status 400."""

_MAX_REASON: Final = 200


T = TypeVar("T")

_starting = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop by process: a forked child has no thread of its parent."""


def start_request(request: Coroutine[Any, Any, T]) -> "Future[T]":
    """Starts a request on the one event loop of all requests, on a daemon thread."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(
                target=loop.run_forever, name="storesvc-objects", daemon=True
            ).start()
    return asyncio.run_coroutine_threadsafe(request, loop)


async def create(
    objects: "Objects",
    key: str,
    data: Sequence[Buffer],
    read: "Callable[[], Awaitable[ReadResult]]",
) -> None:
    """Creates an object; accepts one that exists with this content: an earlier request,
    whose response was lost, created it.
    """
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
    )

    # Google rejects an overwrite before it looks at the condition.
    existing = (AlreadyExistsError, PermissionDeniedError, PreconditionError)
    try:
        await obstore.put_async(objects, key, data, mode="create", use_multipart=False)
    except BaseError as e:
        if _NO_VERSION in str(e):  # of an object that was created
            return
        if not isinstance(e, existing) or not await _is_stored(read, data):
            raise


async def _is_stored(
    read: "Callable[[], Awaitable[ReadResult]]", data: Sequence[Buffer]
) -> bool:
    try:
        found = await read()
    except (StorageDeniedError, RuntimeError, ValueError) as e:
        if classify(e).is_transient:
            raise
        return False
    return found.state == "value" and _is_joined(memoryview(found.value), data)


def _is_joined(content: memoryview, parts: Sequence[Buffer]) -> bool:
    """Returns whether a content is that of parts, one after another."""
    start = 0
    for part in parts:
        end = start + len(part)
        if content[start:end] != memoryview(part):
            return False
        start = end
    return start == len(content)


_NO_VERSION: Final = "ETag Header missing from response"
"""Part of obstore's message about a success without an ETag, as some emulators send."""


def is_rejected(cause: Exception) -> bool:
    """Returns whether a storage rejected the credential of a request."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    is_denied = isinstance(cause, (PermissionDeniedError, UnauthenticatedError))
    return is_denied or any(code in str(cause) for code in _EXPIRED)


def error_reason(cause: Exception) -> str:
    """Returns the message of an error of obstore, without its details."""
    return str(cause).partition("\n")[0].strip()[:_MAX_REASON]


def gcs_objects(storage: Storage, provider: "GCSCredentialProvider") -> "GCSStore":
    """Returns a client of a bucket with exactly one source of credentials."""
    from obstore.store import GCSStore

    endpoint = find_endpoint(storage)
    options: Any = {} if endpoint is None else {"base_url": endpoint}
    client = _client(endpoint)
    if storage.user_project is not None:
        client["default_headers"] = {"x-goog-user-project": storage.user_project}
    return GCSStore(
        storage.spec["bucket"],
        credential_provider=provider,
        client_options=client,
        retry_config=NO_RETRIES,
        **options,
    )


def s3_objects(storage: Storage, provider: "S3CredentialProvider") -> "S3Store":
    """Returns a client of a bucket with exactly one source of credentials."""
    from obstore.store import S3Store

    endpoint = find_endpoint(storage)
    options: Any = {} if endpoint is None else {"endpoint": endpoint}
    return S3Store(
        storage.spec["bucket"],
        region=storage.spec.get("aws_region", DEFAULT_REGION),
        credential_provider=provider,
        client_options=_client(endpoint),
        retry_config=NO_RETRIES,
        **options,
    )


def _client(endpoint: str | None) -> "ClientConfig":
    return {
        # For Google, and for lent credentials, checked when the bucket was opened.
        "allow_http": endpoint is not None,
        "connect_timeout": CONNECT_SECONDS,
        "timeout": REQUEST_SECONDS,
    }


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Response to a read, as TensorStore's."""

    state: Literal["value", "missing"]
    value: Any
    """Buffer of the bytes."""


class LentStore:
    """Objects below the root of a store, reached with one lent credential at a time.
    Thread-safe."""

    copies_writes = False
    """As of ``OwnStore``."""

    def __init__(self, storage: Storage, credential: LentCredential) -> None:
        self._storage = storage
        self._credential = credential
        self._opened: tuple[Lent, Objects] | None = None

    async def read(self, path: str, span: slice | None = None) -> ReadResult:
        """Reads an object, or bytes of it."""
        import obstore
        from obstore.exceptions import NotFoundError

        key = self._key(path)

        async def send(objects: "Objects") -> Any:
            options: GetOptions = {}
            if span is not None:
                options = {"range": (span.start, span.stop)}
            found = await obstore.get_async(objects, key, options=options)
            return await found.bytes_async(), found.meta["size"]

        try:
            data, size = await self._sent(path, send)
        except (NotFoundError, FileNotFoundError):  # which of them: by its version
            return ReadResult("missing", b"")
        if span is not None and len(data) != span.stop - span.start:
            raise ValueError(
                f"OUT_OF_RANGE: Requested byte range [{span.start}, {span.stop}) was "
                f"not satisfied by {len(data)} bytes and total size {size}"
            )
        return ReadResult("value", data)

    async def write(self, path: str, data: Sequence[Buffer]) -> None:
        key = self._key(path)
        read = partial(self.read, path)
        await self._sent(path, lambda objects: create(objects, key, data, read))

    async def _sent(
        self, path: str, send: "Callable[[Objects], Coroutine[Any, Any, T]]"
    ) -> T:
        """Sends a request, and once more if the storage rejects the credential."""
        from obstore.exceptions import BaseError, NotFoundError

        lent = await self._credential.current()
        try:
            try:
                return await send(self._objects(lent))
            except BaseError as e:
                if not is_rejected(e):
                    raise
            lent = await self._credential.replace_rejected(lent)
            return await send(self._objects(lent))
        except NotFoundError:
            raise
        except BaseError as e:
            raise self._error(path, e) from e

    def _key(self, path: str) -> str:
        return f"{self._storage.spec['path']}{path}"

    def _objects(self, lent: Lent) -> "Objects":
        """Returns a client with exactly this credential, and no search for others."""
        if self._opened is not None and self._opened[0] is lent:
            return self._opened[1]
        make: Callable[..., Objects] = (
            s3_objects if self._storage.is_s3 else gcs_objects
        )
        client = make(self._storage, lambda: lent.secret)
        self._opened = lent, client
        return client

    def _error(self, path: str, cause: Exception) -> Exception:
        reason = error_reason(cause)
        if not is_rejected(cause):
            return RuntimeError(reason)
        return StorageDeniedError(
            f"{self._storage.describe(path)}: the storage denies this to the "
            f"credential that the server lent, or there is no such object ({reason}); "
            "let the server's own account read and create objects there",
            storage=self._storage.name,
        )


KEPT_KEYS: Final = timedelta(minutes=10)
"""Time for which temporary keys of S3 are used before they are requested again;
botocore renews them at least as long before their end."""


class OwnStore:
    """Objects below the root of a store, reached with the credentials of this process.
    Thread-safe."""

    def __init__(self, storage: Storage, kvstore: "ts.KvStore") -> None:
        """Creates it; sends no request. `kvstore` has the same objects."""
        self._storage = storage
        self._kvstore = kvstore

    async def read(self, path: str, span: slice | None = None) -> ReadResult:
        """Reads an object, or bytes of it."""
        reading: Any = self._kvstore.read(path, byte_range=span)
        found: ReadResult = await await_future(reading)
        return found

    async def write(self, path: str, data: Sequence[Buffer]) -> None:
        objects = self._objects  # known: who writes asks for `copies_writes` first
        if objects is None:
            await await_future(self._kvstore.write(path, b"".join(data)))
            return
        from obstore.exceptions import BaseError

        key = f"{self._storage.spec['path']}{path}"
        try:
            await create(objects, key, data, partial(self.read, path))
        except BaseError as e:
            raise self._error(path, e) from e

    @property
    def copies_writes(self) -> bool:
        """True if an object that is being written is in memory several times."""
        return self._objects is None

    @cached_property
    def _objects(self) -> "Objects | None":
        return _make_objects(self._storage)

    def _error(self, path: str, cause: Exception) -> Exception:
        from obstore.exceptions import PermissionDeniedError

        reason = error_reason(cause)
        if isinstance(cause, PermissionDeniedError):
            return denied_error(self._storage, path, reason)
        if is_rejected(cause):
            return unauthenticated_error(self._storage, path, reason)
        return failure_error(self._storage, path, reason)


def _make_objects(storage: Storage) -> "Objects | None":
    """Returns obstore's client of a bucket; None: TensorStore must write."""
    spec = storage.spec
    parts = spec["path"].rstrip("/").split("/") if spec["path"] else []
    if find_spec("obstore") is None or not {"", ".", ".."}.isdisjoint(parts):
        return None
    if storage.is_gcs and not storage.uses_grpc:
        return _gcs_objects(storage)
    if storage.is_s3 and "aws_region" in spec:
        return _s3_objects(storage)
    return None


def _gcs_objects(storage: Storage) -> "GCSStore | None":
    try:
        credentials, _ = own_credentials(storage)
    except InvalidFieldError:
        return None
    from google.auth.credentials import AnonymousCredentials

    if isinstance(credentials, AnonymousCredentials):
        # obstore sends a token in any case; only emulators accept an empty one.
        nothing: GCSCredential = {"token": "", "expires_at": None}
        return gcs_objects(storage, lambda: nothing) if find_endpoint(storage) else None
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

    return gcs_objects(storage, token)


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
        credentials = get_session().get_credentials()
    except BotoCoreError:  # a profile that does not exist, a malformed file
        return None
    if credentials is None:
        return None

    def keys() -> "S3Credential":
        found = credentials.get_frozen_credentials()  # botocore renews expired ones
        is_temporary = found.token is not None
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + KEPT_KEYS if is_temporary else None,
        }

    return s3_objects(storage, keys)
