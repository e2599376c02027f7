"""Watches: streams the changes of the checkpoints of a run or a namespace.

``events`` decides what is an event. A process polls the journal of a namespace once for
all of its watches, and only while there is a watch; a change that this process made
wakes the poll at once. The poll resolves new changes, so that the watches find them in
the cache. Each watch advances from its own position at the pace of its client; a slow
one reads again what is no longer cached.

All watches of a process share the `ChangeCache` of a namespace, so an announcement and
the object that it names are read once. The outcome of a change is final unless it is
pending. A pending change is resolved again: at every poll while it is young, less often
later.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from storesvc.auth.call import is_restricted, may, principal_name
from storesvc.auth.policy import Namespace, Permission
from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog, or_damage
from storesvc.catalog.journal import READS_AT_ONCE, Journal, expired_token_error
from storesvc.catalog.store_record import read_store, token_key
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    LimitExceededError,
    StorageUnavailableError,
)
from storesvc.format.names import RunName, TagName
from storesvc.storage.bucket import Bucket
from storesvc.watch.events import (
    MAX_PENDING,
    NONCE_BYTES,
    Held,
    Outcome,
    Position,
    advance,
    is_full,
    numbers_to_resolve,
    pack_token,
    resolve,
    unpack_token,
)
from storesvc_proto.v1 import bucket_pb2 as pb

YOUNG_SECONDS: Final = 60.0
"""Age up to which a pending change is resolved again at every poll."""

OLD_SECONDS: Final = 30.0
"""Interval at which an older pending change is resolved again."""

_TAGGING: Final = (pb.Announcement.KIND_TAG, pb.Announcement.KIND_UNTAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An announced change and its outcome."""

    outcome: Outcome
    announcement: pb.Announcement
    run: RunName
    checkpoint: pb.CheckpointRecord | None = None
    """For LANDED: the checkpoint in its current state; None: it was purged."""


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A change, and when it was resolved."""

    change: Change
    poll: int
    first: float
    """Time when it was first resolved, by ``Clock.elapsed``."""
    last: float
    """Time when it was last resolved."""


T = TypeVar("T")


@dataclass(eq=False, repr=False)
class ChangeCache:
    """The changes of one namespace."""

    namespace: str
    catalog: Catalog
    journal: Journal
    kept: int
    clock: Clock
    _poll: int = 0
    _announced: OrderedDict[int, pb.Announcement] = field(default_factory=OrderedDict)
    _resolved: OrderedDict[int, _Resolved] = field(default_factory=OrderedDict)

    def begin_poll(self, found: Iterable[tuple[int, pb.Announcement | None]]) -> None:
        """Adds announcements that were read; pending changes may have landed."""
        self._poll += 1
        for number, announcement in found:
            if announcement is not None:
                self._keep(self._announced, number, announcement)

    async def change(self, number: int, run: str | None = None) -> Change | None:
        """Returns a change; None: its announcement was trimmed.

        Args:
            number: Number of the announcement; it must exist, or have existed.
            run: Only changes of this run are resolved; others count as SUPERSEDED.

        Raises:
            CorruptDataError: The announcement or the object that it names is damaged.
        """
        resolved = self._resolved.get(number)
        if resolved is not None:
            announcement: pb.Announcement | None = resolved.change.announcement
        elif number in self._announced:
            announcement = self._announced[number]
        else:
            announcement = await self.journal.read(self.namespace, number)
        if announcement is None:
            return None
        name = RunName(self.namespace, announcement.run)
        if run not in (None, name.run):
            return Change(
                outcome=Outcome.SUPERSEDED, announcement=announcement, run=name
            )
        if resolved is None or self._is_due(resolved):
            change = await self._resolve(number, name, announcement)
            now = self.clock.elapsed()
            first = now if resolved is None else resolved.first
            resolved = _Resolved(change, self._poll, first, now)
            self._keep(self._resolved, number, resolved)
        return resolved.change

    async def _resolve(
        self, number: int, run: RunName, announcement: pb.Announcement
    ) -> Change:
        """Reads the object that an announcement names, and resolves its change."""
        held: Held
        slot = tag = None
        if announcement.kind in _TAGGING:
            tag = await self.catalog.tag_slot(TagName(run, announcement.tag))
            held = tag and tag[0]
        else:
            slot = await self.catalog.slot(run, announcement.step)
            held = slot and slot[0]
            if held is None and announcement.kind == pb.Announcement.KIND_COMMIT:
                # A save in one call writes a slot that it has not reserved.
                held = await self.catalog.reservation(run, announcement.upload)
        outcome = resolve(number, announcement, held, now=self.clock.now())
        if outcome is Outcome.LANDED and announcement.kind in _TAGGING:
            slot = await self.catalog.slot(run, announcement.step)
        checkpoint = slot and slot[0]
        if checkpoint and (
            checkpoint.state not in slots.CHECKPOINTS
            or checkpoint.upload != announcement.upload
        ):
            checkpoint = None
        return Change(
            outcome=outcome, announcement=announcement, run=run, checkpoint=checkpoint
        )

    def _is_due(self, found: _Resolved) -> bool:
        """Returns whether a pending change must be resolved again."""
        if found.change.outcome is not Outcome.PENDING or found.poll == self._poll:
            return False
        now = self.clock.elapsed()
        return now - found.first < YOUNG_SECONDS or now - found.last >= OLD_SECONDS

    def _keep(self, found: OrderedDict[int, T], number: int, value: T) -> None:
        found[number] = value
        found.move_to_end(number)
        if len(found) > self.kept:
            found.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Limits of the watches of a process."""

    poll_seconds: float = 1.0
    """Interval at which it polls for changes that other processes announced."""
    token_seconds: float = 20.0
    """Maximum interval between the resume tokens of a watch."""
    max_watches: int = 1000
    """Maximum watches. With a policy, a caller may have as many as it leaves free for
    others."""
    kept: int = 512
    """Maximum changes of a namespace that are kept."""


