"""Reads and creates objects with lent credentials, through obstore.

TensorStore's drivers take credentials from the process only, and one for all. A
`LentStore` has the two methods of TensorStore's key-value store that `BucketRoot`
calls, so that its hedging and its limits apply here too.

A request that the storage rejects (401, 403) is sent once more, with another
credential. An object is created, never replaced: what exists already was written by an
earlier attempt of the same request, because its name is random.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, assert_never

from storesvc.errors import StorageDeniedError
from storesvc.storage.gcs import endpoint_of
from storesvc.storage.location import Storage
from storesvc_client._storage.lent_credential import (
    GcsSecret,
    Lent,
    LentCredential,
    S3Secret,
)

if TYPE_CHECKING:
    from obstore.store import (
        ClientConfig,
        GCSCredential,
        GCSStore,
        RetryConfig,
        S3Store,
    )

    Objects: TypeAlias = GCSStore | S3Store

T = TypeVar("T")

RETRY: Final["RetryConfig"] = {
    "max_retries": 6,
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=30),
}
"""Retries of a transient error within one request, as TensorStore makes them."""

CONNECT_SECONDS: Final = timedelta(seconds=5)

REQUEST_SECONDS: Final = timedelta(minutes=10)
"""Timeout of a request. The hedging of `BucketRoot` drops a late one before that."""

DEFAULT_REGION: Final = "us-east-1"

_EXPIRED: Final = ("ExpiredToken", "InvalidToken")
"""Codes of S3, which rejects an expired credential with the status 400."""

_MAX_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Response to a read, as TensorStore's."""

    state: Literal["value", "missing"]
    value: Any
    """Buffer of the bytes."""


class LentCall:
    """A request in flight, with the methods of TensorStore's futures that are used."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def add_done_callback(self, callback: Callable[["LentCall"], None]) -> None:
        """Calls a function with this request once it has ended."""
        self._future.add_done_callback(lambda _: callback(self))

    def remove_done_callback(self, callback: Callable[["LentCall"], None]) -> None:
        """Drops the request; the function may still be called."""
        del callback
        self._future.cancel()

    def exception(self) -> BaseException | None:
        """Returns the error of a request that has ended."""
        return self._future.exception()

    def result(self) -> Any:
        """Returns the response of a request that has ended, or raises its error."""
        return self._future.result()


class LentStore:
    """Objects below the root of a store, reached with one lent credential at a time.
    Thread-safe."""

    def __init__(self, storage: Storage, credential: LentCredential) -> None:
        self._storage = storage
        self._credential = credential
        self._opened: tuple[Lent, Objects] | None = None

    # ``Any`` stands for a future of TensorStore.
    def read(self, path: str, *, byte_range: slice | None = None) -> Any:
        """Starts a read of an object, or of bytes of it."""
        return _started(self._read(path, byte_range))

    def write(self, path: str, data: bytes) -> Any:
        """Starts the creation of an object."""
        return _started(self._sent(path, partial(_create, self._key(path), data)))

    async def _read(self, path: str, span: slice | None) -> ReadResult:
        from obstore.exceptions import NotFoundError

        try:
            data = await self._sent(path, partial(_bytes, self._key(path), span))
        except NotFoundError:
            return ReadResult("missing", b"")
        if span is not None and len(data) != span.stop - span.start:
            raise ValueError(
                f"OUT_OF_RANGE: expected {span.stop - span.start} bytes from offset "
                f"{span.start}, got {len(data)}"
            )
        return ReadResult("value", data)

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
                if not _is_rejected(e):
                    raise
            lent = await self._credential.instead_of(lent)
            return await send(self._objects(lent))
        except NotFoundError:
            raise
        except BaseError as e:
            raise self._error(path, e) from e

    def _key(self, path: str) -> str:
        return f"{self._storage.spec['path']}{path}"

    def _objects(self, lent: Lent) -> "Objects":
        """Returns the client of a credential."""
        opened = self._opened
        if opened is None or opened[0] is not lent:
            self._opened = opened = lent, _opened(self._storage, lent)
        return opened[1]

    def _error(self, path: str, cause: Exception) -> Exception:
        reason = str(cause).partition("\n")[0].strip()[:_MAX_REASON]
        if not _is_rejected(cause):
            return RuntimeError(reason)
        return StorageDeniedError(
            f"{self._storage.describe(path)}: the storage denies this to the "
            f"credential that the server lent, or there is no such object ({reason}); "
            "let the server's own account read and create objects there",
            storage=self._storage.name,
        )


async def _bytes(key: str, span: slice | None, objects: "Objects") -> Any:
    """Reads an object, or bytes of it; returns a buffer."""
    import obstore

    if span is None:
        return await (await obstore.get_async(objects, key)).bytes_async()
    return await obstore.get_range_async(objects, key, start=span.start, end=span.stop)


async def _create(key: str, data: bytes, objects: "Objects") -> None:
    """Creates an object; accepts that it exists with this size."""
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
    )

    try:
        await obstore.put_async(objects, key, data, mode="create", use_multipart=False)
    # Google rejects an overwrite before it looks at the condition.
    except (AlreadyExistsError, PreconditionError, PermissionDeniedError):
        try:
            found = await obstore.head_async(objects, key)
        except BaseError:
            found = None
        if found is None or found["size"] != len(data):
            raise


def _is_rejected(cause: Exception) -> bool:
    """Returns whether a storage rejected the credential of a request."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    is_denied = isinstance(cause, (PermissionDeniedError, UnauthenticatedError))
    return is_denied or any(code in str(cause) for code in _EXPIRED)


def _opened(storage: Storage, lent: Lent) -> "Objects":
    """Returns a client with exactly one credential, and no search for others."""
    from obstore.store import GCSStore, S3Store

    endpoint = endpoint_of(storage)
    client: ClientConfig = {
        "allow_http": endpoint is not None,  # checked when the bucket was opened
        "connect_timeout": CONNECT_SECONDS,
        "timeout": REQUEST_SECONDS,
    }
    bucket = storage.spec["bucket"]
    match lent.secret:
        case GcsSecret(token=token):
            options: Any = {} if endpoint is None else {"base_url": endpoint}
            found: GCSCredential = {"token": token, "expires_at": None}
            return GCSStore(
                bucket,
                credential_provider=lambda: found,
                client_options=client,
                retry_config=RETRY,
                **options,
            )
        case S3Secret() as keys:
            options = {} if endpoint is None else {"endpoint": endpoint}
            return S3Store(
                bucket,
                region=storage.spec.get("aws_region", DEFAULT_REGION),
                access_key_id=keys.access_key_id,
                secret_access_key=keys.secret_access_key,
                session_token=keys.session_token,
                client_options=client,
                retry_config=RETRY,
                **options,
            )
        case secret:
            assert_never(secret)


def _started(request: Coroutine[Any, Any, Any]) -> LentCall:
    return LentCall(asyncio.run_coroutine_threadsafe(request, _loop()))


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all requests, on a daemon thread."""
    with _starting:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(
                target=loop.run_forever, name="storesvc-lent", daemon=True
            ).start()
            _loops.append(loop)
        return _loops[0]
