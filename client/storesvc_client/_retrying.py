"""Patience with a server that does not answer: how often, and how long between."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from storesvc_client._durations import NEVER, Deadline
from storesvc_client._tracebacks import trim
from storesvc_client.errors import StoreError, UnavailableError

if TYPE_CHECKING:
    from tenacity import AttemptManager

PATIENCE_SECONDS: Final = 30.0
"""How long a call is repeated that makes no progress: a server's restart."""

LEAST_ATTEMPTS: Final = 2
"""However long each takes: a server that stops may keep a call as long as it likes."""

T = TypeVar("T")

BEGINNINGS: Final = 5
"""How often that begins which a server's end cuts off, and which goes on nowhere."""


def patiently(
    least_attempts: int = LEAST_ATTEMPTS, *, deadline: Deadline = NEVER
) -> "Iterator[AttemptManager]":
    """Yields attempts at a call that may be repeated.

    Only ``UnavailableError`` is worth another; the last one is raised.

    Args:
        least_attempts: That are made, however long each takes ...
        deadline: ... until then.

    >>> for attempt in patiently():
    ...     with attempt:
    ...         answer = 42
    """
    # Late: a command that lists, and is answered, needs no patience.
    from tenacity import (
        Retrying,
        retry_if_exception_type,
        stop_after_attempt,
        stop_after_delay,
        stop_all,
        stop_any,
        wait_random_exponential,
    )

    pause = wait_random_exponential(multiplier=0.1, max=5)
    attempts = Retrying(
        retry=retry_if_exception_type(UnavailableError),
        stop=stop_any(
            stop_after_delay(deadline.left),
            stop_all(
                stop_after_delay(PATIENCE_SECONDS), stop_after_attempt(least_attempts)
            ),
        ),
        wait=lambda state: min(pause(state), max(0.0, deadline.left)),
        reraise=True,
    )
    try:
        yield from attempts
    except StoreError as e:
        trim(e)
        raise


def until(
    deadline: Deadline,
    act: Callable[[], T],
    *,
    least_attempts: int = LEAST_ATTEMPTS,
    told: UnavailableError | None = None,
) -> T:
    """Returns what an act returns, which is repeated as of ``patiently``.

    Args:
        deadline: Until when.
        act: May be repeated.
        least_attempts: That are made, up to then.
        told: What it has failed with before.

    Raises:
        UnavailableError: Of its last attempt; or, where the deadline has cut that off,
            of the one before, which tells more.
    """
    for attempt in patiently(least_attempts, deadline=deadline):
        with attempt:
            try:
                return act()
            except UnavailableError as e:
                if told is not None and deadline.left <= 0:
                    raise told from e
                told = e
                raise
    raise AssertionError
