"""A checkpoint that all processes of a job open: which one it is, process 0 tells."""

from collections.abc import Callable
from datetime import timedelta

from storesvc_client._jobs import Job, Outcome
from storesvc_client._joint_restore import JointRestore, absence
from storesvc_client.errors import BY_REASON, StoreError, UnavailableError


class JointReading:
    """A checkpoint that all processes of a job open."""

    def __init__(self, job: Job, what: str, *, patience: timedelta) -> None:
        """Begins.

        Args:
            job: The processes.
            what: Is read, as all of them ask for it: ``namespace/run@latest``.
            patience: How long to wait for a process that does not read.
        """
        self.job = job
        self.what = what
        self.seconds = patience.total_seconds()
        self._board = f"storesvc/read/{what}/{job.ordinal(f'read {what}')}"

    def agreed(self, resolve: Callable[[], str]) -> str:
        """Returns the name of the checkpoint: what process 0 finds, for all.

        Args:
            resolve: Finds it.

        Raises:
            StoreError: What process 0 was refused with.
            UnavailableError: It does not read the checkpoint.
        """
        key = f"{self._board}/which"
        if self.job.index == 0:
            try:
                found = resolve()
            except StoreError as e:
                refusal = Outcome(failure=str(e), reason=e.reason)
                self.job.tell(key, refusal.to_text())
                raise
            self.job.tell(key, Outcome(name=found).to_text())
            return found
        text = self.job.told(key, seconds=self.seconds)
        if text is None:
            raise UnavailableError(absence(self.job, 0, self.what, self.seconds))
        outcome = Outcome.of_text(text)
        if outcome.failure:
            kind = BY_REASON.get(outcome.reason, UnavailableError)
            raise kind(outcome.failure, reason=outcome.reason)
        return outcome.name

    def restore(self) -> "JointRestore":
        """Returns a restore of it by all processes."""
        board = f"{self._board}/{self.job.ordinal(f'restore {self._board}')}"
        return JointRestore(self.job, self.what, board, seconds=self.seconds)
