"""The processes of a job, and the board on which they publish outcomes.

A job has a board: a key-value store of short texts, which every process can read as
soon as a process has written them. It carries resource names and errors, never data,
and no process waits on it for more than one other process.

``Departures``: all processes of a training loop make the same saves in the same order,
so the number of a save within the loop names it in all of them. A process that leaves
publishes the number of the first save that it does not make. The others look for that
key while they wait in their save of this number, instead of until its lease expires; a
process that has found it fails its later saves, too. Saves that the process has made
before it left are not affected.

``Decisions``: process 0 publishes each decision with the step that it is about; the
others read the decisions in order, and wait for the next one without a limit, as they
would wait for process 0 in the next collective operation of jax. They stop waiting when
process 0 has left. Nothing is exchanged at other steps.

``JointCalls``: each joint call gets a key prefix on the board, where its processes
meet. Process 0 leads. Each other process announces each of its calls and waits. When
process 0 makes a call itself, it assigns a new key prefix to the next call of every
other process, in the order of that process's calls. A call without a prefix can be
withdrawn. So a call that one process makes alone, by mistake, leaves nothing behind
that would be matched with later joint calls.
"""

import json
import logging
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Final, Protocol, Self

from storesvc_client.errors import InvalidRequestError, PeerFailedError, StoreError

