"""Where a job that will be killed holds itself until it is.

On a slow machine a kill may arrive late: the job would have begun its next save, or
have ended. So the job stops at the place where it is to die, and its killer, which
finds the same place by the same events, takes the time that it needs.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from storesvc_client.demo.job_log import Committed, Event, Step

__all__ = ["STEPS_SINCE", "held_between_saves", "is_between_saves"]

STEPS_SINCE: Final = 2
"""Steps between the last acknowledged save and the kill: a resumed job repeats them."""

_LOOK_SECONDS: Final = 0.5
"""Between looks at whether the parent process is still there."""


def is_between_saves(told: Sequence[Event], *, checkpoint: int) -> bool:
    """Returns whether a job is where it is to be killed.

    That is two steps behind an acknowledged save, with no other save begun since.

    Args:
        told: The events of the job so far.
        checkpoint: The step of the save, or of an earlier one.
    """
    since = [
        at for at, event in enumerate(reversed(told)) if not isinstance(event, Step)
    ]
    if not since or since[0] < STEPS_SINCE:
        return False
    last = told[-1 - since[0]]
    return isinstance(last, Committed) and last.step >= checkpoint


def held_between_saves(events: Iterable[Event], *, checkpoint: int) -> Iterator[Event]:
    """Yields the events of a job, and holds it where it is to be killed.

    It is not held for longer than its parent process lives.

    Args:
        events: The events of the job; making them is its work.
        checkpoint: As ``is_between_saves`` takes it.
    """
    parent, told = os.getppid(), list[Event]()
    for event in events:
        told.append(event)
        yield event
        if is_between_saves(told, checkpoint=checkpoint):
            while os.getppid() == parent:
                time.sleep(_LOOK_SECONDS)
            return
