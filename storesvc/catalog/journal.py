"""The journal: announcements of changes, numbered, one sequence a namespace.

``bucket.proto`` says what an announcement promises. The numbers are dense and begin
at 1, which saves lists: an announcement is read, or found not to be there yet, by its
number. Only a process that knows no number yet, or was overtaken, lists.

The oldest announcements are trimmed; the last one never is, so that numbers never
begin anew.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Container
from datetime import UTC, datetime, timedelta
from typing import Final
from weakref import WeakValueDictionary

from cachetools import LRUCache

from storesvc.catalog.announcements import PATIENCE
from storesvc.catalog.records import read_record, timestamp, write_record
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
from storesvc_proto.v1 import bucket_pb2 as pb

LEAST_AGE: Final = PATIENCE + timedelta(hours=1)
"""How old an announcement is at least that is trimmed: nobody waits any more for what
it has announced."""

KEPT_AGE: Final = timedelta(days=7)
"""How old an announcement becomes, where there are not too many."""

KEPT: Final = 100_000
"""Announcements that a namespace keeps, once they are older than ``LEAST_AGE``."""

READS_AT_ONCE: Final = 32

MAX_TRIES: Final = 200
"""Numbers that one announcement tries: one is lost to each change of another process
at the same moment, so that only a broken storage takes so many."""

TRIES_A_LINE: Final = 20
"""Tries for each line in the log."""
_SLACK: Final = timedelta(hours=1)
"""How far the clocks of two servers may differ in a look back."""

MAX_KNOWN: Final = 10_000
"""Namespaces of which a process knows a number; of others it lists the journal."""


_log = logging.getLogger(__name__)


class Journal:
    """The journals of a bucket."""

    def __init__(self, bucket: Bucket, *, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        # a number that is, or was, there; 0: none
        self._known: LRUCache[str, int] = LRUCache(MAX_KNOWN)
        # kept by whoever uses them
        self._announcing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._landings: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    async def announce(self, namespace: str, announcement: pb.Announcement) -> int:
        """Announces a change of an object that was read before, and returns the number
        of the announcement; the change must carry it.

        Raises:
            StorageUnavailableError: Other processes took each number that was tried,
                or the storage says so.
        """
        for _ in range(MAX_TRIES):
            number = await self._create(namespace, announcement)
            if await self._is_next(namespace, number):
                return number
        raise _overtaken(namespace)

    def landed(self, namespace: str) -> None:
        """Tells the watchers of this process that an announced change was made."""
        landings = self._landings.get(namespace)
        if landings is not None:
            landings.set()

    def landings(self, namespace: str) -> asyncio.Event:
        """Returns what is set whenever a change lands in this process, for as long as
        somebody keeps it."""
        return self._landings.setdefault(namespace, asyncio.Event())

    async def read(self, namespace: str, number: int) -> pb.Announcement | None:
        """Returns an announcement; None where it is not there yet, or was trimmed.

        Raises:
            CorruptDataError: It is damaged.
        """
        place = layout.announcement(namespace, number)
        found = await read_record(self._bucket, place, pb.Announcement)
        return found and found[0]

    async def following(
        self, namespace: str, after: int, *, limit: int
    ) -> list[tuple[int, pb.Announcement | None]]:
        """Returns the announcements after one, in order; None for a damaged one.

        Args:
            namespace: Of this namespace.
            after: The number of that one; 0: from the first.
            limit: At most so many.

        Raises:
            ResumeTokenExpiredError: The next ones were trimmed.
            InvalidResumeTokenError: There is no such number yet.
        """
        found: list[tuple[int, pb.Announcement | None]] = []
        more, batch = True, 1  # mostly there is none
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
        """Returns the number of the last announcement; 0: there is none."""
        known = self._known.get(namespace, 0)
        return await self._last(namespace, known)

    async def recent(self, namespace: str, *, limit: int) -> range:
        """Returns the numbers of the last announcements, damaged or not."""
        tail = await self.tail(namespace)
        least = max(0, tail - limit)
        numbers = await self._numbers(namespace, after=least)
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    async def changes(
        self, run: RunName, uploads: Container[str], *, since: datetime
    ) -> AsyncGenerator[tuple[int, pb.Announcement]]:
        """Yields the announced changes of some uploads of a run, the last one first,
        whether or not they were made; damaged announcements are passed over.

        Args:
            run: The run.
            uploads: Of these uploads.
            since: None that is older, by the clocks of servers, than an hour before.
        """
        last = await self.tail(run.namespace)
        while last > 0:
            numbers = range(last, max(0, last - READS_AT_ONCE), -1)
            looks = (self._look(run.namespace, number) for number in numbers)
            found = await asyncio.gather(*looks)
            for number, (_, one) in zip(numbers, found, strict=True):
                if one and one.run == run.run and one.upload in uploads:
                    yield number, one
            if not found[-1][0] or any(
                one and one.create_time.ToDatetime(UTC) < since - _SLACK
                for _, one in found
            ):
                return  # the rest is older, or was trimmed
            last = numbers[-1] - 1

    async def trim(
        self, namespace: str, *, keep: int = KEPT, older_than: timedelta = KEPT_AGE
    ) -> int:
        """Deletes the oldest announcements, and returns how many.

        None that is younger than ``LEAST_AGE``, and never the last one.

        Args:
            namespace: Of this namespace.
            keep: Of those that may be deleted, the newest of so many stay ...
            older_than: ... unless they are older than this.
        """
        numbers = await self._numbers(namespace)
        surplus = max(0, len(numbers) - max(keep, 1))
        deleted = 0
        for at in range(0, len(numbers) - 1, READS_AT_ONCE):
            batch = numbers[at : min(at + READS_AT_ONCE, len(numbers) - 1)]
            ages = await asyncio.gather(*(self._age(namespace, n) for n in batch))
            # In order, so that the journal never has a gap.
            for number, age in zip(batch, ages, strict=True):
                least = LEAST_AGE if deleted < surplus else max(older_than, LEAST_AGE)
                if age is not None and age <= least:
                    return deleted
                await self._bucket.delete(layout.announcement(namespace, number))
                deleted += 1
        return deleted

    async def _create(self, namespace: str, announcement: pb.Announcement) -> int:
        """Creates the next announcement, and returns its number."""
        record = pb.Announcement()
        record.CopyFrom(announcement)
        record.nonce = uuid.uuid4().hex
        async with self._announcing.setdefault(namespace, asyncio.Lock()):
            known = self._known.get(namespace)
            if known is None:
                known = await self._last(namespace, 0)
            for tries in range(1, MAX_TRIES + 1):
                number = known + 1
                place = layout.announcement(namespace, number)
                record.create_time.CopyFrom(timestamp(self._clock.now()))
                try:
                    await write_record(self._bucket, place, record, condition=IF_ABSENT)
                except PreconditionError:  # another process was faster
                    known = await self._last(namespace, number)
                    if tries % TRIES_A_LINE == 0:
                        _log.warning(
                            "journal of %s: %d numbers in turn were taken by others, "
                            "the last one %d",
                            *(namespace, tries, number),
                        )
                    continue
                self._note(namespace, number)
                return number
        raise _overtaken(namespace)

    async def _is_next(self, namespace: str, number: int) -> bool:
        """Whether a number that this process created was not trimmed long ago, while
        the process slept: no watch would look there. One that was is taken back."""
        if number > 1 and await self._is_there(namespace, number - 1):
            return True
        later = await self._numbers(namespace, after=number)
        if not later:
            return True
        self._note(namespace, later[-1])
        # Where the next one follows, this may be in its place all the same: it stays,
        # so that there is no gap, and nobody uses it.
        if later[0] != number + 1:
            await self._bucket.delete(layout.announcement(namespace, number))
        return False

    async def _look(
        self, namespace: str, number: int
    ) -> tuple[bool, pb.Announcement | None]:
        """Whether there is an announcement, and which, unless it is damaged."""
        try:
            announcement = await self.read(namespace, number)
        except CorruptDataError:
            return True, None
        return announcement is not None, announcement

    async def _is_there(self, namespace: str, number: int) -> bool:
        """Whether there is an announcement, damaged or not."""
        place = layout.announcement(namespace, number)
        return await self._bucket.read(place) is not None

    async def _check_there(self, namespace: str, number: int) -> None:
        """Refuses a number that nothing follows, unless it is the last one."""
        if number and await self._is_there(namespace, number):
            return
        later = await self._numbers(namespace, after=number)
        if number and not later:
            raise InvalidResumeTokenError(
                f"resume_token: expected at most what the journal of {namespace} has, "
                f"got announcement {number}; watch without a token"
            )
        if later and later[0] != number + 1:
            raise expired(namespace)

    async def _last(self, namespace: str, known: int) -> int:
        """The last number, by a list of those after a known one."""
        numbers = await self._numbers(namespace, after=known)
        last = max(known, numbers[-1]) if numbers else known
        self._note(namespace, last)
        return last

    async def _numbers(self, namespace: str, *, after: int = 0) -> list[int]:
        found = await self._bucket.list(
            layout.journal(namespace),
            after=layout.announcement(namespace, after) if after else "",
        )
        return [n for place in found if (n := layout.number_of(place)) is not None]

    async def _age(self, namespace: str, number: int) -> timedelta | None:
        """How old an announcement is; None where it is damaged, and serves nobody."""
        try:
            announcement = await self.read(namespace, number)
        except CorruptDataError:
            return None
        if announcement is None:  # another collector's
            return None
        return self._clock.now() - announcement.create_time.ToDatetime(UTC)

    def _note(self, namespace: str, number: int) -> None:
        self._known[namespace] = max(number, self._known.get(namespace, 0))


def _overtaken(namespace: str) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"journal of {namespace}: expected a free number for an announcement, but "
        f"{MAX_TRIES} in turn were taken; try again, and see that the storage honours "
        "conditional writes"
    )


def expired(namespace: str) -> ResumeTokenExpiredError:
    """Returns the refusal of a token whose next announcements were trimmed."""
    return ResumeTokenExpiredError(
        f"resume_token: the events of {namespace} that follow it are gone; list the "
        "checkpoints, then watch without a token"
    )
