"""Reads and creates objects with lent credentials, through obstore.

TensorStore's drivers take credentials from the process only, and one for all. A
`LentStore` has the two methods of TensorStore's key-value store that `BucketRoot`
calls, so that its hedging and its limits apply here too.

A request that the storage rejects (401, 403) is sent once more, with another
credential. An object is created, never replaced: what exists already was written by an
earlier attempt of the same request, because its name is random.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, assert_never

from storesvc.errors import StorageDeniedError
from storesvc.format.checksums import Buffer
from storesvc.storage.location import Storage
from storesvc_client._storage import object_requests
from storesvc_client._storage.lent_credential import (
    GcsSecret,
    Lent,
    LentCredential,
    S3Secret,
)
from storesvc_client._storage.object_requests import is_rejected, reason_of, started

if TYPE_CHECKING:
    from obstore.store import GCSCredential, S3Credential

    from storesvc_client._storage.object_requests import Objects

T = TypeVar("T")


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

    # ``Any`` stands for a future of TensorStore.
    def read(self, path: str, *, byte_range: slice | None = None) -> Any:
        """Starts a read of an object, or of bytes of it."""
        return started(self._read(path, byte_range))

    def write(self, path: str, data: Sequence[Buffer]) -> Any:
        """Starts the creation of an object."""
        return started(self._sent(path, partial(_create, self._key(path), data)))

    async def _read(self, path: str, span: slice | None) -> ReadResult:
        from obstore.exceptions import NotFoundError

        try:
            data = await self._sent(path, partial(_bytes, self._key(path), span))
        except (NotFoundError, FileNotFoundError):  # which of them: by its version
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
                if not is_rejected(e):
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
        reason = reason_of(cause)
        if not is_rejected(cause):
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


async def _create(key: str, data: Sequence[Buffer], objects: "Objects") -> None:
    """Creates an object; accepts that it exists with this size."""
    import obstore
    from obstore.exceptions import BaseError

    async def is_stored() -> bool | None:
        try:
            found = await obstore.head_async(objects, key)
        except (BaseError, FileNotFoundError):
            return None
        return found["size"] == sum(map(len, data))

    await object_requests.create(objects, key, data, is_stored)


def _opened(storage: Storage, lent: Lent) -> "Objects":
    """Returns a client with exactly one credential, and no search for others."""
    match lent.secret:
        case GcsSecret(token=token):
            of_google: GCSCredential = {"token": token, "expires_at": None}
            return object_requests.gcs_objects(storage, lambda: of_google)
        case S3Secret() as keys:
            of_amazon: S3Credential = {
                "access_key_id": keys.access_key_id,
                "secret_access_key": keys.secret_access_key,
                "token": keys.session_token,
                "expires_at": None,
            }
            return object_requests.s3_objects(storage, lambda: of_amazon)
        case secret:
            assert_never(secret)
