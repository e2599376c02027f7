"""When a trainer saves: at the steps of its policies, and after an interval of time.

The rules equal EasyDeL's own checkpointer: the first step policy that reaches a step
decides about it. An interval of time adds saves between these steps.

>>> schedule = SaveSchedule(policies=[CheckpointInterval(every=100)], interval=None)
>>> [step for step in range(301) if schedule.is_due_at(step)]
[100, 200, 300]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, Self


class StepPolicy(Protocol):
    """A ``CheckpointInterval`` of EasyDeL's arguments."""

    @property
    def every(self) -> int:
        """Saves at the multiples of this number of steps."""

    @property
    def until(self) -> int | None:
        """Last step to which the policy applies; None: to all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """The steps and times at which a trainer saves."""

    policies: Sequence[StepPolicy]
    """Step policies, in ascending order of ``until``."""
    interval: timedelta | None
    """Longest time between two saves; None: time decides nothing."""

    @classmethod
    def of(cls, arguments: Any) -> Self:
        """Returns the schedule of EasyDeL's ``TrainingArguments``."""
        return cls(
            policies=arguments.get_checkpoint_policies(),
            interval=arguments.get_save_interval_timedelta(),
        )

    def is_due_at(self, step: int) -> bool:
        """Returns whether a step policy saves at a step; none does at step 0."""
        for policy in self.policies:
            if policy.until is None or policy.until >= step:
                return step > 0 and step % policy.every == 0
        return False

    def is_due_after(self, seconds: float) -> bool:
        """Returns whether the last save is longer ago than the interval."""
        return self.interval is not None and seconds >= self.interval.total_seconds()
