"""The steps that a training loop saves by its schedule, alike in all processes.

Process 0 decides, by its clock and by its running save, and publishes the decision. A
step that is due waits, or is skipped, while the save before it is not written
(``LoopSaves``). SIGTERM is noted, so that the loop can save and end.

Some steps have a checkpoint already (``TakenSteps``). A run is rewound by deleting its
newest checkpoints. Until they are purged they can be undeleted, and no other checkpoint
can be saved at their steps. Nor can one at the step of a damaged checkpoint, from which
a restore has stepped back.
"""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Protocol, Self, assert_never

from storesvc_client._job.job import Decision, Decisions
from storesvc_client._rpc.connection import RunStub
from storesvc_client._save.saver import PendingSave
from storesvc_client._values.options import IfBusy
from storesvc_client._values.save_schedule import Schedule
from storesvc_client._values.triggers import OnFailure
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    StoreError,
    UnsupportedLeafError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

POLL_SECONDS: Final = 0.1
"""Interval at which a wait for a save checks whether its server answers."""

_NOT_OF_ARGUMENTS: Final = frozenset({"INVALID_CHUNK", "REQUEST_ID_REUSED"})
"""Reasons of invalid requests that a later save of the same tree need not have."""

_log = logging.getLogger("storesvc_client")


class LoopSaves:
    """The saves of one loop, in order."""

    def __init__(self, run: str, on_failure: OnFailure) -> None:
        self.saved_step: int | None = None
        """Newest step that was committed."""
        self.failures = 0
        """Saves that failed."""
        self.error: BaseException | None = None
        """Error of the newest save; None if it succeeded."""
        self._run = run
        self._tolerated = on_failure.count
        self._in_a_row = 0
        self.pending: deque[PendingSave] = deque()
        """Saves that are not counted, oldest first."""

    @property
    def writing_step(self) -> int | None:
        """Step of the newest save whose part of this process is not written; None if
        all are."""
        if not self.pending or self.pending[-1].is_written:
            return None
        return self.pending[-1].step

    def await_written(self, trouble: Callable[[], str]) -> bool:
        """Waits until this process has written its part of all saves; returns False
        once a save waits for a server that does not answer.

        Args:
            trouble: Describes such a wait; "" if there is none.
        """
        while self.pending and not self.pending[-1].wait_written(POLL_SECONDS):
            if trouble():
                return False
        return True

    @property
    def is_over(self) -> bool:
        """True if the failures in a row are too many."""
        return self.error is not None and self._in_a_row > self._tolerated

    @property
    def is_hopeless(self) -> bool:
        """True if the newest save failed in a way that all later ones would, too."""
        return self.error is not None and is_argument_error(self.error)

    def lost(self, *, counts: bool) -> BaseException | None:
        """Returns the error of a failed save that ends the loop; None if there is none.

        Args:
            counts: Whether this process counts failures in a row. In a job, process 0
                does, and raises when the others wait for its decision, so that all end
                at one step.
        """
        is_lost = self.is_hopeless or (counts and self.is_over)
        return self.error if is_lost else None

    def tolerate_none(self) -> None:
        """Tolerates no failure from now on, because no later save makes up for it."""
        self._tolerated = 0

    def settle(self) -> None:
        """Counts the saves that have ended, and logs failures. Does not wait."""
        while self.pending and self.pending[0].is_done:
            save = self.pending.popleft()
            if (error := save.error(None)) is not None:
                self.fail(save.step, error)
                continue
            self.error, self._in_a_row, self.saved_step = None, 0, save.step
            _log.info("saved %s@%d", self._run, save.step)

    def wait(self) -> None:
        """Waits for all saves, and counts them."""
        while self.pending:
            self.pending[0].wait()
            self.settle()

    def fail(self, step: int, error: BaseException) -> None:
        """Counts a save that failed, or could not be started."""
        self.error = error
        self.failures += 1
        self._in_a_row += 1
        goes_on = ""
        if not self.is_over and not self.is_hopeless:
            goes_on = f"; training continues, failure {self._in_a_row} in a row of "
            goes_on += f"{self._tolerated} that are tolerated"
        _log.error("save of %s@%d failed%s: %s", self._run, step, goes_on, error)


def is_argument_error(error: BaseException) -> bool:
    """Returns whether an error is one of arguments, or of no store at all."""
    if not isinstance(error, StoreError):
        return True
    is_invalid = isinstance(error, InvalidRequestError | UnsupportedLeafError)
    return is_invalid and error.reason not in _NOT_OF_ARGUMENTS


