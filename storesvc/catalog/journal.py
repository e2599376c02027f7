"""The journal: numbered announcements of changes, one sequence per namespace.

``bucket.proto`` defines what an announcement guarantees. The numbers are consecutive
and begin at 1, which saves lists: an announcement is read by its number, or found not
to exist yet. Only a process that knows no number yet, or was overtaken by others,
lists, and then the end only.

The oldest announcements are trimmed; the last one never is, so that numbers are never
used again.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Container
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from cachetools import LRUCache

from storesvc.catalog.numbered import PAGE, NumberedObjects
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.slots import PATIENCE
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    InvalidResumeTokenError,
    ResumeTokenExpiredError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.storage.bucket import IF_ABSENT, Bucket, PreconditionError
from storesvc.storage.requests import background_task
from storesvc_proto.v1 import bucket_pb2 as pb

LEAST_AGE: Final = PATIENCE + timedelta(hours=1)
"""Minimum age of an announcement that is trimmed: its change can no longer be made."""

_YOUNG: Final = LEAST_AGE / 2
"""Age below which an announcement is not trimmed while another is written: the rest is
for the difference of two clocks, and for a write that takes long."""

KEPT_AGE: Final = timedelta(days=7)
"""Age at which announcements are trimmed, even if they are few."""

KEPT: Final = 100_000
"""Announcements older than ``LEAST_AGE`` that a namespace keeps."""

READS_AT_ONCE: Final = 32

MAX_TRIES: Final = 200
"""Maximum numbers that one announcement tries. Each concurrent change of another
process takes one, so only a storage without conditional writes takes so many."""

TRIES_A_LINE: Final = 20
"""Attempts after which a warning is logged, each time."""

_SLACK: Final = timedelta(hours=1)
"""Maximum clock difference of two servers, for lists of recent changes."""

MAX_KNOWN: Final = 10_000
"""Maximum namespaces whose last number is remembered; others are listed."""

MAX_OWN: Final = 1000
"""Maximum announcements of this process in memory, each of some 200 bytes."""

_log = logging.getLogger(__name__)


class Journal:
    """Reads and appends the journals of a bucket."""

    def __init__(
        self, bucket: Bucket, *, clock: Clock, max_known: int = MAX_KNOWN
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        # Number of an announcement that exists or existed; 0 for none.
        self._known: LRUCache[str, int] = LRUCache(max_known)
        # What this process has written lately; an announcement never changes.
        self._own: LRUCache[tuple[str, int], pb.Announcement] = LRUCache(MAX_OWN)
        # Entries live as long as a caller holds them.
        self._announcing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._landings: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    async def announce(self, namespace: str, announcement: pb.Announcement) -> int:
        """Appends an announcement of a change, and returns its number.

        The object must have been read before, and the change must carry the number.

        Raises:
            StorageUnavailableError: Other processes took every number that was tried,
                or the storage does not answer.
        """
        for _ in range(MAX_TRIES):
            # 1. Take the next number with a conditional write; read the last one that
            #    is known in the meantime.
            known = self._known.get(namespace, 0)
            async with background_task(self._create_time(namespace, known)) as looking:
                number = await self._create(namespace, announcement)
                # 2. It continues the journal if it follows a number that was there and
                #    is young even now: no collector has trimmed it before the write,
                #    however long that took.
                if number == known + 1:
                    when = await looking
                    if when is not None and self._clock.now() - when < _YOUNG:
                        return number
            # 3. Otherwise check that now: until the write, other processes could still
            #    trim the numbers before it.
            if await self._is_next(namespace, number):
                return number
            self._own.pop((namespace, number), None)
        raise _overtaken(namespace)

    async def look_up(self, namespace: str) -> None:
        """Looks for the last number, so that ``announce`` need not."""
        if namespace not in self._known:
            await self._last(namespace, 0)

    def notify_landed(self, namespace: str) -> None:
        """Notifies the watchers of this process that an announced change was made."""
        landings = self._landings.get(namespace)
        if landings is not None:
            landings.set()

    def landings(self, namespace: str) -> asyncio.Event:
        """Returns an event that is set whenever this process makes a change, for as
        long as the caller holds it."""
        return self._landings.setdefault(namespace, asyncio.Event())

    async def read(self, namespace: str, number: int) -> pb.Announcement | None:
        """Returns an announcement; None if it does not exist yet, or was trimmed.

        Raises:
            CorruptDataError: The announcement is damaged.
        """
        path = layout.announcement(namespace, number)
        found = await read_record(self._bucket, path, pb.Announcement)
        return found and found[0]

    async def recall(self, namespace: str, number: int) -> pb.Announcement | None:
        """Returns an announcement that this process has written, also if it was trimmed
        since; otherwise like ``read``."""
        own = self._own.get((namespace, number))
        return own or await self.read(namespace, number)

    async def following(
        self, namespace: str, after: int, *, limit: int
    ) -> list[tuple[int, pb.Announcement | None]]:
        """Returns the announcements after a number, in order; None for a damaged one.

        Args:
            after: The number; 0 returns them from the first one.

        Raises:
            ResumeTokenExpiredError: The next announcements were trimmed.
            InvalidResumeTokenError: The number does not exist yet.
        """
        found: list[tuple[int, pb.Announcement | None]] = []
        more, batch = True, 1  # usually there is none
        while more and len(found) < limit:
            first = after + len(found) + 1
            numbers = range(first, first + min(batch, limit - len(found)))
            read = await asyncio.gather(*(self._look(namespace, n) for n in numbers))
            for number, (is_there, announcement) in zip(numbers, read, strict=True):
                more = more and is_there
                if more:
                    found.append((number, announcement))
            batch = min(2 * batch, READS_AT_ONCE)
        if found:
            self._note(namespace, found[-1][0])
        else:
            await self._check_there(namespace, after)
        return found

    async def tail(self, namespace: str) -> int:
        """Returns the number of the last announcement; 0 for none."""
        return await self._last(namespace, self._known.get(namespace, 0))

    async def recent(self, namespace: str, *, limit: int) -> range:
        """Returns the numbers of the last announcements, damaged or not."""
        tail = await self.tail(namespace)
        first = max(1, tail - limit + 1)
        span = await self._numbers(namespace).list_between(first, tail + 1)
        numbers = span.numbers
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    async def changes(
        self, run: RunName, uploads: Container[str] | None = None, *, since: datetime
    ) -> AsyncGenerator[tuple[int, pb.Announcement]]:
        """Yields the announced changes of some uploads of a run, the last one first.

        The changes need not have been made. Skips damaged announcements.

        Args:
            since: Skips announcements that servers made over an hour before this time.
        """
        last = await self.tail(run.namespace)
        while last > 0:
            numbers = range(last, max(0, last - READS_AT_ONCE), -1)
            looks = (self._look(run.namespace, number) for number in numbers)
            found = await asyncio.gather(*looks)
            for number, (_, one) in zip(numbers, found, strict=True):
                if one is None or one.run != run.run:
                    continue
                if uploads is None or one.upload in uploads:
                    yield number, one
            if not found[-1][0] or any(
                one and one.create_time.ToDatetime(UTC) < since - _SLACK
                for _, one in found
            ):
                return  # the rest is older, or trimmed
            last = numbers[-1] - 1

    async def trim(
        self, namespace: str, *, keep: int = KEPT, older_than: timedelta = KEPT_AGE
    ) -> int:
        """Deletes the oldest announcements, and returns their number.

        Keeps those younger than ``LEAST_AGE``, and always the last one.

        Args:
            namespace: The namespace of the journal.
            keep: Number of announcements to keep ...
            older_than: ... unless they are older than this.
        """
        numbers, deleted, limit = self._numbers(namespace), 0, READS_AT_ONCE
        # From the list, not from what this process knows: an earlier version of the
        # journal may have been restored.
        end = await numbers.list_end(after=self._known.get(namespace, 0) - 1)
        end = end if end.numbers else await numbers.list_end()
        if not end.numbers:
            return 0
        surplus, at_once = None, 1  # usually none is old enough
        while True:
            found = (await numbers.list(limit=limit)).numbers
            # The last number stays, or the next announcement would begin at 1 again.
            old = [number for number in found if number < end.numbers[-1]]
            if not old:
                return deleted
            if surplus is None:
                surplus = max(0, end.numbers[-1] - old[0] + 1 - max(keep, 1))
            while old:
                batch, old = old[:at_once], old[at_once:]
                looks = (self._create_time(namespace, number) for number in batch)
                created = await asyncio.gather(*looks)
                # In order, one after another: after a crash between two deletions the
                # journal must not have a gap, at which a watch would stop.
                for number, when in zip(batch, created, strict=True):
                    least = max(older_than, LEAST_AGE)
                    least = LEAST_AGE if deleted < surplus else least
                    if when is not None and self._clock.now() - when <= least:
                        return deleted
                    await self._bucket.delete(layout.announcement(namespace, number))
                    deleted += 1
                at_once = READS_AT_ONCE
            limit = PAGE

    async def _create(self, namespace: str, announcement: pb.Announcement) -> int:
        record = pb.Announcement()
        record.CopyFrom(announcement)
        record.nonce = uuid.uuid4().hex
        async with self._announcing.setdefault(namespace, asyncio.Lock()):
            # One at a time in this process: otherwise all but one of its concurrent
            # changes would fail on each number.
            known = self._known.get(namespace)
            if known is None:
                known = await self._last(namespace, 0)
            for tries in range(1, MAX_TRIES + 1):
                number = known + 1
                path = layout.announcement(namespace, number)
                # Set for each try: ``trim`` derives from this time that the change can
                # no longer be made.
                record.create_time.CopyFrom(timestamp(self._clock.now()))
                try:
                    await write_record(self._bucket, path, record, condition=IF_ABSENT)
                except PreconditionError:  # another process took the number
                    known = await self._last(namespace, number)
                    if tries % TRIES_A_LINE == 0:
                        _log.warning(
                            "journal of %s: %d consecutive numbers were taken by other "
                            "processes, the last one %d",
                            *(namespace, tries, number),
                        )
                    continue
                self._note(namespace, number)
                self._own[namespace, number] = record
                return number
        raise _overtaken(namespace)

    async def _is_next(self, namespace: str, number: int) -> bool:
        """Returns whether a number that this process created continues the journal."""
        # If this process slept, earlier numbers may have been trimmed; no watcher would
        # read a number behind such a gap, so the announcement is deleted.
        # The predecessor before the list: usually it is there, which saves the list.
        if number > 1 and await self._is_there(namespace, number - 1):
            return True
        later = (await self._numbers(namespace).list(after=number)).numbers
        if not later:
            return True
        self._note(namespace, later[-1])
        # If the next number exists, this one may belong to the journal after all: it
        # stays, unused, so that there is no gap.
        if later[0] != number + 1:
            await self._bucket.delete(layout.announcement(namespace, number))
        return False

    async def _create_time(self, namespace: str, number: int) -> datetime | None:
        """Returns the time of an announcement; None if it is missing or damaged."""
        if not number:
            return None
        _, found = await self._look(namespace, number)
        return None if found is None else found.create_time.ToDatetime(UTC)

    async def _look(
        self, namespace: str, number: int
    ) -> tuple[bool, pb.Announcement | None]:
        """Returns whether an announcement exists, and its record if it is sound."""
        try:
            announcement = await self.read(namespace, number)
        except CorruptDataError:
            return True, None
        return announcement is not None, announcement

    async def _is_there(self, namespace: str, number: int) -> bool:
        """Returns whether an announcement exists, damaged or not."""
        path = layout.announcement(namespace, number)
        return await self._bucket.read(path) is not None

    async def _check_there(self, namespace: str, number: int) -> None:
        """Rejects a number that no announcement follows, unless it is the last one."""
        if number and await self._is_there(namespace, number):
            return
        later = (await self._numbers(namespace).list(after=number)).numbers
        if number and not later:
            raise InvalidResumeTokenError(
                f"resume_token: expected at most what the journal of {namespace} has, "
                f"got announcement {number}; watch without a token"
            )
        if later and later[0] != number + 1:
            raise expired_token_error(namespace)

    async def _last(self, namespace: str, known: int) -> int:
        """Lists the last number after a known one."""
        end = await self._numbers(namespace).list_end(after=known or -1)
        last = end.numbers[-1] if end.numbers else known
        self._note(namespace, last)
        return last

    def _numbers(self, namespace: str) -> NumberedObjects:
        path = partial(layout.announcement, namespace)
        return NumberedObjects(self._bucket, layout.journal(namespace), path)

    def _note(self, namespace: str, number: int) -> None:
        self._known[namespace] = max(number, self._known.get(namespace, 0))


def _overtaken(namespace: str) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"journal of {namespace}: expected a free number for an announcement, but "
        f"{MAX_TRIES} consecutive numbers were taken; try again, and check that the "
        "storage supports conditional writes"
    )


def expired_token_error(namespace: str) -> ResumeTokenExpiredError:
    """Returns the error of a resume token whose next announcements were trimmed."""
    return ResumeTokenExpiredError(
        f"resume_token: the events of {namespace} that follow it are gone; list the "
        "checkpoints, then watch without a token"
    )
