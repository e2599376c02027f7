"""Sends the calls of a storage on the network, with hedges and retries.

``hedging`` decides when; this module sends, waits and abandons.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar, assert_never

from storesvc.storage.hedging import CallSchedule, Hedging, Limits, Step
from storesvc.storage.log_throttle import LogThrottle
from storesvc.telemetry.events import Retried, publish

T = TypeVar("T")

_log = logging.getLogger(__name__)


class HedgedSender:
    """Sends the reads, the writes or the conditional changes of one storage."""

    def __init__(self, limits: Limits, operation: str) -> None:
        """Creates it.

        Args:
            limits: Limits of the calls.
            operation: Kind of the calls: "read", "write" or "change".
        """
        self._hedging = Hedging(limits)
        self._operation = operation
        self._throttle = LogThrottle()

    async def answer(
        self, ask: Callable[[], Awaitable[T]], *, size_bytes: int, name: str
    ) -> T:
        """Returns the first response.

        Args:
            ask: Sends one request and returns its response; called again for each
                hedge and retry.
            size_bytes: Size of the request or of the response.
            name: The call's name in log lines.

        Raises:
            TimeoutError: There was no response within the deadlines of all attempts.
        """
        schedule = partial(self._hedging.begin, size_bytes)
        call = _Call(ask, schedule, self._operation, name, self._throttle)
        try:
            return await call.answer()
        finally:
            call.end()


class _Call(Generic[T]):
    """One call, and its requests in flight."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        begin: Callable[..., CallSchedule],
        operation: str,
        name: str,
        throttle: LogThrottle,
    ) -> None:
        self._ask = ask
        self._clock = asyncio.get_running_loop().time
        self._operation = operation
        self._name = name
        self._throttle = throttle
        self._in_flight: set[asyncio.Future[T]] = set()
        self._schedule = begin(now=self._clock())
        self._is_answered = False

    async def answer(self) -> T:
        """Sends requests until one succeeds, or the last one in flight fails."""
        self._send()
        while True:
            done, _ = await asyncio.wait(
                self._in_flight,
                timeout=max(0.0, self._schedule.due - self._clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._in_flight -= done
            # An error is no response while another request is in flight: if a hedge
            # fails its condition, the first request has perhaps made the change, and a
            # conflict would be reported for a write that took effect.
            good = [one for one in done if one.exception() is None]
            if good or (done and not self._in_flight):
                self._is_answered = True
                return (good or list(done))[0].result()
            if not done:
                self._step()

    def end(self) -> None:
        """Abandons the requests in flight."""
        self._abandon()
        if self._is_answered:
            self._schedule.answered(now=self._clock())
        else:
            self._schedule.abandoned()

    def _step(self) -> None:
        match self._schedule.step(now=self._clock()):
            case Step.FAIL:
                raise TimeoutError
            case Step.HEDGE:
                publish(Retried(operation=self._operation, kind="hedge"))
                self._send()
            case Step.RETRY:
                # Abandon first: an overloaded storage must not get more requests.
                self._abandon()
                publish(Retried(operation=self._operation, kind="retry"))
                self._log_late()
                self._send()
            case Step.WAIT:
                pass
            case step:
                assert_never(step)

    def _log_late(self) -> None:
        now = self._clock()
        if self._throttle.admits("late", now=now):
            seconds = now - self._schedule.began
            _log.warning(
                "%s has not answered for %.0f s; retrying", self._name, seconds
            )

    def _send(self) -> None:
        self._in_flight.add(asyncio.ensure_future(self._ask()))

    def _abandon(self) -> None:
        for one in self._in_flight:
            one.cancel()
        self._in_flight.clear()
