"""Decides when a training loop saves.

A schedule saves at multiples of some numbers of steps, and when an interval has passed
since the last save. Multiples are the same in all processes of a job. The clock is
process 0's; so that the others need not ask it at each step, it announces the step at
which it will look at its clock again.

>>> schedule = Schedule(steps=(1000,), seconds=900.0)
>>> schedule.decide(step=3000, waited=10.0), schedule.decide(step=3001, waited=10.0)
(True, False)
>>> schedule.steps_to_look(waited=10.0, seconds_per_step=0.5)
112
"""

from dataclasses import dataclass
from typing import Final

LOOKS: Final = 16
"""Looks at the clock in each interval, at least: if steps become slower after a look, a
save is late by at most this part of the interval, times the slowdown."""

MAX_STEPS_TO_LOOK: Final = 1_000_000
"""Maximum steps between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps and the interval at which a loop saves."""

    steps: tuple[int, ...] = ()
    """A step that is a multiple of one of these is saved."""
    seconds: float | None = None
    """Seconds after the begin of the last save at which the next one is due; None: the
    clock does not matter."""

    def is_due_at(self, step: int) -> bool:
        """Returns whether a step is saved whatever the clock says."""
        return any(step % each == 0 for each in self.steps)

    def is_due_after(self, waited: float) -> bool:
        """Returns whether a save is due some seconds after the begin of the last."""
        return self.seconds is not None and waited >= self.seconds

    def decide(self, *, step: int, waited: float) -> bool:
        """Returns whether a step is saved.

        Args:
            waited: Seconds since the last save began, or since the loop did.
        """
        return self.is_due_at(step) or self.is_due_after(waited)

    def asks_next(self, step: int, look_at: int | None) -> int:
        """Returns the first step after a step at which there is anything to decide.

        Args:
            look_at: Step of the next look at the clock; None if there is none.
        """
        found = [step + each - step % each for each in self.steps]
        return min(found if look_at is None else [*found, look_at])

    def steps_to_look(self, *, waited: float, seconds_per_step: float) -> int | None:
        """Returns the number of steps until the next look at the clock, at least 1;
        None if the clock does not matter.

        Args:
            waited: Seconds since the last save began, or since the loop did. If a save
                is overdue, which another one delays, looks are as rare as after it.
        """
        if self.seconds is None:
            return None
        left = self.seconds - waited
        most = self.seconds / LOOKS
        horizon = min(left, most) if left > 0 else most
        # A quotient may be infinite.
        most_steps = min(horizon / max(seconds_per_step, 1e-9), MAX_STEPS_TO_LOOK)
        return max(1, int(most_steps))
