"""The handle on a save that runs in the background."""

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from storesvc_client._rpc.tracebacks import trim
from storesvc_client._values.values import Checkpoint, SaveReport

if TYPE_CHECKING:
    from storesvc_client._save.upload import SaveResult
    from storesvc_client.trees.nnx.rehearsal import Rehearsal


class Save:
    """A handle on a save that ``Run.save`` began."""

    def __init__(
        self,
        step: int,
        future: "Future[SaveResult]",
        written: "Future[None] | None" = None,
    ) -> None:
        """Creates the handle of a save.

        Args:
            step: Step of the checkpoint.
            future: Result of the save.
            written: Done when this process has written its part; None if that is the
                whole save.
        """
        self.step = step
        self.rehearsal: Future[Rehearsal] | None = None
        """The result of the restore rehearsal that ``easydel.save_state`` and
        ``save_model`` start; None if this save is not rehearsed."""
        self._future = future
        self._written: Future[Any] = written or future
        self._observed = False

    @classmethod
    def failed(cls, step: int, error: Exception) -> Self:
        """Returns the handle of a save that was not started."""
        future: Future[SaveResult] = Future()
        future.set_exception(error)
        return cls(step, future)

    def __repr__(self) -> str:
        return f"<Save of step {self.step}, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Returns whether the save has ended, with or without an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Waits for the save and returns the committed checkpoint.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save has not ended yet; it continues.
        """
        return self._wait(timeout).checkpoint

    def report(self, timeout: float | None = None) -> SaveReport:
        """Waits for the save and returns the bytes sent and reused, and its timings.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save has not ended yet; it continues.
        """
        return self._wait(timeout).report

    def _wait(self, timeout: float | None) -> "SaveResult":
        try:
            return self._future.result(timeout)
        except BaseException as e:
            # an interrupted or timed-out wait has not observed the save's error
            self._observed = self._future.done()
            trim(e)
            raise

    @property
    def is_written(self) -> bool:
        """True once this process has finished its part."""
        return self._written.done()

    def wait_written(self, seconds: float) -> bool:
        """Waits until this process has finished its part, with or without an error;
        returns False after `seconds`."""
        return bool(wait([self._written], seconds).done)

    def wait(self) -> None:
        """Waits for the end of the save; raises nothing."""
        wait([self._future])

    def forget(self) -> None:
        """Marks the error as observed, so that later saves do not raise it."""
        self._observed = True

    def drop(self) -> None:
        """Marks the error as observed and waits for the end of the save."""
        self.forget()
        self.wait()

    def raise_unseen(self) -> None:
        """Waits for the end of the save and raises its error, unless it was
        observed."""
        self.wait()
        if not self._observed:
            self.result()
