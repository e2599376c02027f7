"""Handles of saves in the background: ``Save`` for callers, ``PendingSave`` inside."""

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from storesvc_client._rpc.process_exit import await_at_exit, forget
from storesvc_client._rpc.retry import trim
from storesvc_client._values.arguments import DurationLike, seconds_or_none
from storesvc_client._values.reports import Rehearsal, SaveReport
from storesvc_client._values.values import Checkpoint

if TYPE_CHECKING:
    from storesvc_client._save.upload import SaveResult


class PendingSave:
    """A save that was started; records whether its error has been raised."""

    def __init__(
        self,
        checkpoint: str,
        step: int,
        future: "Future[SaveResult]",
        written: "Future[None] | None" = None,
    ) -> None:
        """Creates the handle of a save, for which the exit of the interpreter waits.

        Args:
            checkpoint: Name of the checkpoint, ``namespace/run@step``.
            step: Its step.
            future: Result of the save, once it is committed.
            written: Done when this process has written its part; None if that is the
                whole save.
        """
        self.name = f"the save of {checkpoint}"
        self.step = step
        self._future = future
        self._written: Future[Any] = written or future
        self._observed = False
        await_at_exit(future, self.name)

    @classmethod
    def failed(cls, checkpoint: str, step: int, error: Exception) -> Self:
        """Returns the handle of a save that was not started because of an error, which
        was logged."""
        future: Future[SaveResult] = Future()
        future.set_exception(error)
        made = cls(checkpoint, step, future)
        made.ignore_error()
        return made

    @property
    def is_done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._future.done()

    @property
    def is_written(self) -> bool:
        """True once the part of this process has succeeded or failed."""
        return self._written.done()

    def result(self, seconds: float | None = None) -> "SaveResult":
        """Waits for the save and returns its result.

        Args:
            seconds: Seconds to wait; None waits without limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        try:
            return self._future.result(seconds)
        except BaseException as e:
            # an interrupted or timed-out wait has not observed the save's error
            if self._future.done():
                self.ignore_error()
            trim(e)
            raise

    def error(self, seconds: float | None) -> BaseException | None:
        """Waits for the save and returns its error, or None; marks it as observed.

        Args:
            seconds: Seconds to wait; None waits without limit.

        Raises:
            TimeoutError: The save is still running; it continues.
        """
        found = self._future.exception(seconds)
        self.ignore_error()
        if found is not None:
            trim(found)  # the caller may raise it
        return found

    def wait(self) -> None:
        """Waits for the end of the save; raises nothing."""
        wait([self._future])

    def wait_written(self, seconds: float) -> bool:
        """Waits until this process has finished its part, with or without an error;
        returns False after `seconds`."""
        return bool(wait([self._written], seconds).done)

    def ignore_error(self) -> None:
        """Marks the error as observed: neither later saves nor the exit raise it."""
        self.leave_error()
        forget(self._future)

    def leave_error(self) -> None:
        """Leaves the error to the caller, and to the exit if it does not ask for it."""
        self._observed = True

    def drop(self) -> None:
        """Marks the error as observed and waits for the end of the save."""
        self.ignore_error()
        self.wait()

    def raise_unseen(self) -> None:
        """Waits for the end of the save and raises its error, unless it was
        observed."""
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

    def _result(self, timeout: DurationLike | None) -> "SaveResult":
        return self._pending.result(seconds_or_none("timeout= of a save", timeout))


def is_written(save: Save, seconds: float = 0.0) -> bool:
    """Waits until this process has finished its part of a save, with or without an
    error; returns False after `seconds`."""
    return save._pending.wait_written(seconds)  # noqa: SLF001 - not public


def take_error(save: Save) -> None:
    """Leaves the error of a save to the caller: later saves and ``Client.close`` do not
    raise it."""
    save._pending.leave_error()  # noqa: SLF001 - not public
