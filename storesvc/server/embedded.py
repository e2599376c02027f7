"""Runs a server inside the process of its client.

It has the same services and the same contract; only the address differs: a Unix socket
in a directory that only this user can enter. All embedded servers of a process share
one event loop, because gRPC's asyncio polls for one loop per process.
"""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from storesvc.errors import StorageUnavailableError, StoreError
from storesvc.format import layout
from storesvc.rpc.status import WIRE, reason_name
from storesvc.server import app
from storesvc.server.gc_scheduler import DEFAULT_INTERVAL, collecting
from storesvc.storage.tensorstore_bucket import TensorStoreBucket

T = TypeVar("T")


class StartError(Exception):
    """The store cannot be opened; ``reason`` is an `ErrorReason` name."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.reason = reason_name(WIRE[type(error)].reason)
        self.metadata = error.metadata


class EmbeddedServer:
    """Serves the store at a root to this process only."""

    def __init__(self, root: str, *, timeout: float) -> None:
        """Starts the server.

        Args:
            root: URI of the store; a store is created if there is none.
            timeout: Maximum seconds to open the store.

        Raises:
            StartError: The root is not a URI of a supported storage, the store's format
                is unknown, or the storage did not answer.
        """
        # Removed with the object at the latest, in case it is never closed.
        self._directory = tempfile.TemporaryDirectory(prefix="storesvc-")
        self._stack = AsyncExitStack()
        self.address = f"unix:{self._directory.name}/socket"
        try:
            _run(self._start(root, timeout))
        except BaseException as e:  # KeyboardInterrupt too
            self.close()
            if isinstance(e, StoreError):
                raise StartError(e) from e
            raise

    def close(self) -> None:
        """Drains and stops the server."""
        _run(self._stack.aclose())
        self._directory.cleanup()

    async def _start(self, root: str, seconds: float) -> None:
        async with _storage_timeout(root, seconds):
            store = await app.open_store(root)
        await self._stack.enter_async_context(app.running(store, self.address))
        await self._stack.enter_async_context(collecting(store, DEFAULT_INTERVAL))


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store exists at a root; creates none.

    Args:
        root: URI to check.
        timeout: Maximum seconds.

    Raises:
        StartError: The root is not a URI of a supported storage, or the storage did not
            answer.
    """

    async def look() -> bool:
        async with _storage_timeout(root, timeout):
            bucket = await TensorStoreBucket.open(root)
            return await bucket.read(layout.STORE) is not None

    try:
        return _run(look())
    except StoreError as e:
        raise StartError(e) from e


@asynccontextmanager
async def _storage_timeout(root: str, seconds: float) -> AsyncIterator[None]:
    """Limits the time of the storage calls inside.

    Raises:
        StorageUnavailableError: They took longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{root.partition('?')[0]}: the storage did not answer within "
            f"{seconds:g} s; retry, or allow more time"
        ) from e


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(
                target=loop.run_forever, name="storesvc-embedded", daemon=True
            ).start()
            _loops.append(loop)
        return _loops[0]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    running = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return running.result()
    except BaseException:
        running.cancel()  # KeyboardInterrupt: no caller waits for the result any more
        raise