class Termination(Protocol):
    """Says when a training loop is to end."""

    @property
    def agrees_at_each_step(self) -> bool:
        """True if all processes of a job call ``is_due`` once at each step. Otherwise
        it returns False until ``on_signal`` of ``make_termination`` was called."""

    def is_due(self) -> bool:
        """Returns whether the loop saves this step and ends."""

    def close(self) -> bool:
        """Leaves the signal as it was found; returns whether it was received."""


class NoTermination:
    """SIGTERM has its usual effect."""

    agrees_at_each_step = False

    def is_due(self) -> bool:
        return False

    def close(self) -> bool:
        return False


class JobTermination:
    """SIGTERM is caught by jax, which agrees on the step with the other processes."""

    agrees_at_each_step = True

    def __init__(self, reached_sync_point: Callable[[], bool]) -> None:
        """Prepares to ask jax, at each step."""
        self.is_due = reached_sync_point
        """See ``Termination``."""

    def close(self) -> bool:
        return False


class OwnTermination:
    """SIGTERM is caught by a handler of this process.

    The first signal is noted, and passed on to a handler of the program. Another one
    has the effect that it had before, which by default ends the process.
    """

    agrees_at_each_step = False

    def __init__(self, on_signal: Callable[[], object]) -> None:
        self._received = False
        self._on_signal = on_signal
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    @classmethod
    def begin(cls, on_signal: Callable[[], object]) -> Self | None:
        """Installs the handler, which also calls a function; returns None where that is
        not possible, or where the program ignores the signal."""
        if threading.current_thread() is not threading.main_thread():
            why = "the loop does not run in the main thread"
        else:
            match signal.getsignal(signal.SIGTERM):
                case signal.SIG_IGN:
                    why = "the process ignores the signal"
                case None:
                    why = "its handler does not belong to Python"
                case _:
                    return cls(on_signal)
        _log.warning("SIGTERM will not save: %s", why)
        return None

    def is_due(self) -> bool:
        return self._received

    def close(self) -> bool:
        # a handler that was installed within the block stays
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        return self._received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            signal.signal(number, self._previous)
            signal.raise_signal(number)
            return
        self._received = True
        self._on_signal()
        if callable(self._previous):
            self._previous(number, frame)


def make_termination(
    *, is_shared: bool, on_signal: Callable[[], object]
) -> Termination:
    """Returns what says when a loop is to end.

    Args:
        is_shared: Whether the processes of a job end their loops together.
        on_signal: Called once SIGTERM was received, if the processes of a job do not
            agree at each step.
    """
    from storesvc_client._pytree.jax_job import reached_sync_point

    asks = reached_sync_point()
    if asks is not None:
        return JobTermination(asks)
    if is_shared:
        _log.warning(
            "SIGTERM will not save: jax_enable_preemption_service is off, which the "
            "processes of the job need to agree on a step"
        )
        return NoTermination()
    return OwnTermination.begin(on_signal) or NoTermination()


@dataclass(eq=False, repr=False)
class TakenSteps:
    """The taken steps of one loop, the same in all processes of a job."""

    _stub: RunStub
    _why: dict[int, str] = field(default_factory=dict)
    """State of the checkpoint that has a step: "deleted" or "damaged"."""

    def note(
        self, start: int, decisions: Decisions | None, damaged: Iterable[int] = ()
    ) -> None:
        """Notes the steps from ``start`` on; logs which ones deleted checkpoints have.

        Args:
            start: First step of the loop.
            decisions: Carries what process 0 of a job finds to the others.
            damaged: Steps of damaged checkpoints.

        Raises:
            PeerFailedError: Process 0 has left.
            UnavailableError: The store does not answer.
        """
        if decisions is None or decisions.is_leader:
            deleted = self._list_deleted(start)
            if decisions is not None:
                decisions.publish(Decision(step=start, taken=deleted))
        else:
            deleted = decisions.await_next(start).taken
        self._why = dict.fromkeys(deleted, "deleted") | dict.fromkeys(
            damaged, "damaged"
        )
        if deleted:
            _log.warning(
                "%s has deleted checkpoints from step %d to %d, which are not purged: "
                "where one of these steps is due, the next step is saved instead",
                *(self._stub.name, deleted[-1], deleted[0]),
            )

    def has(self, step: int) -> bool:
        """Returns whether another checkpoint has this step; logs it."""
        why = self._why.get(step)
        if why is None:
            return False
        _log.warning(
            "%s@%d is not saved: a %s checkpoint has this step; the next step is saved "
            "instead",
            *(self._stub.name, step, why),
        )
        return True

    def _list_deleted(self, start: int) -> tuple[int, ...]:
        """Returns the steps from ``start`` on of deleted checkpoints, the highest
        first."""
        parent, found = self._stub.name.resource, list[int]()
        rows = self._stub.rows(
            self._stub.service.ListCheckpoints,
            api.ListCheckpointsRequest(parent=parent, show_deleted=True),
            lambda page: page.checkpoints,
            lambda _: None,  # the restore reports damaged records
        )
        with suppress(NotFoundError):  # there is no such run yet
            for row in rows:
                if row.step < start:
                    break
                if row.HasField("delete_time"):
                    found.append(row.step)
        return tuple(found)


