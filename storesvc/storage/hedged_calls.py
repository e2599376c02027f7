"""Calls of a storage on the network, asked again where no answer comes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, assert_never

from storesvc.storage.hedging import Asked, Hedging, Limits, Step
from storesvc.storage.log_throttle import Sparing

T = TypeVar("T")

_log = logging.getLogger(__name__)


class HedgedCalls:
    """Those of one kind, of one storage."""

    def __init__(self, limits: Limits) -> None:
        self._hedging = Hedging(limits)
        self._lines = Sparing()

    async def answer(
        self, ask: Callable[[], Awaitable[T]], *, size_bytes: int, name: str
    ) -> T:
        """Returns the first answer.

        Args:
            ask: Asks for it; again, where it is called again.
            size_bytes: That come or go.
            name: What logs call it.

        Raises:
            TimeoutError: There was none in time.
        """
        call = _Call(ask, self._hedging, size_bytes, name, self._lines)
        try:
            return await call.answer()
        finally:
            call.end()


class _Call(Generic[T]):
    """One call, as often as it is asked."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        hedging: Hedging,
        size_bytes: int,
        name: str,
        lines: Sparing,
    ) -> None:
        self._ask = ask
        self._clock = asyncio.get_running_loop().time
        self._name = name
        self._lines = lines
        self._under_way: set[asyncio.Future[T]] = set()
        self._asked: Asked = hedging.begin(size_bytes, now=self._clock())
        self._is_answered = False

    async def answer(self) -> T:
        """Asks, and asks again, until one is answered."""
        self._begin()
        while True:
            done, _ = await asyncio.wait(
                self._under_way,
                timeout=max(0.0, self._asked.due - self._clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._under_way -= done
            good = [one for one in done if one.exception() is None]
            if good or (done and not self._under_way):
                self._is_answered = True
                return (good or list(done))[0].result()
            if not done:
                self._step()

    def end(self) -> None:
        """Gives up what is still asked."""
        self._give_up()
        if self._is_answered:
            self._asked.answered(now=self._clock())
        else:
            self._asked.given_up()

    def _step(self) -> None:
        match self._asked.step(now=self._clock()):
            case Step.FAIL:
                raise TimeoutError
            case Step.BESIDE:
                self._begin()
            case Step.ANEW:
                self._give_up()
                self._tell_late()
                self._begin()
            case Step.WAIT:
                pass
            case step:
                assert_never(step)

    def _tell_late(self) -> None:
        now = self._clock()
        if self._lines.admits("late", now=now):
            seconds = now - self._asked.began
            _log.warning(
                "%s has not answered for %.0f s, asked again", self._name, seconds
            )

    def _begin(self) -> None:
        self._under_way.add(asyncio.ensure_future(self._ask()))

    def _give_up(self) -> None:
        for one in self._under_way:
            one.cancel()
        self._under_way.clear()
