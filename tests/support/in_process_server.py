"""A server in this process, for tests that neither kill it nor read its log."""

from contextlib import AsyncExitStack
from pathlib import Path

from storesvc.server import app, embedded


class InProcessServer:
    """Serves the store at a root on a free port; starts in milliseconds.

    It shares the event loop of embedded stores, as gRPC polls one loop per process.
    """

    def __init__(self, root: Path) -> None:
        """Starts it."""
        self.root = root
        self._stack = AsyncExitStack()
        self.address = f"127.0.0.1:{embedded._run(self._start())}"

    def close(self) -> None:
        """Stops it."""
        embedded._run(self._stack.aclose())

    async def _start(self) -> int:
        store = await app.open_store(self.root.as_uri())
        running = app.running(store, "127.0.0.1:0")
        return await self._stack.enter_async_context(running)