@dataclass(eq=False, repr=False)
class DueSteps:
    """The steps that one loop saves by its schedule, seen from one process."""

    _run: str
    _schedule: Schedule
    _if_busy: IfBusy
    _trouble: Callable[[], str]
    """Describes a wait for a server that does not answer, or is ""."""
    _saves: LoopSaves
    _taken: TakenSteps
    asks_at: int = 0
    """Step from which on there is something to decide."""
    skipped: int = 0
    """Steps that were due and not saved, because of the save before."""
    _decisions: Decisions | None = None
    _is_owed: bool = False
    """True if the next step is saved because its predecessor could not be."""
    _saved_at: float = 0.0
    """Time at which the last save began, or the loop."""
    _looked: tuple[int, float] | None = None
    """Step and time of the last look at the clock."""

    def begin(self, decisions: Decisions | None) -> None:
        """Begins the loop; None: it belongs to no job."""
        self._decisions = decisions
        self.note_save()

    def note_save(self) -> None:
        """Notes that a save begins now, from which the interval counts."""
        self._saved_at = time.monotonic()

    def has(self, step: int) -> bool:
        """Returns whether a step is saved, in all processes alike; called at each step
        from ``asks_at`` on.

        Raises:
            StoreError: More saves failed in a row than are tolerated.
            PeerFailedError: Process 0 of the job has ended its loop.
        """
        decisions = self._decisions
        if decisions is None or decisions.is_leader:
            decision = self._decide(step)
            self._saves.settle()  # those that it has waited for
            lost = self._saves.lost(counts=True)
            if lost is not None:
                raise lost  # which the end of the loop publishes
            if decisions is not None:
                decisions.publish(decision)
        else:
            decision = decisions.await_next(step)
        self.asks_at = self._schedule.asks_next(step, decision.look_at)
        if not decision.saves:
            if self._schedule.is_due_at(step):
                self.skipped += 1
                why = self._trouble() or "it is not written yet"
                _log.warning(
                    "save of %s@%d skipped, because of the save of step %s before it: "
                    "%s",
                    *(self._run, step, self._saves.writing_step, why),
                )
            return False
        self._is_owed = self._taken.has(step)
        if self._is_owed:
            self.asks_at = step + 1
        return not self._is_owed

    def _decide(self, step: int) -> Decision:
        """Returns the decision of this process, by its clock and its running save."""
        now, schedule = time.monotonic(), self._schedule
        waited = now - self._saved_at
        is_due = self._is_owed or schedule.decide(step=step, waited=waited)
        saves = is_due and self._makes_way(step)
        pace = float("inf")
        if self._looked is not None:
            last_step, last_time = self._looked
            pace = (now - last_time) / (step - last_step)
        self._looked = step, now
        ahead = schedule.steps_to_look(
            waited=0.0 if saves else waited, seconds_per_step=pace
        )
        look_at = None if ahead is None else step + ahead
        return Decision(step=step, saves=saves, look_at=look_at)

    def _makes_way(self, step: int) -> bool:
        """Returns whether a save may begin, with regard to the saves before it."""
        saves = self._saves
        if saves.writing_step is None:
            return True
        match self._if_busy:
            case "queue":
                return not self._trouble()
            case "refuse":
                return False
            case "wait":
                # A save that is due by the clock comes after the one that is running.
                is_multiple = self._schedule.is_due_at(step)
                return is_multiple and saves.await_written(self._trouble)
            case _:
                assert_never(self._if_busy)
