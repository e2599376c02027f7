"""Matches the calls of a job's processes: each joint call gets a key prefix on the
board where its processes meet.

Process 0 leads. Each other process announces each of its calls and waits. When process
0 makes a call itself, it assigns a new key prefix to the next call of every other
process, in the order of that process's calls. A call without a prefix can be withdrawn.
So a call that one process makes alone, by mistake, leaves nothing behind that would be
matched with later joint calls.
"""

from contextlib import suppress
from secrets import token_hex
from typing import Final

from storesvc_client._job.job import Job
from storesvc_client.errors import StoreError

_WITHDRAWN: Final = "-"


class JointCalls:
    """The joint calls of one kind, seen from one process of a job."""

    def __init__(self, job: Job, kind: str) -> None:
        """Creates the matching; nothing is published yet.

        Args:
            job: The processes.
            kind: Kind of the calls, such as "read/tests/run".
        """
        self._job = job
        self._kind = f"storesvc/{kind}"

    def lead(self) -> str:
        """Returns a new key prefix for a call of process 0."""
        return f"{self._kind}/{token_hex(8)}"

    def take(self, index: int, place: str, *, seconds: float = 0.0) -> bool:
        """Assigns a key prefix to the next call of another process; returns False if
        that process makes none in time.

        Args:
            index: The process.
            place: Key prefix of process 0's call.
            seconds: Maximum wait.
        """
        taken = f"{self._kind}/taken/{index}"
        while True:
            number = self._job.passed(taken)
            if self._job.read(self._call(index, number), seconds=seconds) is None:
                return False
            # Counted only then: a call counted but not settled never gets a prefix.
            settled = self._settled(index, number, place)
            self._job.advance(taken, number)
            if settled == place:
                return True

    def begin(self) -> int:
        """Announces a call to process 0; returns its number."""
        made, token = f"{self._kind}/made", token_hex(8)
        while True:
            number = self._job.passed(made)
            key = self._call(self._job.index, number)
            # Published before it is counted: process 0 would wait without limit for a
            # call that was counted but never published.
            try:
                self._job.post(key, token)
                is_own = self._job.read(key) == token
            except BaseException:
                with suppress(StoreError):
                    self.take_back(number)
                raise
            self._job.advance(made, number)
            if is_own:  # not the call of another thread
                return number

    def place_key(self, number: int) -> str:
        """Returns the key under which process 0 publishes the prefix of a call."""
        return self._place_key(self._job.index, number)

    def take_back(self, number: int) -> str:
        """Withdraws a call; returns its key prefix if process 0 has already assigned
        one, else ""."""
        settled = self._settled(self._job.index, number, _WITHDRAWN)
        return "" if settled == _WITHDRAWN else settled

    def _settled(self, index: int, number: int, place: str) -> str:
        """Assigns a prefix to a call, unless it has one; returns the one it has."""
        key = self._place_key(index, number)
        self._job.post(key, place)
        settled = self._job.read(key)
        assert settled is not None
        return settled

    def _call(self, index: int, number: int) -> str:
        return f"{self._kind}/calls/{index}/{number}"

    def _place_key(self, index: int, number: int) -> str:
        return f"{self._kind}/places/{index}/{number}"
