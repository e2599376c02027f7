"""A server inside the process of its client.

Same services, same contract; only the address differs: a Unix socket in a
directory that no other user may enter. All embedded servers of a process share
one event loop, because gRPC's asyncio polls for one loop a process.
"""

import asyncio
import tempfile
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from storesvc import server
from storesvc.collecting import DEFAULT_INTERVAL, collecting
from storesvc.errors import StoreError
from storesvc.format import layout
from storesvc.kvbucket import KvBucket
from storesvc.statuses import WIRE, reason_name

T = TypeVar("T")


class StartError(Exception):
    """The store cannot be opened; ``reason`` is that of the contract."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.reason = reason_name(WIRE[type(error)].reason)
        self.metadata = error.metadata


class EmbeddedServer:
    """Serves the store at a root to this process alone."""

    def __init__(self, root: str) -> None:
        """Starts serving.

        Raises:
            StartError: The root is not a URI of a storage we know, the store is
                in an unknown format, or the storage does not answer.
        """
        # goes with the object at the latest, should nobody close it
        self._directory = tempfile.TemporaryDirectory(prefix="storesvc-")
        self._stack = AsyncExitStack()
        self.address = f"unix:{self._directory.name}/socket"
        try:
            _run(self._start(root))
        except StoreError as e:
            self._directory.cleanup()
            raise StartError(e) from e

    def close(self) -> None:
        """Drains and stops."""
        _run(self._stack.aclose())
        self._directory.cleanup()

    async def _start(self, root: str) -> None:
        store = await server.open_store(root)
        await self._stack.enter_async_context(server.running(store, self.address))
        await self._stack.enter_async_context(collecting(store, DEFAULT_INTERVAL))


def holds_store(root: str) -> bool:
    """Returns whether a store is at a root; makes none.

    Raises:
        StartError: The root is not a URI of a storage we know, or the storage does
            not answer.
    """

    async def look() -> bool:
        bucket = await KvBucket.open(root)
        return await bucket.read(layout.STORE) is not None

    try:
        return _run(look())
    except StoreError as e:
        raise StartError(e) from e


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
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()
