"""Processes that leave the training loop of a job before a save of the others.

All processes of a loop make the same saves in the same order, so the number of a save
within the loop names it in all of them. A process that leaves publishes the number of
the first save that it does not make. The others look for that key while they wait in
their save of this number, instead of until its lease expires; a process that has found
it fails its later saves, too. Saves that the process has made before it left are not
affected.
"""

from contextlib import suppress

from storesvc_client._job.job import Job, process_name
from storesvc_client.errors import StoreError


class Departures:
    """The departures from one loop, seen from one process."""

    def __init__(self, job: Job, loop: str) -> None:
        """Begins with no save and no departure.

        Args:
            job: The processes.
            loop: Key prefix of the loop.
        """
        self._job = job
        self._place = f"{loop}/left"
        self._saves = 0
        self._found: tuple[int, str] | None = None
        """Number of the first save that fails, and why."""

    def count_save(self) -> int:
        """Counts a save that this process begins; returns its number from 0."""
        self._saves += 1
        return self._saves - 1

    def leave(self, why: str) -> None:
        """Publishes that this process makes no more saves."""
        with suppress(StoreError):  # the caller may have another error to raise
            name = process_name(self._job, self._job.index)
            self._job.post(
                f"{self._place}/{self._saves}", f"{name} has left the loop: {why}"
            )

    def before(self, number: int) -> str:
        """Returns which process has left before a save, and why; "" if none has."""
        # A later save may have found it while this one, which has all processes, still
        # waits for them.
        if self._found is None or number < self._found[0]:
            why = self._job.read(f"{self._place}/{number}")
            if not why:
                return ""
            self._found = number, why
        return self._found[1]
