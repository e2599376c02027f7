"""Decisions that process 0 of a job takes for all its processes, one after another.

Process 0 publishes each decision with the step that it is about; the others read the
decisions in order, and wait for the next one without a limit, as they would wait for
process 0 in the next collective operation of jax. They stop waiting when process 0 has
left. Nothing is exchanged at other steps.
"""

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

from storesvc_client._job.departures import Departures
from storesvc_client._job.job import Job, ordinal, process_name
from storesvc_client._job.wait_log import WaitLogTimer
from storesvc_client.errors import InvalidRequestError, PeerFailedError, StoreError

_TURN_SECONDS: Final = 1.0
"""Seconds of one wait; a long wait is logged between two of them."""

_log = logging.getLogger("storesvc_client")


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
        """Counts the loop; all processes begin their loops in the same order.

        Args:
            job: The processes.
            run: Name of the run.
        """
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
        """Waits for the next decision, and returns it.

        Args:
            step: Step that this process needs it for.

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
                    *(self._run, self._leader, step, timer.waited),
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
