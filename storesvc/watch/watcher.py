"""Watches: streams of what happens to the checkpoints of a run or a namespace.

``events`` decides what is told. A process polls the journal of a namespace once for
all who watch it, and only while there are any; a change that this process made wakes
it at once. The poll goes through what is new, so that those who watch find it already
read. Each of them goes at its own pace from its own position: who is slow reads again
what is not kept any more.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.journal import READS_AT_ONCE, Journal, expired
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    LimitExceededError,
    StorageUnavailableError,
)
from storesvc.format.names import RunName
from storesvc.watch.change_cache import Change, Changes
from storesvc.watch.events import (
    MAX_PENDING,
    Outcome,
    Position,
    after,
    due,
    is_full,
    pack_token,
    unpack_token,
)

POLL_SECONDS: Final = 1.0
"""How often a process looks for what others have announced."""

TOKEN_SECONDS: Final = 20.0
"""How often who watches gets a token, at least."""

MAX_WATCHES: Final = 1000
"""Watches of a process."""

BEFORE: Final = MAX_PENDING
"""A watch without a token tells of changes that were announced before it began, and
land later, if they are among so many. Their times would not tell which those are: they
are by the clocks of others."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a watch tells."""

    change: Change | None
    """One that has landed; None: this only brings a token."""
    token: str
    """Goes on after this."""


class Watcher:
    """The watches of a process."""

    def __init__(
        self,
        catalogue: Catalogue,
        journal: Journal,
        *,
        store_uid: str,
        clock: Clock,
        poll_seconds: float = POLL_SECONDS,
        token_seconds: float = TOKEN_SECONDS,
    ) -> None:
        self._catalogue = catalogue
        self._journal = journal
        self._store_uid = store_uid
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._token_seconds = token_seconds
        self._feeds: dict[str, _Feed] = {}
        self._watches = 0
        self._is_closed = False

    async def watch(self, of: RunName | str, token: str) -> AsyncGenerator[Told]:
        """Yields a token at once, then events as they come, without an end.

        Args:
            of: A run or a namespace.
            token: Where to go on; "": from now on.

        Raises:
            InvalidResumeTokenError: The token was made for another watch.
            ResumeTokenExpiredError: The next events are gone.
            StorageUnavailableError: The storage does not answer, or the server stops;
                go on from the last token.
            LimitExceededError: There are too many watches.
            CorruptDataError: An announcement is damaged, or what it is about; the last
                token goes on after it.
        """
        namespace, run, parent = _parsed(of)
        position = None
        if token:
            position = unpack_token(token, parent=parent, store=self._store_uid)
        async with self._joined(namespace) as feed:
            if position is None:
                position = feed.tip
            else:  # not before the feed: it must have come at least as far
                await self._journal.following(namespace, position.last, limit=1)
            yield Told(None, self._token(position, parent))
            beat = self._clock.elapsed() + self._token_seconds
            while True:
                moved = feed.moved
                async for at, change in feed.news(position, run):
                    position = at
                    if isinstance(change, CorruptDataError):
                        yield Told(None, self._token(position, parent))
                        raise change
                    if change.outcome is Outcome.LANDED:
                        yield Told(change, self._token(position, parent))
                        beat = self._clock.elapsed() + self._token_seconds
                left = beat - self._clock.elapsed()
                with suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), max(0, left))
                self._check(feed)
                if self._clock.elapsed() >= beat:
                    yield Told(None, self._token(position, parent))
                    beat = self._clock.elapsed() + self._token_seconds

    def close(self) -> None:
        """Ends all watches, and admits none any more."""
        self._is_closed = True
        for feed in self._feeds.values():
            feed.close()

    def _token(self, position: Position, parent: str) -> str:
        return pack_token(position, parent=parent, store=self._store_uid)

    @asynccontextmanager
    async def _joined(self, namespace: str) -> "AsyncIterator[_Feed]":
        """The feed of a namespace, which has just looked, while the context lasts."""
        if self._watches >= MAX_WATCHES:
            raise LimitExceededError(
                f"expected at most {MAX_WATCHES} watches, got more; watch at another "
                "server",
                limit=str(MAX_WATCHES),
            )
        feed = self._feeds.get(namespace)
        if feed is None or feed.has_ended:
            changes = Changes(
                namespace, self._catalogue, self._journal, clock=self._clock
            )
            feed = _Feed(namespace, changes, self._journal, clock=self._clock)
            self._feeds[namespace] = feed
        feed.watches += 1
        self._watches += 1
        try:
            await feed.look()
            feed.poll_every(self._poll_seconds)
            self._check(feed)
            yield feed
        finally:
            feed.watches -= 1
            self._watches -= 1
            if not feed.watches:
                feed.close()
                if self._feeds.get(namespace) is feed:
                    del self._feeds[namespace]

    def _check(self, feed: "_Feed") -> None:
        """Ends a watch whose feed has ended."""
        if self._is_closed:
            raise StorageUnavailableError(
                "the server stops; go on from the last token at another one"
            )
        feed.check()


