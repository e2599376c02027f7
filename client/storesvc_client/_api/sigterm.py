"""SIGTERM during a training loop: noted, so that the loop can save and end."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol, Self

_log = logging.getLogger("storesvc_client")


class Termination(Protocol):
    """Says when a training loop is to end."""

    @property
    def agrees_at_each_step(self) -> bool:
        """True if all processes of a job call ``is_due`` once at each step. Otherwise
        it returns False until ``on_signal`` of ``termination`` was called."""

    def is_due(self) -> bool:
        """Returns whether the loop saves this step and ends."""

    def close(self) -> bool:
        """Leaves the signal as it was found; returns whether it was received."""


class NoTermination:
    """SIGTERM has its usual effect."""

    agrees_at_each_step = False

    def is_due(self) -> bool:
        """See ``Termination``."""
        return False

    def close(self) -> bool:
        """See ``Termination``."""
        return False


class JobTermination:
    """SIGTERM is caught by jax, which agrees on the step with the other processes."""

    agrees_at_each_step = True

    def __init__(self, reached_sync_point: Callable[[], bool]) -> None:
        """Prepares to ask jax, at each step."""
        self.is_due = reached_sync_point
        """See ``Termination``."""

    def close(self) -> bool:
        """See ``Termination``."""
        return False


class OwnTermination:
    """SIGTERM is caught by a handler of this process.

    The first signal is noted, and passed on to a handler of the program. Another one
    has the effect that it had before, which by default ends the process.
    """

    agrees_at_each_step = False

    def __init__(self, on_signal: Callable[[], object]) -> None:
        self._received = False
        self._on_signal = on_signal
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    @classmethod
    def begin(cls, on_signal: Callable[[], object]) -> Self | None:
        """Installs the handler, which also calls a function; returns None where that is
        not possible, or where the program ignores the signal."""
        if threading.current_thread() is not threading.main_thread():
            why = "the loop does not run in the main thread"
        else:
            match signal.getsignal(signal.SIGTERM):
                case signal.SIG_IGN:
                    why = "the process ignores the signal"
                case None:
                    why = "its handler does not belong to Python"
                case _:
                    return cls(on_signal)
        _log.warning("SIGTERM will not save: %s", why)
        return None

    def is_due(self) -> bool:
        """See ``Termination``."""
        return self._received

    def close(self) -> bool:
        """See ``Termination``."""
        # a handler that was installed within the block stays
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        return self._received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            signal.signal(number, self._previous)
            signal.raise_signal(number)
            return
        self._received = True
        self._on_signal()
        if callable(self._previous):
            self._previous(number, frame)


def termination(*, is_shared: bool, on_signal: Callable[[], object]) -> Termination:
    """Returns what says when a loop is to end.

    Args:
        is_shared: Whether the processes of a job end their loops together.
        on_signal: Called once SIGTERM was received, if the processes of a job do not
            agree at each step.
    """
    from storesvc_client._pytree.training_loop import reached_sync_point

    asks = reached_sync_point()
    if asks is not None:
        return JobTermination(asks)
    if is_shared:
        _log.warning(
            "SIGTERM will not save: jax_enable_preemption_service is off, which the "
            "processes of the job need to agree on a step"
        )
        return NoTermination()
    return OwnTermination.begin(on_signal) or NoTermination()
