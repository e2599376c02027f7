"""Retries of calls: after which errors, how often, and how long between.

A transient error is that of a server that does not answer, or that has no room now and
says when to retry. The first lasts as long as a restart; the second as long as others
save, and the server is alive, so it is retried for much longer.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from storesvc_client._rpc.tracebacks import trim
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client.errors import LimitError, StoreError, UnavailableError

if TYPE_CHECKING:
    from tenacity import AttemptManager, RetryCallState

PATIENCE_SECONDS: Final = 30.0
"""How long a call is repeated that makes no progress: a server's restart."""

BUSY_SECONDS: Final = 600.0
"""How long a call is repeated whose server has no room for it."""

LEAST_ATTEMPTS: Final = 2
"""However long each takes: a server that stops may keep a call as long as it likes."""

T = TypeVar("T")

BEGINNINGS: Final = 5
"""How often that begins which a server's end cuts off, and which goes on nowhere."""


def patiently(
    least_attempts: int = LEAST_ATTEMPTS, *, deadline: Deadline = NEVER
) -> "Iterator[AttemptManager]":
    """Yields attempts at a call that may be repeated.

    Only a transient error is worth another; the last one is raised.

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
        retry_if_exception,
        stop_after_delay,
        wait_random_exponential,
    )

    random_pause = wait_random_exponential(multiplier=0.1, max=5)
    is_late, is_hopeless = stop_after_delay(deadline.left), _Stop(least_attempts)

    def pause(state: "RetryCallState") -> float:
        error = _error(state)
        least = error.retry_seconds if _is_busy(error) else None
        return min((least or 0.0) + random_pause(state), max(0.0, deadline.left))

    attempts = Retrying(
        retry=retry_if_exception(is_transient),
        stop=lambda state: is_late(state) or is_hopeless(state),
        wait=pause,
        reraise=True,
    )
    try:
        yield from attempts
    except StoreError as e:
        trim(e)
        raise


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed soon."""
    return isinstance(error, UnavailableError) or _is_busy(error)


def _is_busy(error: BaseException) -> bool:
    """Whether a server has no room now. A full storage says when to retry, too, but
    somebody has to free space first."""
    return (
        isinstance(error, LimitError)
        and error.reason == "LIMIT_EXCEEDED"
        and error.retry_seconds is not None
    )


def _error(state: "RetryCallState") -> StoreError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, StoreError)
    return error


class _Stop:
    """Ends attempts whose errors have lasted for too long, each kind by itself."""

    def __init__(self, least_attempts: int) -> None:
        self._least_attempts = least_attempts
        self._answered_at = 0.0
        """Seconds after the start of the attempts; then the server was alive."""

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