BEFORE: Final = MAX_PENDING
"""Number of earlier announcements that a watch without a token considers: their changes
may still land. Their times are no guide, because other clocks wrote them."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change with a resume token, or a token alone."""

    change: Change | None
    """A change that has landed; None: only the token is new."""
    token: str
    """Resumes the watch after this event."""


@dataclass(eq=False, repr=False)
class Watcher:
    """Serves the watches of a process."""

    catalog: Catalog
    journal: Journal
    bucket: Bucket
    clock: Clock
    limits: WatchLimits = WatchLimits()
    _key: bytes = b""
    _feeds: "dict[str, _Feed]" = field(default_factory=dict)
    _watches: Counter[str] = field(default_factory=Counter)
    _is_closed: bool = False

    async def watch(self, of: RunName | str, token: str) -> AsyncGenerator[WatchEvent]:
        """Yields a token at once, then events when they happen, without an end.

        Args:
            of: A run or a namespace.
            token: Where to resume; "": begin now.

        Raises:
            InvalidResumeTokenError: The token was made for another watch.
            ResumeTokenExpiredError: The next events are gone.
            StorageUnavailableError: The storage does not answer, or the server stops;
                resume with the last token.
            LimitExceededError: There are too many watches.
            CorruptDataError: An announcement or the object that it names is damaged;
                the last token resumes after it.
        """
        namespace, run, parent = _parse_watched(of)
        position = None
        if not self._key:
            self._key = token_key(*await read_store(self.bucket))
        if token:
            position = unpack_token(token, parent=parent, key=self._key)
        async with self._join_feed(namespace) as feed:
            if position is None:
                position = feed.tip
            else:  # joined first: the feed must have come at least this far
                await self.journal.following(namespace, position.last, limit=1)
            yield WatchEvent(None, self._token(position, parent))
            beat = self.clock.elapsed() + self.limits.token_seconds
            while True:
                moved = feed.moved
                async for at, change in feed.changes(position, run):
                    position = at
                    if isinstance(change, CorruptDataError):
                        yield WatchEvent(None, self._token(position, parent))
                        raise _for_caller(change, namespace, run)
                    # What the caller may not see must not delay the next token either.
                    if change.outcome is Outcome.LANDED and may(
                        Permission.CHECKPOINTS_WATCH, change.run
                    ):
                        yield WatchEvent(change, self._token(position, parent))
                        beat = self.clock.elapsed() + self.limits.token_seconds
                left = beat - self.clock.elapsed()
                with suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), max(0, left))
                self._check(feed)
                if self.clock.elapsed() >= beat:
                    yield WatchEvent(None, self._token(position, parent))
                    beat = self.clock.elapsed() + self.limits.token_seconds

    def close(self) -> None:
        """Ends all watches, and rejects new ones."""
        self._is_closed = True
        for feed in self._feeds.values():
            feed.close()

    def _token(self, position: Position, parent: str) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return pack_token(position, parent=parent, key=self._key, nonce=nonce)

    @asynccontextmanager
    async def _join_feed(self, namespace: str) -> "AsyncIterator[_Feed]":
        """Yields the feed of a namespace, just polled, while the context lasts."""
        caller, most = principal_name(), self.limits.max_watches
        free = most - self._watches.total()
        if not free or (is_restricted() and self._watches[caller] >= free):
            raise LimitExceededError(
                f"expected at most {most} watches, and as many of one caller as are "
                "left for others, got more; watch at another server",
                limit=str(most),
            )
        feed = self._feeds.get(namespace)
        if feed is None or feed.has_ended:
            cache = ChangeCache(
                namespace,
                self.catalog,
                self.journal,
                kept=self.limits.kept,
                clock=self.clock,
            )
            feed = _Feed(namespace, cache, self.journal, clock=self.clock)
            self._feeds[namespace] = feed
        feed.watches += 1
        self._watches[caller] += 1
        try:
            await feed.poll()
            feed.poll_every(self.limits.poll_seconds)
            self._check(feed)
            yield feed
        finally:
            feed.watches -= 1
            self._watches[caller] -= 1
            self._watches += Counter()  # forgets callers without a watch
            if not feed.watches:
                feed.close()
                if self._feeds.get(namespace) is feed:
                    del self._feeds[namespace]

    def _check(self, feed: "_Feed") -> None:
        """Raises the error of a feed that has ended."""
        if self._is_closed:
            raise StorageUnavailableError(
                "the server stops; resume from the last token at another server"
            )
        feed.check()