_log = logging.getLogger("storesvc_client")

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

    def count_passed(self, what: str) -> int:
        """Returns how many events of one kind this process has counted. All processes
        of a job do the same things in the same order."""

    def advance(self, what: str, passed: int) -> bool:
        """Counts one more event; returns False if the count was not `count_passed`."""

    def post(self, key: str, text: str) -> None:
        """Writes a text under a key, unless the key exists."""

    def replace(self, key: str, text: str) -> None:
        """Writes a text under a key, whether or not the key exists."""

    def increment(self, key: str) -> int:
        """Adds 1 to the number under a key, 0 at first, and returns it."""

    def delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""

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
    committed: str = ""
    """The checkpoint of a save: its message in base64."""
    last: str = ""
    """Name of the process of a save that finished last; "" if unknown."""

    def to_text(self) -> str:
        """Returns its JSON for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
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
        """Counts the save and publishes its step; saving it twice makes two joint
        saves."""
        name = f"{run}@{step}"
        self.job = job
        self._loop = loop
        self._number = 0 if loop is None else loop.count_save()
        self._step = str(step)
        self._steps = f"storesvc/steps/{run}"
        self._board = f"storesvc/save/{name}/{ordinal(job, name)}"
        self._has_left = False
        with suppress(StoreError):  # the step is only for messages of other processes
            job.replace(f"{self._steps}/{job.index}", self._step)

    def other_step(self, index: int) -> str:
        """Returns the step that another process saves or has saved last; "" if it is
        the step of this save or unknown."""
        with suppress(StoreError):
            last = self.job.read(f"{self._steps}/{index}")
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

    def finish(self) -> bool:
        """Counts that this process has finished; returns True in the last one."""
        return self.job.increment(f"{self._board}/finished") == self.job.count

    def claim_commit(self, turn: int) -> bool:
        """Returns whether this process is the first that claims to commit in a turn."""
        key, own = f"{self._board}/committer/{turn}", str(self.job.index)
        self.job.post(key, own)
        return self.job.read(key) == own

    def end(self, upload: str, committed: bytes, *, last: str) -> None:
        """Publishes the checkpoint of an upload, as a serialised message, and the name
        of the process that finished last."""
        text = b64encode(committed).decode()
        outcome = Outcome(name=upload, committed=text, last=last)
        self.job.post(f"{self._board}/ended", outcome.to_text())

    def leave(self) -> None:
        """Declares that this process reads nothing of this save any more; once all have
        left it, it is deleted from the board."""
        with suppress(StoreError):
            if not self._has_left:
                self._has_left = True
                if self.job.increment(f"{self._board}/left") == self.job.count:
                    self.job.delete(self._board)

    def fail(self, error: BaseException) -> None:
        """Publishes the error of this process."""
        with suppress(StoreError):  # the caller raises the original error
            name = process_name(self.job, self.job.index)
            failure = f"{name}: {str(error) or type(error).__name__}"
            outcome = Outcome(failure=failure).to_text()
            self.job.post(f"{self._board}/ended", outcome)
            if self.job.index == 0:
                self.job.post(f"{self._board}/begun", outcome)
        self.leave()

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
        passed = job.count_passed(what)
        if job.advance(what, passed):
            return passed


def introduce(job: Job, host: str) -> None:
    job.post(_HOST.format(job.index), host)


def process_name(job: Job, index: int) -> str:
    host = job.read(_HOST.format(index))
    return f"process {index} ({host})" if host else f"process {index}"


class Departures:
    """The departures from one loop, seen from one process."""

    def __init__(self, job: Job, loop: str) -> None:
        """Begins with no save and no departure."""
        self._job = job
        self._place = f"{loop}/left"
        self._saves = 0
        self._found: tuple[int, str] | None = None
        """Number of the first save that fails, and why."""

    def count_save(self) -> int:
        """Counts a save that this process begins; returns its number from 0."""
        self._saves += 1
        return self._saves - 1

    def leave(self, why: str) -> None:
        """Publishes that this process makes no more saves."""
        with suppress(StoreError):  # the caller may have another error to raise
            name = process_name(self._job, self._job.index)
            self._job.post(
                f"{self._place}/{self._saves}", f"{name} has left the loop: {why}"
            )

    def before(self, number: int) -> str:
        """Returns which process has left before a save, and why; "" if none has."""
        # A later save may have found it while this one, which has all processes, still
        # waits for them.
        if self._found is None or number < self._found[0]:
            why = self._job.read(f"{self._place}/{number}")
            if not why:
                return ""
            self._found = number, why
        return self._found[1]


FIRST_SECONDS: Final = 10.0
"""Seconds after which a wait is first logged; the interval doubles with each line
..."""

MAX_SECONDS: Final = 120.0
"""... up to this."""


class WaitLogTimer:
    """The log times of one wait, which starts now."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = FIRST_SECONDS
        self._next = self._began + self._seconds

    @property
    def waited_seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the next log line."""
        return max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        """Returns whether a log line is due; if so, schedules the next one."""
        if self.left:
            return False
        self._seconds = min(2 * self._seconds, MAX_SECONDS)
        self._next = time.monotonic() + self._seconds
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision on one step, the same for all processes."""

    step: int
    """The step."""
    saves: bool = False
    """True if they save it."""
    look_at: int | None = None
    """Step of the next decision, unless they know of an earlier one."""
    taken: tuple[int, ...] = ()
    """Steps of deleted checkpoints, which cannot be saved; published once, before the
    first step."""
    failure: str = ""
    """Reason for which process 0 takes no more decisions; "" while it does."""


