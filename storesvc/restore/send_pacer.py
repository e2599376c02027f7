"""Turns: one long step in each pass of the event loop.

gRPC copies a message that is sent within the loop. 64 of them in a row would keep a
small call waiting for 20 ms, and that at each of its own steps.
"""

import asyncio


class Turns:
    """Those of one event loop."""

    def __init__(self) -> None:
        self._queue = asyncio.Lock()
        self._is_taken = False

    async def take(self) -> None:
        """Returns in a pass of the loop in which nobody else had a turn."""
        async with self._queue:
            if self._is_taken:
                await asyncio.sleep(0)  # the next pass, which begins with _free
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        self._is_taken = False
