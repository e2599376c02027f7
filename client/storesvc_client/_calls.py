"""Calls that the processes of a job make together, and how each finds those of the
others.

Process 0 leads: it numbers its calls, and tells what each is for. The others take part
in them in their order, so that what fails in one process fails the same call of all.

One that calls alone, by mistake, must not put all later calls out of step. Where
process 0 does not come, its next call is still the next one. Where process 0 waited for
another in vain, that one passes over the call, once process 0 has called again for what
it wants itself.
"""

import time
from collections.abc import Callable
from typing import Final

from storesvc_client._jobs import Job, Outcome, ordinal

AGAIN_SECONDS: Final = 5.0
"""How long who comes too late for a call waits for the next."""


class Calls:
    """The calls of a job of one kind, seen from one of its processes.

    Each call has a place on the board, under which stand what process 0 ``asked`` for
    and its ``verdict`` on the beginning.
    """

    def __init__(self, job: Job, kind: str) -> None:
        """Knows of none yet.

        Args:
            job: The processes.
            kind: Of the calls: "read/tests/run".
        """
        self._job = job
        self._kind = f"storesvc/{kind}"

    def lead(self) -> str:
        """Returns the place of the next call of process 0, which makes it."""
        return self._place(ordinal(self._job, self._kind))

    def next(self) -> str:
        """Returns the place of the next call, which this process takes part in whatever
        it is."""
        while True:
            number = self._job.passed(self._kind)
            while self._was_in_vain(number):
                number += 1
            if self._take(number):
                return self._place(number)

    def follow(
        self, asked: str, end: float, awaited: Callable[[str, float], Outcome | None]
    ) -> tuple[str, Outcome] | None:
        """Returns the place of the call of process 0 that this one takes part in, and
        what it asks for; None: there is none in time.

        Args:
            asked: What this process asks for.
            end: Until when to wait, of ``time.monotonic()``.
            awaited: Waits until then for what process 0 asks for at a place.
        """
        while True:
            number = self._job.passed(self._kind)
            told = awaited(self._place(number), end)
            if told is None:
                return None
            if self._was_in_vain(number):
                number, told = self._again(number, told, asked, end)
            if self._take(number):
                return self._place(number), told

    def _again(
        self, number: int, told: Outcome, asked: str, end: float
    ) -> tuple[int, Outcome]:
        """The later call of process 0 for the same as this process asks for, or else
        the one that it came too late for, and what process 0 asked for there."""
        later, end = number, min(end, time.monotonic() + AGAIN_SECONDS)
        while True:
            later += 1
            left = max(0.0, end - time.monotonic())
            text = self._job.told(asked_key(self._place(later)), seconds=left)
            if text is None:
                return number, told
            again = Outcome.of_text(text)
            if again.asked == asked and not self._was_in_vain(later):
                return later, again

    def _was_in_vain(self, number: int) -> bool:
        """Whether process 0 has given up a call, as another did not come."""
        text = self._job.told(verdict_key(self._place(number)))
        return text is not None and Outcome.of_text(text).is_absence

    def _take(self, number: int) -> bool:
        """Has a call behind this process; False: another thread had, or a later one."""
        passed = self._job.passed(self._kind)
        return number >= passed and self._job.advance(self._kind, passed, number + 1)

    def _place(self, number: int) -> str:
        return f"{self._kind}/{number}"


def asked_key(place: str) -> str:
    """Returns where process 0 tells what it asks for."""
    return f"{place}/asked"


def verdict_key(place: str) -> str:
    """Returns where it is told whether a call begins."""
    return f"{place}/begin/0"
