"""Requests of obstore, as TensorStore's futures.

TensorStore's drivers take credentials from the process only, and copy what they write
twice. obstore takes any credentials, and sends the buffer that it is given.

An object is created, never replaced: what exists already was written by an earlier
attempt of the same request, because its name is random.
"""

import asyncio
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from storesvc.format.checksums import Buffer
from storesvc.storage.gcs import endpoint_of
from storesvc.storage.location import Storage

if TYPE_CHECKING:
    from obstore.store import (
        ClientConfig,
        GCSCredentialProvider,
        GCSStore,
        RetryConfig,
        S3CredentialProvider,
        S3Store,
    )

    Objects: TypeAlias = GCSStore | S3Store

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

PAUSES: Final = (0.1, 0.4, 1.6)
"""Backoff in seconds before each retry of a creation whose connection broke, which
obstore does not retry; jitter is added."""

CONNECT_SECONDS: Final = timedelta(seconds=5)

REQUEST_SECONDS: Final = timedelta(minutes=10)
"""Timeout of a request. The hedging of `BucketRoot` drops a late one before that."""

DEFAULT_REGION: Final = "us-east-1"

_EXPIRED: Final = ("ExpiredToken", "InvalidToken")
"""Codes of S3, which rejects an expired credential with the status 400."""

_MAX_REASON: Final = 200


class ObjectCall:
    """A request in flight, with the methods of TensorStore's futures that are used."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future
        self._callbacks: list[Callable[[ObjectCall], None]] = []

    def add_done_callback(self, callback: Callable[["ObjectCall"], None]) -> None:
        """Calls a function with this request once it has ended."""
        self._callbacks.append(callback)
        ended = weakref.WeakMethod(self._ended)
        # The future keeps its callbacks for ever: with a reference to the request it
        # would be a cycle, and the data would wait for Python's garbage collector.
        self._future.add_done_callback(partial(_call, ended))

    def remove_done_callback(self, callback: Callable[["ObjectCall"], None]) -> None:
        """Drops the request; the function may still be called."""
        del callback
        self._callbacks.clear()
        self._future.cancel()

    def _ended(self) -> None:
        # another thread may remove them at this moment
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def exception(self) -> BaseException | None:
        """Returns the error of a request that has ended."""
        return self._future.exception()

    def result(self) -> Any:
        """Returns the response of a request that has ended, or raises its error."""
        return self._future.result()


def _call(ended: "weakref.WeakMethod[Callable[[], None]]", _: object) -> None:
    if (method := ended()) is not None:
        method()


def started(request: Coroutine[Any, Any, Any]) -> ObjectCall:
    """Starts a request."""
    return ObjectCall(asyncio.run_coroutine_threadsafe(request, _loop()))


async def create(
    objects: "Objects",
    key: str,
    data: Sequence[Buffer],
    is_stored: Callable[[], Awaitable[bool | None]],
) -> None:
    """Creates an object; accepts one that exists with this content.

    If the outcome of a request is unknown, because its response was lost, the next
    request finds what it created.

    Args:
        objects: Client of the bucket.
        key: Name of the object.
        data: Its content, in parts.
        is_stored: Returns whether the object that exists has this content; None if
            there is none, or it cannot be read.
    """
    import obstore
    from obstore.exceptions import BaseError

    for pause in (*PAUSES, None):
        try:
            await obstore.put_async(
                objects, key, data, mode="create", use_multipart=False
            )
        except BaseError as e:
            found = await is_stored() if _may_exist(e) else None
            if found:
                return
            # S3 rejects a request as well while another one creates the object.
            if pause is None or found is not None or is_rejected(e):
                raise
        else:
            return
        await asyncio.sleep(pause * (1 + random.random()))  # noqa: S311 - jitter


def _may_exist(cause: Exception) -> bool:
    """Returns whether a creation may have failed because the object exists."""
    from obstore.exceptions import (
        AlreadyExistsError,
        PermissionDeniedError,
        PreconditionError,
    )

    # Google rejects an overwrite before it looks at the condition.
    existing = (AlreadyExistsError, PermissionDeniedError, PreconditionError)
    return isinstance(cause, existing)


def is_rejected(cause: Exception) -> bool:
    """Returns whether a storage rejected the credential of a request."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    is_denied = isinstance(cause, (PermissionDeniedError, UnauthenticatedError))
    return is_denied or any(code in str(cause) for code in _EXPIRED)


def reason_of(cause: Exception) -> str:
    """Returns the message of an error of obstore, without its details."""
    return str(cause).partition("\n")[0].strip()[:_MAX_REASON]


def gcs_objects(storage: Storage, provider: "GCSCredentialProvider") -> "GCSStore":
    """Returns a client of a bucket with exactly one source of credentials."""
    from obstore.store import GCSStore

    endpoint = endpoint_of(storage)
    options: Any = {} if endpoint is None else {"base_url": endpoint}
    return GCSStore(
        storage.spec["bucket"],
        credential_provider=provider,
        client_options=_client(endpoint),
        retry_config=RETRY,
        **options,
    )


def s3_objects(storage: Storage, provider: "S3CredentialProvider") -> "S3Store":
    """Returns a client of a bucket with exactly one source of credentials."""
    from obstore.store import S3Store

    endpoint = endpoint_of(storage)
    options: Any = {} if endpoint is None else {"endpoint": endpoint}
    return S3Store(
        storage.spec["bucket"],
        region=storage.spec.get("aws_region", DEFAULT_REGION),
        credential_provider=provider,
        client_options=_client(endpoint),
        retry_config=RETRY,
        **options,
    )


def _client(endpoint: str | None) -> "ClientConfig":
    return {
        # For Google, and for lent credentials, checked when the bucket was opened.
        "allow_http": endpoint is not None,
        "connect_timeout": CONNECT_SECONDS,
        "timeout": REQUEST_SECONDS,
    }


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all requests, on a daemon thread."""
    with _starting:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(
                target=loop.run_forever, name="storesvc-objects", daemon=True
            ).start()
            _loops.append(loop)
        return _loops[0]
