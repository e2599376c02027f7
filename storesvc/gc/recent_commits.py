"""Runs in which this process committed a checkpoint lately."""

import asyncio

from storesvc.format.names import RunName


class Recent:
    """Those that nobody has looked at yet; bounded by the number of runs."""

    def __init__(self) -> None:
        self._runs: set[RunName] = set()
        self._some = asyncio.Event()

    def add(self, run: RunName) -> None:
        """Adds a run."""
        self._runs.add(run)
        self._some.set()

    async def wait(self) -> None:
        """Waits until there is one."""
        await self._some.wait()

    def take(self) -> list[RunName]:
        """Returns them, and forgets them."""
        taken = sorted(self._runs)
        self._runs.clear()
        self._some.clear()
        return taken
