"""Retries of calls: which errors, how often, with which pauses.

Two kinds of errors are transient: a server that does not answer, and a server without
free memory that says when to retry. The first lasts as long as a restart. The second
lasts as long as other saves, but the server is alive, so it is retried for much longer.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from storesvc_client._rpc.tracebacks import trim
from storesvc_client._values.arguments import NEVER, Deadline
from storesvc_client.errors import LimitError, StoreError, UnavailableError

if TYPE_CHECKING:
    from tenacity import AttemptManager, RetryCallState

PATIENCE_SECONDS: Final = 30.0
"""Maximum time for which a call without progress is retried: a server's restart."""

BUSY_SECONDS: Final = 600.0
"""Maximum time for which a call is retried while the server has no memory for it."""

LEAST_ATTEMPTS: Final = 2
"""Minimum attempts, however long each takes: a server that stops may hold a call for
its whole timeout."""

T = TypeVar("T")

BEGINNINGS: Final = 5
"""Maximum starts of a long call that is cut off when a server ends and cannot be
resumed."""


def attempts(
    least_attempts: int = LEAST_ATTEMPTS, *, deadline: Deadline = NEVER
) -> "Iterator[AttemptManager]":
    """Yields attempts at an idempotent call; pauses between them.

    Retries transient errors only; raises the last one.

    Args:
        least_attempts: Minimum attempts, however long each takes, up to ...
        deadline: ... the deadline.

    >>> for attempt in attempts():
    ...     with attempt:
    ...         answer = 42
    """
    # Imported late: most commands need no retry.
    from tenacity import (
        Retrying,
        retry_if_exception,
        stop_after_delay,
        wait_random_exponential,
    )

    random_pause = wait_random_exponential(multiplier=0.1, max=5)
    is_late, is_lasting = stop_after_delay(deadline.left), _Stop(least_attempts)

    def pause(state: "RetryCallState") -> float:
        error = _error(state)
        least = error.retry_seconds if _is_busy(error) else None
        return min((least or 0.0) + random_pause(state), max(0.0, deadline.left))

    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        stop=lambda state: is_late(state) or is_lasting(state),
        wait=pause,
        reraise=True,
    )
    try:
        yield from retrying
    except StoreError as e:
        trim(e)
        raise


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed soon."""
    return isinstance(error, UnavailableError) or _is_busy(error)


def _is_busy(error: BaseException) -> bool:
    """Returns whether a server has no free memory, or a quota no free call, now. A full
    storage gives a retry time, too, but is not transient: space must be freed first."""
    return (
        isinstance(error, LimitError)
        and error.reason in ("LIMIT_EXCEEDED", "QUOTA_EXCEEDED")
        and error.retry_seconds is not None
    )


def _error(state: "RetryCallState") -> StoreError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, StoreError)
    return error


class _Stop:
    """Stops retrying when a kind of error has lasted too long."""

    def __init__(self, least_attempts: int) -> None:
        self._least_attempts = least_attempts
        self._answered_at = 0.0
        """Seconds from the first attempt to the last response of a live server."""

    def __call__(self, state: "RetryCallState") -> bool:
        seconds = state.seconds_since_start
        assert seconds is not None
        if _is_busy(_error(state)):
            self._answered_at = seconds
            return seconds >= BUSY_SECONDS
        return (
            seconds - self._answered_at >= PATIENCE_SECONDS
            and state.attempt_number >= self._least_attempts
        )


def until(
    deadline: Deadline,
    act: Callable[[], T],
    *,
    least_attempts: int = LEAST_ATTEMPTS,
    first_error: UnavailableError | None = None,
) -> T:
    """Retries a function as ``attempts`` does and returns its result.

    Args:
        deadline: Deadline of all attempts.
        act: An idempotent function.
        least_attempts: Minimum attempts up to the deadline.
        first_error: Error of an earlier attempt of the caller.

    Raises:
        UnavailableError: The error of the last attempt; if the deadline cut that one
            off, the error of the previous attempt, which says more.
    """
    previous = first_error
    for attempt in attempts(least_attempts, deadline=deadline):
        with attempt:
            try:
                return act()
            except UnavailableError as e:
                if previous is not None and deadline.left <= 0:
                    raise previous from e
                previous = e
                raise
    raise AssertionError
