"""The saves of a training loop that have not ended, and what became of the others."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from storesvc_client._save.saver import Save, is_written
from storesvc_client._values.triggers import OnFailure
from storesvc_client.errors import (
    InvalidRequestError,
    StoreError,
    UnsupportedLeafError,
)

POLL_SECONDS: Final = 0.1
"""Interval at which a wait for a save checks whether its server answers."""

_NOT_OF_ARGUMENTS: Final = frozenset({"INVALID_CHUNK", "REQUEST_ID_REUSED"})
"""Reasons of invalid requests that a later save of the same tree need not have."""

_log = logging.getLogger("storesvc_client")


class LoopSaves:
    """The saves of one loop, in order."""

    def __init__(self, run: str, on_failure: OnFailure) -> None:
        """Begins to count.

        Args:
            run: Name of the run.
            on_failure: How many failures in a row are tolerated.
        """
        self.saved_step: int | None = None
        """Newest step that was committed."""
        self.failures = 0
        """Saves that failed."""
        self.error: BaseException | None = None
        """Error of the newest save; None if it succeeded."""
        self._run = run
        self._tolerated = on_failure.count
        self._in_a_row = 0
        self.pending: deque[Save] = deque()
        """Saves that are not counted, oldest first."""

    @property
    def writing_step(self) -> int | None:
        """Step of the newest save whose part of this process is not written; None if
        all are."""
        if not self.pending or is_written(self.pending[-1]):
            return None
        return self.pending[-1].step

    def await_written(self, trouble: Callable[[], str]) -> bool:
        """Waits until this process has written its part of all saves; returns False
        once a save waits for a server that does not answer.

        Args:
            trouble: Describes such a wait; "" if there is none.
        """
        while self.pending and not is_written(self.pending[-1], POLL_SECONDS):
            if trouble():
                return False
        return True

    @property
    def is_over(self) -> bool:
        """True if the failures in a row are too many."""
        return self.error is not None and self._in_a_row > self._tolerated

    @property
    def is_hopeless(self) -> bool:
        """True if the newest save failed in a way that all later ones would, too."""
        return self.error is not None and is_of_arguments(self.error)

    def lost(self, *, counts: bool) -> BaseException | None:
        """Returns the error of a failed save that ends the loop; None if there is none.

        Args:
            counts: Whether this process counts failures in a row. In a job, process 0
                does, and raises when the others wait for its decision, so that all end
                at one step.
        """
        is_lost = self.is_hopeless or (counts and self.is_over)
        return self.error if is_lost else None

    def tolerate_none(self) -> None:
        """Tolerates no failure from now on, because no later save makes up for it."""
        self._tolerated = 0

    def settle(self) -> None:
        """Counts the saves that have ended, and logs failures. Does not wait."""
        while self.pending and self.pending[0].done():
            self._count(self.pending.popleft())

    def wait(self) -> None:
        """Waits for all saves, and counts them."""
        while self.pending:
            self.pending[0].exception()
            self.settle()

    def fail(self, step: int, error: BaseException) -> None:
        """Counts a save that failed, or could not be started."""
        self.error = error
        self.failures += 1
        self._in_a_row += 1
        goes_on = ""
        if not self.is_over and not self.is_hopeless:
            goes_on = f"; training continues, failure {self._in_a_row} in a row of "
            goes_on += f"{self._tolerated} that are tolerated"
        _log.error("save of %s@%d failed%s: %s", self._run, step, goes_on, error)

    def _count(self, save: Save) -> None:
        error = save.exception()
        if error is None:
            self.error, self._in_a_row, self.saved_step = None, 0, save.step
            _log.info("saved %s@%d", self._run, save.step)
        else:
            self.fail(save.step, error)


def is_of_arguments(error: BaseException) -> bool:
    """Returns whether an error is one of arguments, or of no store at all."""
    if not isinstance(error, StoreError):
        return True
    is_invalid = isinstance(error, InvalidRequestError | UnsupportedLeafError)
    return is_invalid and error.reason not in _NOT_OF_ARGUMENTS