class _Feed:
    """The journal of one namespace, polled for all who watch it."""

    def __init__(
        self, namespace: str, changes: Changes, journal: Journal, *, clock: Clock
    ) -> None:
        self.watches = 0
        self.moved = asyncio.Event()
        """Set, and replaced, when there is something new."""
        self._namespace = namespace
        self._changes = changes
        self._journal = journal
        self._clock = clock
        self._looking = asyncio.Lock()
        self._tip: Position | None = None
        self._tail = 0
        self._polling: asyncio.Task[None] | None = None

    @property
    def tip(self) -> Position:
        """Where a watch begins that goes on from now."""
        assert self._tip is not None
        return self._tip

    @property
    def has_ended(self) -> bool:
        """Whether it polls no more."""
        return self._polling is not None and self._polling.done()

    def check(self) -> None:
        """Raises what the poll has ended with, if it has."""
        if self._polling is not None and self._polling.done():
            self._polling.result()

    def close(self) -> None:
        """Polls no more."""
        if self._polling is not None:
            self._polling.cancel()
        self.moved.set()

    def poll_every(self, seconds: float) -> None:
        """Polls from now on, if it does not yet."""
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(seconds))
            self._polling.add_done_callback(lambda _: self.moved.set())

    async def look(self) -> None:
        """Goes through all that has been announced by now."""
        async with self._looking:
            if self._tip is None:
                numbers = await self._journal.recent(self._namespace, limit=BEFORE)
                self._tail = numbers[-1] if numbers else 0
                self._tip = Position(numbers[0] - 1 if numbers else 0)
            before, more = self._tip, True
            while more:
                found = await self._journal.following(
                    self._namespace, self._tail, limit=MAX_PENDING
                )
                self._changes.begin_poll(found)
                self._tail += len(found)
                more = len(found) == MAX_PENDING
                # What is damaged fails those who ask for it, and not the others.
                async for position, _ in self._news(self._tip, None):
                    self._tip = position
            if self._tip != before:
                self.moved.set()
                self.moved = asyncio.Event()

    async def news(
        self, position: Position, run: str | None
    ) -> AsyncIterator[tuple[Position, Change | CorruptDataError]]:
        """Yields the positions on the way to the tail, and the changes there, or why
        one cannot be known.

        Args:
            position: Where to begin.
            run: Only what matters to this run; None: to any.

        Raises:
            ResumeTokenExpiredError: What came of one of them cannot be known: its
                announcement was trimmed.
        """
        async for at, change in self._news(position, run):
            if change is None:
                raise expired(self._namespace)
            yield at, change

    async def _news(
        self, position: Position, run: str | None
    ) -> AsyncIterator[tuple[Position, Change | CorruptDataError | None]]:
        """As ``news``; None where an announcement was trimmed."""
        numbers = due(position, self._tail)
        while batch := list(islice(numbers, READS_AT_ONCE)):
            looked = (self._look(number, run) for number in batch)
            found = await asyncio.gather(*looked)
            for number, change in zip(batch, found, strict=True):
                if number > position.last and is_full(position):
                    return
                outcome = Outcome.SUPERSEDED
                if isinstance(change, Change):
                    outcome = change.outcome
                position = after(position, number, outcome)
                yield position, change

    async def _look(
        self, number: int, run: str | None
    ) -> Change | CorruptDataError | None:
        try:
            return await self._changes.change(number, run)
        except CorruptDataError as e:
            return e

    async def _poll(self, seconds: float) -> None:
        landings = self._journal.landings(self._namespace)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(landings.wait(), seconds)
            landings.clear()
            await self.look()


def _parsed(of: RunName | str) -> tuple[str, str | None, str]:
    """The namespace and the run of what is watched, and its name."""
    if isinstance(of, RunName):
        return of.namespace, of.run, of.resource
    return of, None, f"namespaces/{of}"
