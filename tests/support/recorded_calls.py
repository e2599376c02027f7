"""Records the calls of servers of this process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from storesvc.telemetry import events

PATIENCE_SECONDS: Final = 20


@contextmanager
def record_calls(*names: str) -> Iterator[list[events.CallEnded]]:
    """Yields a list of the calls that end within the context, in this order.

    A call ends on the server after its reply: the context waits until all that began
    within it have ended.

    Args:
        names: Names of services or rpcs that are recorded; none: all.
    """
    begun, ended = list[str](), list[events.CallEnded]()

    def record(event: events.Event) -> None:
        if not isinstance(event, events.CallStarted | events.CallEnded):
            return
        if names and not any(name in event.method for name in names):
            return
        if isinstance(event, events.CallEnded):
            ended.append(event)
        else:
            begun.append(event.method)

    events.subscribe(record)
    try:
        yield ended
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(ended) < len(begun) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        events.unsubscribe(record)
    assert len(ended) >= len(begun), f"calls that have not ended: {begun}"


def rpcs_in(calls: list[events.CallEnded]) -> list[str]:
    """Returns the name of the rpc of each call."""
    return [call.method.rpartition("/")[2] for call in calls]
