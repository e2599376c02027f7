"""The processes of a job, and the board on which they publish outcomes.

A job has a board: a key-value store of short texts, which every process can read as
soon as a process has written them. It carries resource names and errors, never data,
and no process waits on it for more than one other process.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self

from storesvc_client.errors import PeerFailedError, StoreError

if TYPE_CHECKING:
    from storesvc_client._job.departures import Departures

_HOST: Final = "storesvc/host/{}"

_TURN_SECONDS: Final = 1.0
"""Interval at which a save that waits looks for processes that have left its loop."""

_KINDS: Final[Mapping[str, type[StoreError]]] = {
    kind.__name__: kind for kind in StoreError.__subclasses__()
}


class Job(Protocol):
    """The processes of a job, seen from one of them; created by ``_pytree.jax_job``."""

    @property
    def index(self) -> int:
        """Index of this process."""

    @property
    def count(self) -> int:
        """Number of processes."""

    def passed(self, what: str) -> int:
        """Returns how many events of one kind this process has counted. All processes
        of a job do the same things in the same order."""

    def advance(self, what: str, passed: int) -> bool:
        """Counts one more event; returns False if the count was not `passed`."""

    def post(self, key: str, text: str) -> None:
        """Writes a text under a key, unless the key exists."""

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        """Waits for the text under a key and returns it; None after `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome that one process publishes for the others."""

    name: str = ""
    """Name of an upload or a checkpoint, or other data of a success."""
    failure: str = ""
    """Process and cause of a failure; "" after a success."""
    reason: str = ""
    """Error reason of the failure, if the store gave one."""
    kind: str = ""
    """Class name of the error."""
    asked: str = ""
    """The checkpoint requested, as shown in messages."""

    def to_text(self) -> str:
        """Returns its JSON for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Parses the JSON of an outcome."""
        return cls(**json.loads(text))

    @property
    def error(self) -> StoreError:
        """The failure as an error."""
        return _KINDS.get(self.kind, PeerFailedError)(self.failure, reason=self.reason)


class JointSave:
    """One save of a job: what its processes publish about it."""

    def __init__(
        self, job: Job, run: str, step: int, loop: "Departures | None" = None
    ) -> None:
        """Counts the save and publishes its step.

        Args:
            job: The processes.
            run: Name of the run.
            step: Step of the checkpoint; saving it twice makes two joint saves.
            loop: Departures from the training loop that saves; None: there is no loop.
        """
        name = f"{run}@{step}"
        self.job = job
        self._loop = loop
        self._number = 0 if loop is None else loop.count_save()
        self._step = str(step)
        self._steps = f"storesvc/steps/{run}"
        self._board = f"storesvc/save/{name}/{ordinal(job, name)}"
        with suppress(StoreError):  # the step is only for messages of other processes
            number = ordinal(job, self._steps)
            job.post(f"{self._steps}/{job.index}/{number}", self._step)

    def other_step(self, index: int) -> str:
        """Returns the step that another process saves or has saved last; "" if it is
        the step of this save or unknown."""

        def step(number: int) -> str | None:
            return self.job.read(f"{self._steps}/{index}/{number}")

        with suppress(StoreError):
            beyond = 1
            while step(beyond - 1) is not None:
                beyond *= 2
            saves = bisect_left(range(beyond), 1, key=lambda n: step(n) is None)
            last = step(saves - 1)
            return "" if last in (None, self._step) else str(last)
        return ""

    def begin(self, upload: str) -> None:
        """Publishes the upload that process 0 has begun."""
        self.job.post(f"{self._board}/begun", Outcome(name=upload).to_text())

    def begun(self, *, seconds: float) -> Outcome | None:
        """Waits for the upload that process 0 begins, or its failure; None after
        `seconds`."""
        return self._read("begun", seconds)

    def publish_items(self, text: str) -> None:
        """Publishes the items of this process, without their values."""
        self.job.post(f"{self._board}/items/{self.job.index}", text)

    def publish_all_items(self, text: str) -> None:
        """Publishes the items of all processes, in process 0."""
        self.job.post(f"{self._board}/all-items", text)

    def items_of(self, index: int | None, *, seconds: float) -> str | None:
        """Waits for the published items of a process, or with None of all processes;
        returns None after `seconds`."""
        place = "all-items" if index is None else f"items/{index}"
        return self.job.read(f"{self._board}/{place}", seconds=seconds)

    def end(self, upload: str) -> None:
        """Publishes that an upload was committed."""
        self.job.post(f"{self._board}/ended", Outcome(name=upload).to_text())

    def publish_last(self) -> None:
        """Publishes that this process was the last to finish."""
        name = process_name(self.job, self.job.index)
        self.job.post(f"{self._board}/last", name)

    def last(self, *, seconds: float) -> str:
        """Waits for the name of the process that finished last; "" after `seconds`."""
        return self.job.read(f"{self._board}/last", seconds=seconds) or ""

    def fail(self, error: BaseException) -> None:
        """Publishes the error of this process."""
        with suppress(StoreError):  # the caller raises the original error
            name = process_name(self.job, self.job.index)
            failure = f"{name}: {str(error) or type(error).__name__}"
            outcome = Outcome(failure=failure).to_text()
            self.job.post(f"{self._board}/ended", outcome)
            if self.job.index == 0:
                self.job.post(f"{self._board}/begun", outcome)

    def ended(self, *, seconds: float = 0.0) -> Outcome | None:
        """Waits for the outcome of the save; None after `seconds`."""
        return self._read("ended", seconds)

    def _read(self, key: str, seconds: float) -> Outcome | None:
        """Waits for an outcome; that of a save in a loop is a failure once another
        process has left the loop before it."""
        place, left = f"{self._board}/{key}", seconds
        while True:
            turn = left if self._loop is None else min(left, _TURN_SECONDS)
            text = self.job.read(place, seconds=turn)
            if text is not None:
                return Outcome.of_text(text)
            if self._loop is not None and (why := self._loop.before(self._number)):
                return Outcome(failure=why)
            left -= turn
            if left <= 0:
                return None


def ordinal(job: Job, what: str) -> int:
    """Counts an event of this process; returns how many there were before it."""
    while True:
        passed = job.passed(what)
        if job.advance(what, passed):
            return passed


def introduce(job: Job, host: str) -> None:
    """Publishes the host of this process."""
    job.post(_HOST.format(job.index), host)


def process_name(job: Job, index: int) -> str:
    """Returns the name of a process in messages."""
    host = job.read(_HOST.format(index))
    return f"process {index} ({host})" if host else f"process {index}"
