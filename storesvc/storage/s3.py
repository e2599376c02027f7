"""Deletions in a bucket on S3, of one generation alone.

TensorStore looks at an object and then deletes it, whatever it has become meanwhile: a
slot that was taken since would lose its checkpoint. S3 itself heeds a condition, which
this asks for, with a request that obstore signs.
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
from storesvc.storage.daemon_threads import aside
from storesvc.storage.errors import (
    denied,
    failed,
    is_about_who_asks,
    unaccepted,
)
from storesvc.storage.location import Storage

if TYPE_CHECKING:
    from obstore.store import S3Store

TIMEOUT_SECONDS: Final = 10.0
"""Of one try."""

AT_ONCE: Final = 32
"""Deletions under way, each of which waits in a thread."""

PAUSES: Final = (0.1, 0.4, 1.6)
"""Before each further try of what failed in passing, in seconds."""

_SEARCH: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
_CLIENT: Final = {"connect_timeout": "2s", "timeout": "5s"}

_SIGNED_FOR: Final = timedelta(minutes=5)

_TOLD: Final = ("Code", "Message")
_MOST_TOLD: Final = 1 << 16

_PASSING: Final = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,  # another change of the object is under way
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class S3Deletes:
    """Those of a bucket, below a root. Threads may share it."""

    def __init__(self, storage: Storage, store: "S3Store") -> None:
        self._storage = storage
        self._store = store
        self._turns = asyncio.Semaphore(AT_ONCE)

    @classmethod
    async def of(cls, storage: Storage) -> Self:
        """Returns those of a storage on S3; asks it nothing.

        Raises:
            InvalidFieldError: The package that signs is not installed, or there are no
                credentials.
        """
        deletes = cls(storage, _signer(storage))
        try:
            await deadlines.answer(storage, aside(deletes._signed, ""))
        except _UnsignedError as e:
            raise InvalidFieldError(
                f"root {storage.name}: expected credentials of S3, got none ({e}); set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or let the workload have "
                "an identity"
            ) from e
        return deletes

    async def delete(self, place: str, generation: Generation) -> None:
        """Deletes what a place holds, if it is still that write.

        Raises:
            PreconditionError: It is not.
            StorageDeniedError: The storage lets us not in, or not do this.
            StorageUnavailableError: It failed, or does not answer.
        """
        asked = self._in_turn(place, generation)
        if not await deadlines.answer(self._storage, asked):
            raise PreconditionError(place)

    async def _in_turn(self, place: str, generation: Generation) -> bool:
        async with self._turns:
            return await aside(self._delete, place, generation)

    def _delete(self, place: str, generation: Generation) -> bool:
        for pause in PAUSES:
            try:
                return self._try(place, generation)
            except _PassingError:
                time.sleep(pause)
        try:
            return self._try(place, generation)
        except _PassingError as e:
            raise failed(self._storage, place, str(e)) from e

    def _try(self, place: str, generation: Generation) -> bool:
        try:
            url = self._signed(place)
        except _UnsignedError as e:
            raise unaccepted(self._storage, place, str(e)) from e
        # TensorStore's word for the ETag, behind what kind of word it is
        etag = generation[1:].decode()
        request = urllib.request.Request(  # noqa: S310 - of an endpoint over HTTP
            url, method="DELETE", headers={"If-Match": etag}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # noqa: S310
                return True
        except urllib.error.HTTPError as e:
            if e.code in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.NOT_FOUND):
                return False
            raise self._refused(place, e) from e
        except (OSError, http.client.HTTPException) as e:
            raise _PassingError(str(e)) from e

    def _signed(self, place: str) -> str:
        """The address that deletes what a place holds."""
        import obstore
        from obstore.exceptions import BaseError

        path = f"{self._storage.spec['path']}{place}"
        try:
            return obstore.sign(self._store, "DELETE", path, _SIGNED_FOR)
        except BaseError as e:
            raise _UnsignedError(str(e).partition("\n")[0]) from e

    def _refused(self, place: str, cause: urllib.error.HTTPError) -> Exception:
        told = _told(cause)
        if cause.code in _PASSING:
            return _PassingError(told)
        if cause.code == HTTPStatus.UNAUTHORIZED or is_about_who_asks(told):
            return unaccepted(self._storage, place, told)
        if cause.code == HTTPStatus.FORBIDDEN:
            return denied(self._storage, place, told)
        return failed(self._storage, place, told)


def _told(cause: urllib.error.HTTPError) -> str:
    """What an answer says, in the words of TensorStore."""
    with suppress(OSError, http.client.HTTPException):
        text = cause.read(_MOST_TOLD).decode(errors="replace")
        found = [re.search(f"<{kind}>(.*?)</{kind}>", text) for kind in _TOLD]
        if words := [match[1] for match in found if match]:
            return ": ".join(words)
    return f"{cause.code} {cause.reason}"


class _UnsignedError(Exception):
    """There are no credentials to sign with."""


class _PassingError(Exception):
    """What may work the next time."""


def _signer(storage: Storage) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            f"root {storage.name}: a bucket on S3 needs {e.name}; pip install "
            "'storesvc[server,s3]'"
        ) from e
    # of the search for credentials, which is all that it asks for
    options: dict[str, Any] = {"retry_config": _SEARCH, "client_options": dict(_CLIENT)}
    if "endpoint" in storage.spec:
        options["endpoint"] = storage.spec["endpoint"]
        options["client_options"]["allow_http"] = True
    if "aws_region" in storage.spec:
        options["region"] = storage.spec["aws_region"]
    return S3Store(storage.spec["bucket"], **options)
