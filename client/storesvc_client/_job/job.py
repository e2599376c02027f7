"""Jobs: the processes that save one state together, and what they tell each other.

A job has a board: short texts under keys, that every process can read as soon as one
has written them. It carries names and bad news, never bytes, and nobody waits on it for
more than one other process.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Protocol, Self

from storesvc_client.errors import PeerFailedError, StoreError

_HOST: Final = "storesvc/host/{}"

_KINDS: Final[Mapping[str, type[StoreError]]] = {
    kind.__name__: kind for kind in StoreError.__subclasses__()
}


class Job(Protocol):
    """The processes of a job, seen from one of them; made by ``_pytree.jax_job``."""

    @property
    def index(self) -> int:
        """Of this process."""

    @property
    def count(self) -> int:
        """Of all processes."""

    def passed(self, what: str) -> int:
        """Returns how many things of a kind are behind this process: the processes of a
        job do the same things in the same order."""

    def advance(self, what: str, passed: int) -> bool:
        """Has one more of them behind it; False: it was not so many before."""

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
    kind: str = ""
    """The name of the error that it is."""
    asked: str = ""
    """What was asked for, as messages call it."""

    def to_text(self) -> str:
        """Returns it as it is written on the board."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Returns what was written."""
        return cls(**json.loads(text))

    @property
    def error(self) -> StoreError:
        """Of its failure."""
        return _KINDS.get(self.kind, PeerFailedError)(self.failure, reason=self.reason)


class JointSave:
    """One save of a job: what its processes tell each other of it."""

    def __init__(self, job: Job, run: str, step: int) -> None:
        """Begins, and tells so.

        Args:
            job: The processes.
            run: Of the checkpoint.
            step: Its own. Saved twice, it is two saves.
        """
        name = f"{run}@{step}"
        self.job = job
        self._step = str(step)
        self._steps = f"storesvc/steps/{run}"
        self._board = f"storesvc/save/{name}/{ordinal(job, name)}"
        with suppress(StoreError):  # who is not told is told the rest
            number = ordinal(job, self._steps)
            job.tell(f"{self._steps}/{job.index}/{number}", self._step)

    def other_step(self, index: int) -> str:
        """Returns the step that another process has saved last, or is saving; "": it is
        this one, or not known."""

        def step(number: int) -> str | None:
            return self.job.told(f"{self._steps}/{index}/{number}")

        with suppress(StoreError):
            beyond = 1
            while step(beyond - 1) is not None:
                beyond *= 2
            saves = bisect_left(range(beyond), 1, key=lambda n: step(n) is None)
            last = step(saves - 1)
            return "" if last in (None, self._step) else str(last)
        return ""

    def begin(self, upload: str) -> None:
        """Tells which upload process 0 has begun."""
        self.job.tell(f"{self._board}/begun", Outcome(name=upload).to_text())

    def begun(self, *, seconds: float) -> Outcome | None:
        """Returns what process 0 has begun, or why not; None: nothing in that time."""
        return self._told("begun", seconds)

    def end(self, upload: str) -> None:
        """Tells that an upload was committed."""
        self.job.tell(f"{self._board}/ended", Outcome(name=upload).to_text())

    def tell_last(self) -> None:
        """Tells that this process was the last to finish."""
        who = process_name(self.job, self.job.index)
        self.job.tell(f"{self._board}/last", who)

    def last(self, *, seconds: float) -> str:
        """Returns which process was the last to finish; "": nothing in that time."""
        return self.job.told(f"{self._board}/last", seconds=seconds) or ""

    def fail(self, error: BaseException) -> None:
        """Tells why this process has given up its part."""
        with suppress(StoreError):  # the error that this is about is the one to raise
            who = process_name(self.job, self.job.index)
            failure = f"{who}: {str(error) or type(error).__name__}"
            told = Outcome(failure=failure).to_text()
            self.job.tell(f"{self._board}/ended", told)
            if self.job.index == 0:
                self.job.tell(f"{self._board}/begun", told)

    def ended(self, *, seconds: float = 0.0) -> Outcome | None:
        """Returns how it ended; None: it has not in that time."""
        return self._told("ended", seconds)

    def _told(self, key: str, seconds: float) -> Outcome | None:
        text = self.job.told(f"{self._board}/{key}", seconds=seconds)
        return None if text is None else Outcome.of_text(text)


def ordinal(job: Job, what: str) -> int:
    """Returns how many things of a kind were behind a process, before this one is."""
    while True:
        passed = job.passed(what)
        if job.advance(what, passed):
            return passed


def introduce(job: Job, host: str) -> None:
    """Tells the others where this process runs."""
    job.tell(_HOST.format(job.index), host)


def process_name(job: Job, index: int) -> str:
    """Returns what messages call a process."""
    host = job.told(_HOST.format(index))
    return f"process {index} ({host})" if host else f"process {index}"
