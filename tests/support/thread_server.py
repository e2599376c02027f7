"""A server on a real socket in a thread of this process, with access to its store."""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from storesvc.rpc.calls import OPEN, Security
from storesvc.server import app
from storesvc.store import Store

T = TypeVar("T")

SECONDS = 60.0


class ThreadServer:
    """Serves the store at a root while the context lasts."""

    def __init__(self, root: str, *, security: Security = OPEN) -> None:
        self._root = root
        self._security = security
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.address = ""
        self.store: Store

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the event loop of the server; returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SECONDS)
        self.loop.close()

    def _serve(self) -> None:
        self.loop.run_until_complete(self._run())

    async def open_store(self) -> Store:
        """Opens the store at the root."""
        return await app.open_store(self._root)

    async def _run(self) -> None:
        self.store = await self.open_store()
        running = app.running(self.store, "127.0.0.1:0", security=self._security)
        async with running as served:
            self.address = f"127.0.0.1:{served.port}"
            self._ready.set()
            await self._stop.wait()
