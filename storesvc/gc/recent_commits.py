"""Remembers the runs to which this process committed recently."""

import asyncio

from storesvc.format.names import RunName


class RecentCommits:
    """Runs with new commits; bounded by the number of runs."""

    def __init__(self) -> None:
        self._runs: set[RunName] = set()
        self._any = asyncio.Event()

    def add(self, run: RunName) -> None:
        """Adds a run."""
        self._runs.add(run)
        self._any.set()

    async def wait(self) -> None:
        """Waits until there is at least one run."""
        await self._any.wait()

    def take(self) -> list[RunName]:
        """Removes and returns all runs, sorted."""
        taken = sorted(self._runs)
        self._runs.clear()
        self._any.clear()
        return taken
