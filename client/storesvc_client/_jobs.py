"""Jobs: the processes that save one state together, and what they tell each other.

A job has a board: short texts under keys, that every process can read as soon as one
has written them. It carries names and bad news, never bytes, and nobody waits on it for
more than one other process.
"""

import json
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
    """A checkpoint that all processes of a job read."""

    def __init__(self, job: Job, what: str, *, patience: timedelta) -> None:
        """Begins.

        Args:
            job: The processes.
            what: Is read, as all of them ask for it: ``namespace/run@latest``.
            patience: How long to wait for a process that does not read.
        """
        self.job = job
        self._what = what
        self._seconds = patience.total_seconds()
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
        outcome = self._told(key, 0, self._seconds)
        if outcome.failure:
            kind = BY_REASON.get(outcome.reason, UnavailableError)
            raise kind(outcome.failure, reason=outcome.reason)
        return outcome.name

    def check(self, digest: str) -> None:
        """Returns once all processes are about to read the same.

        Args:
            digest: Of what this process has planned for all of them.

        Raises:
            InvalidRequestError: One has planned otherwise; names it.
            UnavailableError: One does not read; names it.
        """
        board = f"{self._board}/{self.job.ordinal(f'plan {self._board}')}"
        self.job.tell(f"{board}/{self.job.index}", Outcome(name=digest).to_text())
        if self.job.index == 0:
            try:
                self._compare(board, digest)
            except StoreError as e:
                verdict = Outcome(failure=str(e), reason=type(e).__name__)
                self.job.tell(f"{board}/verdict", verdict.to_text())
                raise
            self.job.tell(f"{board}/verdict", Outcome().to_text())
            return
        # process 0 may have waited for others before it tells
        verdict = self._told(f"{board}/verdict", 0, 2 * self._seconds)
        if verdict.failure:
            is_other = verdict.reason == InvalidRequestError.__name__
            raise (InvalidRequestError if is_other else UnavailableError)(
                verdict.failure
            )

    def _compare(self, board: str, digest: str) -> None:
        for index in range(1, self.job.count):
            told = self._told(f"{board}/{index}", index, self._seconds)
            if told.name != digest:
                raise InvalidRequestError(
                    f"restore of {self._what}: {process_name(self.job, index)} asks "
                    f"for other leaves, shardings or another checkpoint than "
                    f"{process_name(self.job, 0)}; restore alike in all processes, or "
                    "with processes='this'"
                )

    def _told(self, key: str, by: int, seconds: float) -> Outcome:
        """What a process has told."""
        text = self.job.told(key, seconds=seconds)
        if text is None:
            raise UnavailableError(
                f"restore of {self._what}: {process_name(self.job, by)} of "
                f"{self.job.count} has not asked for it in {seconds:g} s; "
                "restore in all processes of the job, or with processes='this'"
            )
        return Outcome.of_text(text)


def introduce(job: Job, host: str) -> None:
    """Tells the others where this process runs."""
    job.tell(_HOST.format(job.index), host)


def process_name(job: Job, index: int) -> str:
    """Returns what messages call a process."""
    host = job.told(_HOST.format(index))
    return f"process {index} ({host})" if host else f"process {index}"
