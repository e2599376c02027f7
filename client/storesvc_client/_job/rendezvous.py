"""Calls that the processes of a job make together, and how those of one find those of
the others.

Process 0 leads. Each other process tells of each of its calls, and waits; process 0
gives to each the place on the board where they meet, once it makes a call itself, and
takes the calls of each process in their order. A call that it has not taken can be
taken back. So one that a process makes alone, by mistake, leaves nothing behind that
later calls, which all make, could meet instead of each other.
"""

from contextlib import suppress
from secrets import token_hex
from typing import Final

from storesvc_client._job.job import Job
from storesvc_client.errors import StoreError

_TAKEN_BACK: Final = "-"


class Calls:
    """The calls of a job of one kind, seen from one of its processes."""

    def __init__(self, job: Job, kind: str) -> None:
        """Knows of none yet.

        Args:
            job: The processes.
            kind: Of the calls: "read/tests/run".
        """
        self._job = job
        self._kind = f"storesvc/{kind}"

    def lead(self) -> str:
        """Returns the place of a call that process 0 makes; nobody has met there."""
        return f"{self._kind}/{token_hex(8)}"

    def take(self, index: int, place: str, *, seconds: float = 0.0) -> bool:
        """Gives a place to the next call of another process; False: it makes none in
        that time.

        Args:
            index: Of the process.
            place: Of the call of process 0.
            seconds: How long to wait for it.
        """
        taken = f"{self._kind}/taken/{index}"
        while True:
            number = self._job.passed(taken)
            if self._job.told(self._call(index, number), seconds=seconds) is None:
                return False
            settled = self._settled(index, number, place)
            self._job.advance(taken, number)
            if settled == place:
                return True

    def begin(self) -> int:
        """Tells process 0 of a call; returns its number."""
        made, token = f"{self._kind}/made", token_hex(8)
        while True:
            number = self._job.passed(made)
            key = self._call(self._job.index, number)
            # told first: what is counted and never told would be waited for for ever
            try:
                self._job.tell(key, token)
                is_own = self._job.told(key) == token
            except BaseException:
                with suppress(StoreError):
                    self.take_back(number)
                raise
            self._job.advance(made, number)
            if is_own:  # and not that of another thread
                return number

    def place_key(self, number: int) -> str:
        """Returns where process 0 tells the place of a call of this process."""
        return self._place_key(self._job.index, number)

    def take_back(self, number: int) -> str:
        """Takes back a call; returns its place where process 0 was faster, or else
        ""."""
        settled = self._settled(self._job.index, number, _TAKEN_BACK)
        return "" if settled == _TAKEN_BACK else settled

    def _settled(self, index: int, number: int, place: str) -> str:
        """What became of a call: this, or what was told before."""
        key = self._place_key(index, number)
        self._job.tell(key, place)
        settled = self._job.told(key)
        assert settled is not None
        return settled

    def _call(self, index: int, number: int) -> str:
        return f"{self._kind}/calls/{index}/{number}"

    def _place_key(self, index: int, number: int) -> str:
        return f"{self._kind}/places/{index}/{number}"
