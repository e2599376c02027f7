"""Handles of saves in the background: ``Save`` for callers, ``PendingSave`` inside."""

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from storesvc_client._rpc.tracebacks import trim
from storesvc_client._values.durations import DurationLike, seconds_or_none
from storesvc_client._values.values import Checkpoint, SaveReport

if TYPE_CHECKING:
    from storesvc_client._save.upload import Saved
    from storesvc_client.trees.nnx.rehearsal import Rehearsal


class PendingSave:
    """A save that was started; records whether its error has been raised."""

    def __init__(
        self,
        step: int,
        future: "Future[Saved]",
        written: "Future[None] | None" = None,
    ) -> None:
        """Observes a save.

        Args:
            step: Step of the checkpoint.
            future: Result of the save, once it is committed.
            written: End of the part of this process; None if that is all of the save.
        """
        self.step = step
        self._future = future
        self._written: Future[Any] = written or future
        self._observed = False

    @classmethod
    def failed(cls, step: int, error: Exception) -> Self:
        """Returns the handle of a save that was not started because of an error."""
        future: Future[Saved] = Future()
        future.set_exception(error)
        return cls(step, future)

    @property
    def is_done(self) -> bool:
        """Whether the save has succeeded or failed."""
        return self._future.done()

    @property
    def is_written(self) -> bool:
        """Whether the part of this process has succeeded or failed."""
        return self._written.done()

    def result(self, seconds: float | None = None) -> "Saved":
        """Returns the result of the save.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running.
        """
        try:
            return self._future.result(seconds)
        except BaseException as e:
            # a wait that was interrupted or timed out has not seen the error
            self._observed = self._future.done()
            trim(e)
            raise

    def error(self, seconds: float | None) -> BaseException | None:
        """Returns the error of the save, or None, and marks it as observed.

        Raises:
            TimeoutError: The save is still running.
        """
        found = self._future.exception(seconds)
        self._observed = True
        return found

    def wait(self) -> None:
        """Waits until the save has succeeded or failed."""
        wait([self._future])

    def wait_written(self, seconds: float) -> bool:
        """Waits for the part of this process; returns whether it has ended."""
        return bool(wait([self._written], seconds).done)

    def ignore_error(self) -> None:
        """Marks the error as observed; it will not be raised again."""
        self._observed = True

    def drop(self) -> None:
        """Waits for the end of the save and ignores its error."""
        self.ignore_error()
        self.wait()

    def raise_unseen(self) -> None:
        """Waits for the end of the save; raises its error if it was not raised yet."""
        self.wait()
        if not self._observed:
            self.result()


class Save:
    """A save in the background; returned by ``Run.save``. Threads may share it.

    >>> save = run.save(100, state)
    >>> save.result().step  # waits for the commit
    100
    """

    def __init__(self, pending: PendingSave) -> None:
        self.step = pending.step
        """Step of the checkpoint."""
        self.rehearsal: Future[Rehearsal] | None = None
        """Result of the restore rehearsal that ``easydel.save_state`` and
        ``save_model`` start; None if this save is not rehearsed."""
        self._pending = pending

    def __repr__(self) -> str:
        return f"<Save of step {self.step}, {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Returns whether the save has succeeded or failed; does not wait."""
        return self._pending.is_done

    def result(self, timeout: DurationLike | None = None) -> Checkpoint:
        """Waits for the commit, and returns the committed checkpoint.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        return self._result(timeout).checkpoint

    def report(self, timeout: DurationLike | None = None) -> SaveReport:
        """Waits for the commit, and returns bytes sent, bytes reused and timings.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        return self._result(timeout).report

    def exception(self, timeout: DurationLike | None = None) -> BaseException | None:
        """Waits for the end of the save, and returns its error; None if it succeeded.

        The error then counts as seen: the next save and ``Client.close`` do not raise
        it again.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Returns:
            A ``StoreError``, the exception of a ``progress=`` callback, or None.

        Raises:
            TimeoutError: The save is still running; it continues.
        """
        return self._pending.error(seconds_or_none("timeout= of a save", timeout))

    def _result(self, timeout: DurationLike | None) -> "Saved":
        return self._pending.result(seconds_or_none("timeout= of a save", timeout))
