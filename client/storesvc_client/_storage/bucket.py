"""The root of a store in a bucket that this process reads and writes itself.

Every call has a limit: a slow one is hedged, a late one is repeated, and finally it
fails (``storesvc.storage.hedging`` decides). This applies to writes, too, which may be
repeated because no other process writes an object of the same name. The requests of all
calls are sent by one event loop (``storesvc.storage.requests``).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar

from storesvc.errors import StorageUnavailableError
from storesvc.errors import StoreError as StorageError
from storesvc.format.checksums import Buffer
from storesvc.storage import hedging
from storesvc.storage.bucket import translate_errors
from storesvc.storage.location import Storage
from storesvc.storage.remote import GcsLists, endpoint_in_environment, make_bucket
from storesvc.storage.requests import HedgedSender, shared_window
from storesvc.storage.throttle import OUTAGE_SECONDS
from storesvc_client._rpc.retry import clear_variables
from storesvc_client._storage.objects import OwnStore, start_request
from storesvc_client.errors import InvalidRequestError, StoreError, error_class

if TYPE_CHECKING:
    from storesvc_client._storage.objects import LentStore, ReadResult

T = TypeVar("T")

POLL_SECONDS: Final = 0.2
"""Interval at which a write checks whether it is still needed."""

_log = logging.getLogger("storesvc_client")


class BucketRoot:
    """The root of a store in a bucket. Thread-safe."""

    def __init__(self, storage: Storage, store: "OwnStore | LentStore") -> None:
        """Creates it; with lent credentials, the store has only the objects that the
        credential permits."""
        self.storage = storage
        self._store = store
        sender = partial(
            HedgedSender,
            window=shared_window(storage),
            probe=self._probe,
            patience_seconds=OUTAGE_SECONDS,
            log=_log,
        )
        self._reads = sender(hedging.READS, "read")
        self._writes = sender(hedging.WRITES, "write")
        # A lent credential permits no lists.
        self._may_probe = storage.is_gcs and isinstance(store, OwnStore)
        self._lists: GcsLists | None = None

    @classmethod
    def open(cls, storage: Storage) -> Self:
        """Opens the root of a storage; sends no request.

        Raises:
            InvalidFieldError: There are no credentials for the storage.
            InvalidRequestError: Packages that it needs are not installed.
            UnavailableError: It cannot be opened.
        """
        try:
            import tensorstore as ts
        except ModuleNotFoundError as e:
            raise InvalidRequestError(
                f"direct: {storage.name} needs {e.name}; pip install "
                "'storesvc[server]', or connect without direct="
            ) from e
        if storage.uses_grpc:
            # checked first: TensorStore aborts the process if it finds no credentials
            make_bucket(storage)
        with _translate_errors(storage, ""):
            with endpoint_in_environment(storage):
                opening = ts.KvStore.open(
                    dict(storage.spec), context=ts.Context(dict(storage.context))
                )
            opened = opening.result(hedging.READS.answer_seconds)
        return cls(storage, OwnStore(storage, opened))

    def __str__(self) -> str:
        return self.storage.name

    @property
    def copies_writes(self) -> bool:
        """True if an object that is being written is in memory several times; may
        search for credentials, which takes seconds."""
        return self._store.copies_writes

    def read(self, path: str, *, timeout: float) -> bytes | None:
        """Returns the object at a path; None if there is none.

        Raises:
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        ask = partial(self._store.read, path)
        reading = self._start(self._reads, path, ask, timeout=timeout)
        try:
            result = reading.result()
        finally:
            reading.cancel()
        return result.value if result.state == "value" else None

    def start_read(self, path: str, start: int, stop: int, *, what: str) -> "RangeRead":
        """Starts a read of bytes ``[start, stop)`` of an object, `what` in logs; a
        cancelled one is dropped. Its result raises:

        Raises:
            DataLossError: The object is shorter than the range.
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        ask = partial(self._store.read, path, slice(start, stop))
        return self._start(self._reads, path, ask, size_bytes=stop - start, what=what)

    def write(
        self, path: str, data: Sequence[Buffer], *, what: str, check: Callable[[], None]
    ) -> None:
        """Writes an object whose name no other process writes; returns once durable.
        Calls `check` at intervals, which raises an error to cancel the write.

        Raises:
            PreconditionError: The storage denies access.
            UnavailableError: The storage failed or did not answer in time.
        """
        ask = partial(self._store.write, path, data)
        size_bytes = sum(map(len, data))
        writing = self._start(self._writes, path, ask, size_bytes=size_bytes, what=what)
        try:
            while not writing.done():
                check()
                wait([writing], POLL_SECONDS)
            writing.result()
        finally:
            writing.cancel()

    def _start(
        self,
        sender: HedgedSender,
        path: str,
        ask: Callable[[], Awaitable[T]],
        *,
        size_bytes: int = 0,
        what: str = "",
        timeout: float | None = None,
    ) -> "Future[T]":
        name = what or self.storage.describe(path)

        async def answer() -> T:
            try:
                with _translate_errors(self.storage, path):
                    answering = sender.answer(ask, size_bytes=size_bytes, name=name)
                    if timeout is None:
                        return await answering
                    async with asyncio.timeout(timeout):
                        return await answering
            except StoreError as e:
                clear_variables(e)  # only the first error of a transfer is looked at
                raise

        return start_request(answer())

    async def _probe(self) -> None:
        """Returns once the bucket answers a probe; at once if it permits none."""
        if not self._may_probe:
            return
        try:
            if self._lists is None:
                self._lists = await GcsLists.for_storage(self.storage)
            await self._lists.probe()
        except StorageUnavailableError:
            raise
        except StorageError:
            self._may_probe = False


RangeRead: TypeAlias = "Future[ReadResult]"


@contextmanager
def _translate_errors(storage: Storage, path: str) -> Generator[None]:
    """Translates errors of a storage to errors of this library."""
    own: StoreError | None = None
    try:
        with translate_errors(storage, path):
            try:
                yield
            except StoreError as e:
                own = e  # of the server that lends credentials; some are OSErrors too
    except StorageError as e:
        kind = error_class(e.code, e.reason)
        raise kind(str(e), reason=e.reason, metadata=e.metadata) from None
    if own is not None:
        raise own
