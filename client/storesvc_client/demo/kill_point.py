"""Stops a job at the point where it will be killed.

On a slow machine a kill may arrive late, when the job has begun its next save or has
ended. So the job waits at the kill point; the process that kills it finds the same
point from the same events.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from storesvc_client.demo.processes import Committed, Event, Step

__all__ = ["STEPS_SINCE", "is_kill_point", "stop_at_kill_point"]

STEPS_SINCE: Final = 2
"""Steps between the last acknowledged save and the kill; a resumed job repeats them."""

_POLL_SECONDS: Final = 0.5
"""Interval of checks that the parent process still runs."""


def is_kill_point(events: Sequence[Event], *, checkpoint: int) -> bool:
    """Returns whether a job is at its kill point.

    The kill point is two steps after an acknowledged save, with no save begun since.

    Args:
        events: The events of the job so far.
        checkpoint: The step of the save, or of an earlier one.
    """
    since = [
        at for at, event in enumerate(reversed(events)) if not isinstance(event, Step)
    ]
    if not since or since[0] < STEPS_SINCE:
        return False
    last = events[-1 - since[0]]
    return isinstance(last, Committed) and last.step >= checkpoint


def stop_at_kill_point(events: Iterable[Event], *, checkpoint: int) -> Iterator[Event]:
    """Yields the events of a job, and stops it at its kill point.

    The job waits there until its parent process ends.

    Args:
        events: The events of the job; the iterator does its work.
        checkpoint: See ``is_kill_point``.
    """
    parent, seen = os.getppid(), list[Event]()
    for event in events:
        seen.append(event)
        yield event
        if is_kill_point(seen, checkpoint=checkpoint):
            while os.getppid() == parent:
                time.sleep(_POLL_SECONDS)
            return
