"""The steps that a training loop saves by its schedule, alike in all processes.

Process 0 decides, by its clock and by its running save, and publishes the decision. A
step that is due waits, or is skipped, while the save before it is not written.
"""

import logging
import time
from collections.abc import Callable
from typing import assert_never

from storesvc_client._api.loop_saves import LoopSaves
from storesvc_client._api.taken_steps import TakenSteps
from storesvc_client._job.job import Decision, Decisions
from storesvc_client._values.options import IfBusy
from storesvc_client._values.save_schedule import Schedule

_log = logging.getLogger("storesvc_client")


class DueSteps:
    """The steps that one loop saves by its schedule, seen from one process."""

    def __init__(
        self,
        run: str,
        schedule: Schedule,
        if_busy: IfBusy,
        trouble: Callable[[], str],
        saves: LoopSaves,
        taken: TakenSteps,
    ) -> None:
        """Prepares to decide.

        Args:
            run: Name of the run.
            schedule: When to save.
            if_busy: What a step that is due does while a save is running.
            trouble: Describes a wait for a server that does not answer; "" if there is
                none.
            saves: The saves of the loop.
            taken: Steps that other checkpoints have.
        """
        self.asks_at = 0
        """Step from which on there is something to decide."""
        self.skipped = 0
        """Steps that were due and not saved, because of the save before."""
        self._run = run
        self._schedule = schedule
        self._if_busy: IfBusy = if_busy
        self._trouble = trouble
        self._saves = saves
        self._taken = taken
        self._decisions: Decisions | None = None
        self._is_owed = False
        """True if the next step is saved because its predecessor could not be."""
        self._saved_at = 0.0
        """Time at which the last save began, or the loop."""
        self._looked: tuple[int, float] | None = None
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
                self._skip(step)
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

    def _skip(self, step: int) -> None:
        self.skipped += 1
        why = self._trouble() or "it is not written yet"
        _log.warning(
            "save of %s@%d skipped, because of the save of step %s before it: %s",
            *(self._run, step, self._saves.writing_step, why),
        )
