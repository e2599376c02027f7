"""Deletes objects on S3 with a condition on their generation; reads their sizes.

TensorStore reads an object's version and then deletes the object without a condition: a
slot that another process has taken in between would lose its checkpoint. S3 itself
checks If-Match on DELETE; this module sends that request, which obstore signs.
"""

import asyncio
import http.client
import re
import time
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self

from storesvc.errors import InvalidFieldError
from storesvc.storage import deadlines
from storesvc.storage.bucket import Generation, PreconditionError
from storesvc.storage.errors import (
    denied,
    failed,
    is_unauthenticated,
    unauthenticated,
)
from storesvc.storage.futures import run_in_daemon_thread
from storesvc.storage.location import Storage

if TYPE_CHECKING:
    from obstore.store import S3Store

DELETE_TIMEOUT_SECONDS: Final = 10.0
"""Timeout of one attempt."""

AT_ONCE: Final = 32
"""Maximum concurrent deletions, each of which blocks a thread."""

PAUSES: Final = (0.1, 0.4, 1.6)
"""Backoff in seconds before each retry of a transient error."""

_SEARCH: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
_CLIENT: Final = {"connect_timeout": "2s", "timeout": "5s"}

_SIGNED_FOR: Final = timedelta(minutes=5)

_SHOWN_FIELDS: Final = ("Code", "Message")
_MAX_ERROR_BYTES: Final = 1 << 16

_TRANSIENT: Final = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,  # another change of the object is in progress
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class S3Deletes:
    """Deletes objects of a bucket below a root. Thread-safe."""

    def __init__(self, storage: Storage, store: "S3Store") -> None:
        self._storage = storage
        self._store = store
        self._slots = asyncio.Semaphore(AT_ONCE)

    @classmethod
    async def of(cls, storage: Storage) -> Self:
        """Returns the deletions of a storage on S3; sends no request to it.

        Raises:
            InvalidFieldError: obstore is not installed, or there are no credentials.
        """
        deletes = cls(storage, _signer(storage))
        try:
            await deadlines.answer(storage, run_in_daemon_thread(deletes._signed, ""))
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
        asked = self._delete(path, generation)
        if not await deadlines.answer(self._storage, asked):
            raise PreconditionError(path)

    async def sizes(self, folder: str) -> dict[str, int]:
        """Returns the bytes of each object below a folder, by path.

        Raises:
            StorageUnavailableError: The storage failed, or does not answer.
        """
        asked = run_in_daemon_thread(self._sizes, folder)
        return await deadlines.answer(self._storage, asked)

    def _sizes(self, folder: str) -> dict[str, int]:
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError

        root = self._storage.spec["path"]
        try:
            return {
                one["path"].removeprefix(root): one["size"]
                for page in obstore.list(self._store, f"{root}{folder}")
                for one in page
            }
        except BaseError as e:
            is_denied = isinstance(e, PermissionDeniedError)
            raise (denied if is_denied else failed)(
                self._storage, folder, str(e).partition("\n")[0]
            ) from e

    async def _delete(self, path: str, generation: Generation) -> bool:
        async with self._slots:
            return await run_in_daemon_thread(self._retried, path, generation)

    def _retried(self, path: str, generation: Generation) -> bool:
        for pause in PAUSES:
            try:
                return self._try(path, generation)
            except _TransientError:
                time.sleep(pause)
        try:
            return self._try(path, generation)
        except _TransientError as e:
            raise failed(self._storage, path, str(e)) from e

    def _try(self, path: str, generation: Generation) -> bool:
        try:
            url = self._signed(path)
        except _UnsignedError as e:
            raise unauthenticated(self._storage, path, str(e)) from e
        # TensorStore's generation is one byte for its kind, and the ETag.
        etag = generation[1:].decode()
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
            raise _TransientError(str(e)) from e

    def _signed(self, path: str) -> str:
        """The signed URL that deletes an object."""
        import obstore
        from obstore.exceptions import BaseError

        key = f"{self._storage.spec['path']}{path}"
        try:
            return obstore.sign(self._store, "DELETE", key, _SIGNED_FOR)
        except BaseError as e:
            raise _UnsignedError(str(e).partition("\n")[0]) from e

    def _error(self, path: str, cause: urllib.error.HTTPError) -> Exception:
        reason = _reason(cause)
        if cause.code in _TRANSIENT:
            return _TransientError(reason)
        if cause.code == HTTPStatus.UNAUTHORIZED or is_unauthenticated(reason):
            return unauthenticated(self._storage, path, reason)
        if cause.code == HTTPStatus.FORBIDDEN:
            return denied(self._storage, path, reason)
        return failed(self._storage, path, reason)


def _reason(cause: urllib.error.HTTPError) -> str:
    """The code and message of a response, formatted as TensorStore does."""
    with suppress(OSError, http.client.HTTPException):
        text = cause.read(_MAX_ERROR_BYTES).decode(errors="replace")
        found = [re.search(f"<{kind}>(.*?)</{kind}>", text) for kind in _SHOWN_FIELDS]
        if words := [match[1] for match in found if match]:
            return ": ".join(words)
    return f"{cause.code} {cause.reason}"


class _UnsignedError(Exception):
    """There are no credentials to sign with."""


class _TransientError(Exception):
    """An attempt failed in a way that a retry may not."""


def _signer(storage: Storage) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            f"root {storage.name}: a bucket on S3 needs {e.name}; pip install "
            "'storesvc[server,s3]'"
        ) from e
    # obstore sends requests only to search for credentials.
    options: dict[str, Any] = {"retry_config": _SEARCH, "client_options": dict(_CLIENT)}
    if "endpoint" in storage.spec:
        options["endpoint"] = storage.spec["endpoint"]
        options["client_options"]["allow_http"] = True
    if "aws_region" in storage.spec:
        options["region"] = storage.spec["aws_region"]
    return S3Store(storage.spec["bucket"], **options)