class _Feed:
    """The journal of one namespace, polled for all of its watches."""

    def __init__(
        self, namespace: str, cache: ChangeCache, journal: Journal, *, clock: Clock
    ) -> None:
        self.watches = 0
        self.moved = asyncio.Event()
        """Set, and replaced by a new event, when there is a new announcement."""
        self._namespace = namespace
        self._cache = cache
        self._journal = journal
        self._clock = clock
        self._poll_lock = asyncio.Lock()
        self._tip: Position | None = None
        self._tail = 0
        self._polling: asyncio.Task[None] | None = None

    @property
    def tip(self) -> Position:
        """The position of a watch that begins now."""
        assert self._tip is not None
        return self._tip

    @property
    def has_ended(self) -> bool:
        """True if the poll has ended."""
        return self._polling is not None and self._polling.done()

    def check(self) -> None:
        """Raises the error of the poll, if it has ended."""
        if self._polling is not None and self._polling.done():
            self._polling.result()

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        self.moved.set()

    def poll_every(self, seconds: float) -> None:
        """Starts the poll, if it is not running."""
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_forever(seconds))
            self._polling.add_done_callback(lambda _: self.moved.set())

    async def poll(self) -> None:
        """Resolves all changes that have been announced so far."""
        async with self._poll_lock:
            if self._tip is None:
                numbers = await self._journal.recent(self._namespace, limit=BEFORE)
                self._tail = numbers[-1] if numbers else 0
                self._tip = Position(numbers[0] - 1 if numbers else 0)
            before, more = self._tip, True
            while more:
                found = await self._journal.following(
                    self._namespace, self._tail, limit=MAX_PENDING
                )
                self._cache.begin_poll(found)
                self._tail += len(found)
                more = len(found) == MAX_PENDING
                # Damage fails the watches that ask for it, and not the poll.
                async for position, _ in self._changes_from(self._tip, None):
                    self._tip = position
            if self._tip != before:
                self.moved.set()
                self.moved = asyncio.Event()

    async def changes(
        self, position: Position, run: str | None
    ) -> AsyncIterator[tuple[Position, Change | CorruptDataError]]:
        """Yields the positions up to the tail of the journal, each with its change or
        with the error of a damaged one.

        Args:
            run: Only changes of this run matter; None: of every run.

        Raises:
            ResumeTokenExpiredError: The outcome of a change is unknown, because its
                announcement was trimmed.
        """
        async for at, change in self._changes_from(position, run):
            if change is None:
                raise expired_token_error(self._namespace)
            yield at, change

    async def _changes_from(
        self, position: Position, run: str | None
    ) -> AsyncIterator[tuple[Position, Change | CorruptDataError | None]]:
        """Works like ``changes``, with None for an announcement that was trimmed."""
        numbers = numbers_to_resolve(position, self._tail)
        while batch := list(islice(numbers, READS_AT_ONCE)):
            changes = (or_damage(self._cache.change, number, run) for number in batch)
            found = await asyncio.gather(*changes)
            for number, change in zip(batch, found, strict=True):
                if number > position.last and is_full(position):
                    return
                outcome = Outcome.SUPERSEDED
                if isinstance(change, Change):
                    outcome = change.outcome
                position = advance(position, number, outcome)
                yield position, change

    async def _poll_forever(self, seconds: float) -> None:
        landings = self._journal.landings(self._namespace)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(landings.wait(), seconds)
            landings.clear()
            await self.poll()


def _for_caller(
    error: CorruptDataError, namespace: str, run: str | None
) -> CorruptDataError:
    """Returns the error of a damaged record; without its name for a caller that may not
    list each run of the watched namespace."""
    if run is not None or may(Permission.RUNS_LIST, Namespace(namespace)):
        return error
    return CorruptDataError(
        f"a record of namespace {namespace} is damaged; resume with the last token, "
        "and ask an administrator of the store to verify it"
    )


def _parse_watched(of: RunName | str) -> tuple[str, str | None, str]:
    """Returns the namespace, the run, and the resource name of what is watched."""
    if isinstance(of, RunName):
        return of.namespace, of.run, of.resource
    return of, None, f"namespaces/{of}"