class Decisions:
    """The decisions for one loop, seen from one process."""

    def __init__(self, job: Job, run: str) -> None:
        """Counts the loop; all processes begin their loops in the same order."""
        self._job = job
        self._run = run
        kind = f"storesvc/loop/{run}"
        self._place = f"{kind}/{ordinal(job, kind)}"
        self._number = 0
        self.departures = Departures(job, self._place)
        """Processes that have left the loop."""

    @property
    def is_leader(self) -> bool:
        """True in process 0."""
        return self._job.index == 0

    def publish(self, decision: Decision) -> None:
        """Publishes the next decision; for process 0."""
        self._job.post(self._next_key(), json.dumps(asdict(decision)))

    def end(self, why: str) -> None:
        """Publishes that this process has left, so that no other waits for it: neither
        for its part of a save, nor for a decision of process 0."""
        self.departures.leave(why)
        if self.is_leader:
            with suppress(StoreError):  # the caller may have another error to raise
                self.publish(Decision(step=-1, failure=why))

    def await_next(self, step: int) -> Decision:
        """Waits for the next decision, which must be on `step`, and returns it.

        Raises:
            PeerFailedError: Process 0 has left, and why.
            InvalidRequestError: Process 0 decides about another step.
            UnavailableError: The coordination service of the job does not answer.
        """
        key, timer = self._next_key(), WaitLogTimer()
        while (text := self._job.read(key, seconds=_TURN_SECONDS)) is None:
            if timer.is_due():
                _log.warning(
                    "loop of %s waits for %s at step %d, for %.0f s now",
                    *(self._run, self._leader, step, timer.waited_seconds),
                )
        fields = json.loads(text)
        decision = Decision(**fields | {"taken": tuple(fields["taken"])})
        if decision.failure:
            raise PeerFailedError(
                f"loop of {self._run}: {self._leader} ended its loop before step "
                f"{step}: {decision.failure}"
            )
        if decision.step != step:
            raise InvalidRequestError(
                f"loop of {self._run}: {self._leader} is at step {decision.step}, this "
                f"process at step {step}; call after() for the same steps in all "
                "processes of the job"
            )
        return decision

    @property
    def _leader(self) -> str:
        return process_name(self._job, 0)

    def _next_key(self) -> str:
        key = f"{self._place}/{self._number}"
        self._number += 1
        return key


_WITHDRAWN: Final = "-"


class JointCalls:
    """The joint calls of one kind, seen from one process of a job."""

    def __init__(self, job: Job, kind: str) -> None:
        """Matches calls of one kind, as "read/tests/run"; publishes nothing yet."""
        self._job = job
        self._kind = f"storesvc/{kind}"

    def lead(self) -> str:
        """Returns a new key prefix for a call of process 0."""
        return f"{self._kind}/{token_hex(8)}"

    def take(self, index: int, place: str, *, seconds: float = 0.0) -> bool:
        """Assigns the key prefix of a call of process 0 to the next call of another
        process; returns False if that process makes none in time."""
        taken = f"{self._kind}/taken/{index}"
        while True:
            number = self._job.count_passed(taken)
            if self._job.read(self._call(index, number), seconds=seconds) is None:
                return False
            # Counted only then: a call counted but not settled never gets a prefix.
            settled = self._settle_prefix(index, number, place)
            self._job.advance(taken, number)
            if settled == place:
                return True

    def begin(self) -> int:
        """Announces a call to process 0; returns its number."""
        made, token = f"{self._kind}/made", token_hex(8)
        while True:
            number = self._job.count_passed(made)
            key = self._call(self._job.index, number)
            # Published before it is counted: process 0 would wait without limit for a
            # call that was counted but never published.
            try:
                self._job.post(key, token)
                is_own = self._job.read(key) == token
            except BaseException:
                with suppress(StoreError):
                    self.take_back(number)
                raise
            self._job.advance(made, number)
            if is_own:  # not the call of another thread
                return number

    def place_key(self, number: int) -> str:
        """Returns the key under which process 0 publishes the prefix of a call."""
        return self._place_key(self._job.index, number)

    def take_back(self, number: int) -> str:
        """Withdraws a call; returns its key prefix if process 0 has already assigned
        one, else ""."""
        settled = self._settle_prefix(self._job.index, number, _WITHDRAWN)
        return "" if settled == _WITHDRAWN else settled

    def _settle_prefix(self, index: int, number: int, place: str) -> str:
        """Assigns a prefix to a call, unless it has one; returns the one it has."""
        key = self._place_key(index, number)
        self._job.post(key, place)
        settled = self._job.read(key)
        assert settled is not None
        return settled

    def _call(self, index: int, number: int) -> str:
        return f"{self._kind}/calls/{index}/{number}"

    def _place_key(self, index: int, number: int) -> str:
        return f"{self._kind}/places/{index}/{number}"
