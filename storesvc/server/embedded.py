"""A server inside the process of its client.

Same services, same contract; only the address differs: a Unix socket in a
directory that no other user may enter. All embedded servers of a process share
one event loop, because gRPC's asyncio polls for one loop a process.
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
from storesvc.storage.tensorstore_bucket import KvBucket

T = TypeVar("T")


class StartError(Exception):
    """The store cannot be opened; ``reason`` is that of the contract."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.reason = reason_name(WIRE[type(error)].reason)
        self.metadata = error.metadata


class EmbeddedServer:
    """Serves the store at a root to this process alone."""

    def __init__(self, root: str, *, timeout: float) -> None:
        """Starts serving.

        Args:
            root: Of the store; one is made where there is none.
            timeout: Seconds that it may take to open it.

        Raises:
            StartError: The root is not a URI of a storage we know, the store is
                in an unknown format, or the storage does not answer.
        """
        # goes with the object at the latest, should nobody close it
        self._directory = tempfile.TemporaryDirectory(prefix="storesvc-")
        self._stack = AsyncExitStack()
        self.address = f"unix:{self._directory.name}/socket"
        try:
            _run(self._start(root, timeout))
        except BaseException as e:  # Ctrl-C too
            self.close()
            if isinstance(e, StoreError):
                raise StartError(e) from e
            raise

    def close(self) -> None:
        """Drains and stops."""
        _run(self._stack.aclose())
        self._directory.cleanup()

    async def _start(self, root: str, seconds: float) -> None:
        async with _answering(root, seconds):
            store = await app.open_store(root)
        await self._stack.enter_async_context(app.running(store, self.address))
        await self._stack.enter_async_context(collecting(store, DEFAULT_INTERVAL))


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store is at a root; makes none.

    Args:
        root: Where to look.
        timeout: Seconds that it may take.

    Raises:
        StartError: The root is not a URI of a storage we know, or the storage does
            not answer.
    """

    async def look() -> bool:
        async with _answering(root, timeout):
            bucket = await KvBucket.open(root)
            return await bucket.read(layout.STORE) is not None

    try:
        return _run(look())
    except StoreError as e:
        raise StartError(e) from e


@asynccontextmanager
async def _answering(root: str, seconds: float) -> AsyncIterator[None]:
    """Ends what asks a storage inside once it takes too long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{root.partition('?')[0]}: the storage did not answer within "
            f"{seconds:g} s; try again, or allow more time"
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
        running.cancel()  # Ctrl-C: nobody waits for it any more
        raise
