"""Chooses the runs that a pass over a store looks at.

A run is looked at if something in it may have changed: once after the start of the
process; while its last pass found something to do, an upload that has not ended or
something that waits; after a change that the journal announces, in that pass and the
next, because a change is announced before it is made; after a call that this process
served; when the purge time of a deleted checkpoint has come; and every `REST`, for what
is announced nowhere: an upload that another process began and left, or a purge before
its time. So an idle run takes no request, and an idle namespace two.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from storesvc.catalog.journal import Journal
from storesvc.clock import Clock
from storesvc.errors import StoreError
from storesvc.format.names import RunName

REST: Final = timedelta(hours=6)
"""Maximum time between two looks at a run."""

_PAGE: Final = 1000
"""Announcements after which all runs of a namespace count as changed."""


class DueRuns:
    """The times at which the runs of a store are looked at again."""

    def __init__(self, journal: Journal, *, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._read: dict[str, int] = {}
        """Number of the last announcement read, by namespace."""
        self._due: dict[RunName, float] = {}
        """Time of the next look at each run at rest, by the monotonic clock."""
        self._noted: set[RunName] = set()
        self._announced: set[RunName] = set()
        """Runs with an announcement that the last pass read."""

    def note(self, run: RunName) -> None:
        """Records that a call of this process may have changed a run."""
        self._noted.add(run)

    def rest(self, run: RunName, limit: timedelta) -> None:
        """Records that a pass found nothing to do in a run, and that nothing will be
        due for some time unless the run changes."""
        if run not in self._noted:
            seconds = min(limit, REST).total_seconds()
            self._due[run] = self._clock.elapsed() + seconds

    async def choose(self, runs: Sequence[RunName]) -> list[RunName]:
        """Returns the runs to look at, of all runs of the store."""
        # The journal before the runs: what is announced later is read by the next pass.
        announced: set[RunName] = set()
        for namespace in sorted({run.namespace for run in runs}):
            try:
                announced |= await self._read_announced(namespace)
            except StoreError:  # it was trimmed, or cannot be read
                self._forget(namespace)
        changed = announced | self._announced | self._noted
        self._announced, self._noted = announced, set()
        now, due = self._clock.elapsed(), self._due
        self._due = {
            run: due[run]
            for run in runs
            if run in due and run not in changed and due[run] > now
        }
        return [run for run in runs if run not in self._due]

    async def _read_announced(self, namespace: str) -> set[RunName]:
        """Returns the runs of a namespace that were announced since the last call."""
        known = self._read.get(namespace)
        if known is not None:
            page = await self._journal.following(namespace, known, limit=_PAGE)
            found = {RunName(namespace, one.run) for _, one in page if one is not None}
            if len(page) < _PAGE and all(one is not None for _, one in page):
                self._read[namespace] = page[-1][0] if page else known
                return found
        # Nothing was read yet, or too much, or one is damaged: it may be of any run.
        self._forget(namespace)
        self._read[namespace] = await self._journal.tail(namespace)
        return set()

    def _forget(self, namespace: str) -> None:
        """Makes all runs of a namespace due."""
        self._read.pop(namespace, None)
        due = self._due.items()
        self._due = {run: at for run, at in due if run.namespace != namespace}
