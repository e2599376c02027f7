"""A save in the background."""

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Self

from storesvc_client._rpc.tracebacks import trim
from storesvc_client._values.values import Checkpoint, SaveReport

if TYPE_CHECKING:
    from storesvc_client._save.upload import Saved
    from storesvc_client.trees.nnx.rehearsal import Rehearsal


class Save:
    """A handle on a save that ``Run.save`` began."""

    def __init__(
        self,
        step: int,
        future: "Future[Saved]",
        written: "Future[None] | None" = None,
    ) -> None:
        """Watches a save.

        Args:
            step: Of the checkpoint.
            future: Its end.
            written: The end of what this process does of it; None: that is all of it.
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
        """Returns the handle of a save that was not begun."""
        future: Future[Saved] = Future()
        future.set_exception(error)
        return cls(step, future)

    def __repr__(self) -> str:
        return f"<Save of step {self.step}, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Waits for the end, and returns the committed checkpoint.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            StoreError: What the save failed with.
            TimeoutError: It has not ended yet; it goes on.
        """
        return self._wait(timeout).checkpoint

    def report(self, timeout: float | None = None) -> SaveReport:
        """Waits for the end, and returns how many bytes were sent and reused, and what
        took how long.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            StoreError: What the save failed with.
            TimeoutError: It has not ended yet; it goes on.
        """
        return self._wait(timeout).report

    def _wait(self, timeout: float | None) -> "Saved":
        try:
            return self._future.result(timeout)
        except BaseException as e:
            # a wait that was interrupted, or ran out, has not seen the end
            self._observed = self._future.done()
            trim(e)
            raise

    @property
    def is_written(self) -> bool:
        """Whether this process has ended its part."""
        return self._written.done()

    def wait_written(self, seconds: float) -> bool:
        """Waits for the end of what this process does of it, good or bad; returns
        whether it has ended in that time."""
        return bool(wait([self._written], seconds).done)

    def wait(self) -> None:
        """Waits for the end, good or bad."""
        wait([self._future])

    def forget(self) -> None:
        """Has nobody else told of its end, whose caller knows that it is given up."""
        self._observed = True

    def drop(self) -> None:
        """Forgets it, and waits for its end."""
        self.forget()
        self.wait()

    def raise_unseen(self) -> None:
        """Waits for the end, and raises its error if nobody has seen it yet."""
        self.wait()
        if not self._observed:
            self.result()
