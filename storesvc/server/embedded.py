"""Runs a server inside the process of its client.

It has the same services and the same contract; only the address differs: a Unix socket
in a directory that only this user can enter. Calls with one response do not even pass
the socket (``EmbeddedServer.call``). All embedded servers of a process share one event
loop, because gRPC's asyncio polls for one loop per process.

Deleted checkpoints must not fill a disk where no server runs: so the embedded
server of a directory collects garbage, all of the store's, as no other process may. A
pass lists large files on a local disk, and only of runs that changed. The lists of a
bucket cost money and time of the interpreter of a training process, and with many hosts
one of them would do it for all; so there a server, ``storectl gc`` or
``connect(collect=True)`` collects, and a warning is logged if none is there.
"""

import asyncio
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from storesvc.errors import InvalidFieldError, StorageUnavailableError, StoreError
from storesvc.format import layout
from storesvc.rpc.in_process import Metadata
from storesvc.server import app
from storesvc.server.gc_scheduler import (
    DEFAULT_INTERVAL,
    apply_pending_retention,
    collecting,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.threads import Threads

T = TypeVar("T")

_RETENTION_SECONDS: Final = 60.0
"""Maximum time that the end of a server takes for retention."""

_THREADS: Final = 32
"""Maximum threads for the computations of all embedded servers, as in asyncio."""


class StartError(Exception):
    """The store cannot be opened; has the code and the reason of the cause."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.code, self.reason = error.code, error.reason
        self.metadata = error.metadata


class EmbeddedServer:
    """Serves the store at a root to this process only."""

    def __init__(
        self, root: str, *, timeout: float, collect: bool | None = None
    ) -> None:
        """Starts the server.

        Args:
            root: URI of the store; a store is created if there is none.
            timeout: Maximum seconds to open the store.
            collect: Whether it collects garbage; None: unless the store is in a bucket.
        """
        _check_not_forked(root)
        directory = tempfile.mkdtemp(prefix="storesvc-")
        # With the object at the latest, in case it is never closed.
        self._remove = weakref.finalize(self, _remove, directory, os.getpid())
        self._stack = AsyncExitStack()
        self.address = f"unix:{directory}/socket"
        try:
            _run(self._start(root, timeout, collect=collect))
        except BaseException as e:  # KeyboardInterrupt too
            self.close()
            if isinstance(e, StoreError):
                raise StartError(e) from e
            raise

    def close(self) -> None:
        _run(self._stack.aclose())
        self._remove()

    def call(
        self,
        method: str,
        requests: Sequence[bytes],
        seconds: float | None,
        metadata: Metadata,
    ) -> bytes:
        """Makes a call without a connection; see ``InProcessCalls.call``."""
        return _run(self._calls.call(method, requests, seconds, metadata))

    async def _start(self, root: str, seconds: float, *, collect: bool | None) -> None:
        async with _storage_timeout(root, seconds):
            store = await app.open_store(root)
        if collect is None:
            collect = not store.bucket.opened.storage.is_remote
        interval = DEFAULT_INTERVAL if collect else timedelta(0)
        store.receiver.trusts_writers = True
        self._stack.push_async_callback(
            apply_pending_retention, store, _RETENTION_SECONDS, is_collected=collect
        )
        running = app.running(store, self.address)
        self._calls = (await self._stack.enter_async_context(running)).calls
        await self._stack.enter_async_context(collecting(store, interval))


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store exists at a root; creates none."""

    _check_not_forked(root)

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
    """Limits the time of the storage calls inside."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise StorageUnavailableError(
            f"{root.partition('?')[0]}: the storage did not answer within "
            f"{seconds:g} s; retry, or allow more time"
        ) from e


_starting = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of this process, and of the one that it was forked from."""


def _check_not_forked(root: str) -> None:
    """Rejects a forked child of a process that has opened a store."""
    if _loops and os.getpid() not in _loops:
        raise StartError(
            InvalidFieldError(
                f"store {root}: expected a process that is no fork of one with an open "
                f"store, got a fork of process {next(iter(_loops))}, without the "
                "threads of its storage; start it by "
                "multiprocessing.get_context('spawn'), or connect to a server"
            )
        )


def _remove(directory: str, owner: int) -> None:
    if owner == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine, which runs in the loop of this process."""
    with _starting:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(Threads(_THREADS, "storesvc-work"))
            threading.Thread(
                target=loop.run_forever, name="storesvc-embedded", daemon=True
            ).start()
            _loops[os.getpid()] = loop
    running = asyncio.run_coroutine_threadsafe(coroutine, _loops[os.getpid()])
    try:
        return running.result()
    except BaseException:
        running.cancel()  # KeyboardInterrupt: no caller waits for the result any more
        raise
