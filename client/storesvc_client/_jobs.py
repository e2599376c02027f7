"""Jobs: the processes that save one state together, and what they tell each other.

A job has a board: short texts under keys, that every process can read as soon as one
has written them. It carries names and bad news, never bytes, and nobody waits on it for
more than one other process.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Protocol, Self

from storesvc_client.errors import (
    BY_REASON,
    InvalidRequestError,
    StoreError,
    UnavailableError,
)

_HOST: Final = "storesvc/host/{}"


class Job(Protocol):
    """The processes of a job, seen from one of them; made by ``trees.processes``."""

    @property
    def index(self) -> int:
        """Of this process."""

    @property
    def count(self) -> int:
        """Of all processes."""

    def ordinal(self, what: str) -> int:
        """Returns how often this process has asked for the ordinal of a thing before:
        the processes of a job do the same things in the same order."""

    def tell(self, key: str, text: str) -> None:
        """Writes a text under a key; where one is there already, that stays."""

    def told(self, key: str, *, seconds: float = 0.0) -> str | None:
        """Returns the text under a key, once there is one; None: there was none in
        that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one process tells the others."""

    name: str = ""
    """The resource that it is about: an upload, or a checkpoint."""
    failure: str = ""
    """Why it was given up, and by which process; "": it was not."""
    reason: str = ""
    """Of that, where the store had one."""

    def to_text(self) -> str:
        """Returns it as it is written on the board."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Returns what was written."""
        return cls(**json.loads(text))


class JointSave:
    """One save of a job: what its processes tell each other of it."""

    def __init__(self, job: Job, name: str) -> None:
        """Begins.

        Args:
            job: The processes.
            name: Of the checkpoint. Saved twice, it is two saves.
        """
        self.job = job
        self._board = f"storesvc/save/{name}/{job.ordinal(name)}"

    def begin(self, upload: str) -> None:
        """Tells which upload process 0 has begun."""
        self.job.tell(f"{self._board}/begun", Outcome(name=upload).to_text())

    def begun(self, *, seconds: float) -> Outcome | None:
        """Returns what process 0 has begun, or why not; None: nothing in that time."""
        return self._told("begun", seconds)

    def end(self, upload: str) -> None:
        """Tells that an upload was committed."""
        self.job.tell(f"{self._board}/ended", Outcome(name=upload).to_text())

    def fail(self, error: BaseException) -> None:
        """Tells why this process has given up its part."""
        who = process_name(self.job, self.job.index)
        told = Outcome(failure=f"{who}: {str(error) or type(error).__name__}").to_text()
        with suppress(StoreError):  # the error that this is about is the one to raise
            self.job.tell(f"{self._board}/ended", told)
            if self.job.index == 0:
                self.job.tell(f"{self._board}/begun", told)

    def ended(self, *, seconds: float = 0.0) -> Outcome | None:
        """Returns how it ended; None: it has not in that time."""
        return self._told("ended", seconds)

    def _told(self, key: str, seconds: float) -> Outcome | None:
        text = self.job.told(f"{self._board}/{key}", seconds=seconds)
        return None if text is None else Outcome.of_text(text)


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
            raise UnavailableError(self.absence(0))
        outcome = Outcome.of_text(text)
        if outcome.failure:
            kind = BY_REASON.get(outcome.reason, UnavailableError)
            raise kind(outcome.failure, reason=outcome.reason)
        return outcome.name

    def restore(self) -> "JointRestore":
        """Returns a restore of it by all processes."""
        board = f"{self._board}/{self.job.ordinal(f'restore {self._board}')}"
        return JointRestore(self, board)

    def absence(self, index: int) -> str:
        """Returns what messages say of a process that does not read it in time."""
        return (
            f"restore of {self.what}: {process_name(self.job, index)} of "
            f"{self.job.count} has not asked for it in {self.seconds:g} s; "
            "restore in all processes of the job, or with processes='this'"
        )


class JointRestore:
    """One restore of a job: whether all processes are about to begin it.

    From then on each waits for the others, so either all begin or none does. What
    stands on the board first is the verdict: that of process 0, which hears all, unless
    another could not wait for it so long.
    """

    def __init__(self, reading: JointReading, board: str) -> None:
        """Begins.

        Args:
            reading: Of the checkpoint.
            board: Of this restore.
        """
        self.job = reading.job
        self._reading = reading
        self._board = board

    def check(self, digest: str, choice: str) -> str:
        """Returns once all processes are about to read the same: what process 0 has
        chosen.

        Args:
            digest: Of what this process has planned for all of them.
            choice: Of this process.

        Raises:
            InvalidRequestError: One has planned otherwise; names it.
            UnavailableError: One does not read, or failed; names it.
        """
        if self.job.index == 0:
            verdict = self._stands(self._compared(digest, choice))
        else:
            self.job.tell(self._key(self.job.index), Outcome(name=digest).to_text())
            verdict = self._verdict()
        if verdict.failure:
            is_other = verdict.reason == InvalidRequestError.__name__
            raise (InvalidRequestError if is_other else UnavailableError)(
                verdict.failure
            )
        return verdict.name

    def fail(self, error: BaseException) -> None:
        """Tells why this process does not begin; where it was to, it changes
        nothing."""
        index = self.job.index
        told = f"{process_name(self.job, index)}: {str(error) or type(error).__name__}"
        outcome = Outcome(
            failure=f"restore of {self._reading.what} was given up by another process "
            f"of the job: {told}"
        )
        with suppress(StoreError):  # the error that this is about is the one to raise
            self.job.tell(self._key(index), outcome.to_text())

    def _key(self, index: int) -> str:
        """Of what a process tells: process 0, the verdict."""
        return f"{self._board}/{index}"

    def _compared(self, digest: str, choice: str) -> Outcome:
        """The verdict of process 0."""
        end = time.monotonic() + self._reading.seconds
        for index in range(1, self.job.count):
            left = max(0.0, end - time.monotonic())
            text = self.job.told(self._key(index), seconds=left)
            if text is None:
                return Outcome(failure=self._reading.absence(index))
            told = Outcome.of_text(text)
            if told.failure:
                return told
            if told.name != digest:
                return Outcome(
                    failure=f"restore of {self._reading.what}: "
                    f"{process_name(self.job, index)} asks for other leaves, shardings "
                    f"or another checkpoint than {process_name(self.job, 0)}; restore "
                    "alike in all processes, or with processes='this'",
                    reason=InvalidRequestError.__name__,
                )
        return Outcome(name=choice)

    def _verdict(self) -> Outcome:
        """The verdict, for the others: process 0 may have waited for some of them
        before it tells."""
        text = self.job.told(self._key(0), seconds=2 * self._reading.seconds)
        if text is None:
            return self._stands(Outcome(failure=self._reading.absence(0)))
        return Outcome.of_text(text)

    def _stands(self, verdict: Outcome) -> Outcome:
        """The verdict that stands, be it this or one that was there before."""
        self.job.tell(self._key(0), verdict.to_text())
        text = self.job.told(self._key(0))
        assert text is not None
        return Outcome.of_text(text)


def introduce(job: Job, host: str) -> None:
    """Tells the others where this process runs."""
    job.tell(_HOST.format(job.index), host)


def process_name(job: Job, index: int) -> str:
    """Returns what messages call a process."""
    host = job.told(_HOST.format(index))
    return f"process {index} ({host})" if host else f"process {index}"
