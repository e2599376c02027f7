"""The saves of a training loop: at most one at a time, whose failure is counted."""

import logging

from storesvc_client._save.handle import Save
from storesvc_client._values.triggers import OnFailure
from storesvc_client.errors import (
    InvalidRequestError,
    StoreError,
    UnsupportedLeafError,
)

_log = logging.getLogger(__name__)


class LoopSaves:
    """The save that is running, and what became of the saves before it."""

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
        self._running: Save | None = None

    @property
    def is_pending(self) -> bool:
        """True while a save is not counted."""
        return self._running is not None

    @property
    def running_step(self) -> int | None:
        """Step of the save that is running; None if none is."""
        is_running = self._running is not None and not self._running.done()
        return self._running.step if self._running and is_running else None

    @property
    def is_over(self) -> bool:
        """True if the failures in a row are too many."""
        return self.error is not None and self._in_a_row > self._tolerated

    @property
    def is_hopeless(self) -> bool:
        """True if the newest save failed in a way that all later ones would, too."""
        return self.error is not None and is_of_arguments(self.error)

    def tolerate_none(self) -> None:
        """Tolerates no failure from now on, because no later save makes up for it."""
        self._tolerated = 0

    def add(self, save: Save) -> None:
        """Adds a save that was started; none is running."""
        self._running = save

    def settle(self) -> None:
        """Counts the save if it has ended, and logs its failure. Does not wait."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the running save, and counts it."""
        if self._running is None:
            return
        error = self._running.exception()
        step, self._running = self._running.step, None
        if error is None:
            self.error, self._in_a_row, self.saved_step = None, 0, step
            _log.info("saved %s@%d", self._run, step)
        else:
            self.fail(step, error)

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


def is_of_arguments(error: BaseException) -> bool:
    """Returns whether an error is one of arguments, or of no store at all."""
    if not isinstance(error, StoreError):
        return True
    return isinstance(error, InvalidRequestError | UnsupportedLeafError)
