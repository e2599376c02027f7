"""Keeps in memory what a policy needs to know of the committed checkpoints of a run.

A policy is applied after each commit, and all slots of a long run are many. So they are
read once, and then only those whose changes the journal has announced since. The memory
is right because each change is announced before it is made:

1. What is announced and not yet made is read again until it is made or can no longer be
   (``resolve``), also if it was announced shortly before the slots were read.
2. Announcements that are missing or damaged, or very many, end the memory. It also ends
   after a day: a process may have slept for long before it made a change.
3. Slots that a person deleted are not announced. So ``enforcement`` compares a list of
   their names before it deletes a checkpoint by what is in memory.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from cachetools import LRUCache

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import READS_AT_ONCE, Journal
from storesvc.catalog.records import record_etag
from storesvc.catalog.slots import COMMITTED
from storesvc.clock import Clock
from storesvc.errors import CorruptDataError, FormatUnsupportedError
from storesvc.format.names import RunName, TagName
from storesvc.lifecycle.holds import References
from storesvc.storage.requests import gather_each
from storesvc.watch.events import (
    Held,
    Position,
    advance,
    numbers_to_resolve,
    resolve,
)
from storesvc_proto.v1 import bucket_pb2 as pb

PAGE: Final = 1000
"""Checkpoints per read of the catalog."""

MAX_KEPT: Final = 50_000
"""Maximum checkpoints of all runs in memory, each of some 700 bytes."""

MAX_CHANGES: Final = 1000
"""Announcements of the namespace that are read at most; more, and all slots are."""

YOUNG: Final = timedelta(minutes=10)
"""Age up to which an announced change may still be being made."""

LIFETIME_SECONDS: Final = 86_400.0
"""Time after which all slots are read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The values of a committed checkpoint that a policy may use."""

    step: int
    uid: str
    etag: str
    own_bytes: int
    commit_time: datetime
    metrics: Mapping[str, float]
    pinned: bool


@dataclass(slots=True, kw_only=True)
class Committed:
    """The committed checkpoints of a run, as of its last read."""

    known: dict[int, Known]
    tags: Mapping[str, str]
    """Tags by the uid of their checkpoint."""
    position: Position
    """Announcements that were seen, and those whose changes were not made yet."""
    elapsed: float
    """``Clock.elapsed`` when all slots were read."""


class CommittedCheckpoints:
    """Reads the committed checkpoints of runs, and remembers them."""

    def __init__(
        self, catalog: Catalog, references: References, journal: Journal, clock: Clock
    ) -> None:
        self._catalog = catalog
        self._references = references
        self._journal = journal
        self._clock = clock
        self._kept: LRUCache[RunName, Committed] = LRUCache(
            MAX_KEPT, getsizeof=lambda committed: len(committed.known) + 1
        )

    async def read(self, run: RunName) -> Committed:
        """Reads all committed checkpoints of a run.

        Raises:
            RunNotFoundError: The run does not exist.
            CorruptDataError: A slot is damaged.
        """
        self._kept.pop(run, None)
        elapsed = self._clock.elapsed()
        # The journal before the slots: what is announced afterwards is read later.
        young = await self._young(run.namespace)
        tags = await self._references.find_tags(run)
        known = {one.step: one async for one in self._list(run)}
        position = Position(young[-1][0] if young else 0)
        made = Committed(known=known, tags=tags, position=position, elapsed=elapsed)
        if len(known) < MAX_KEPT and young is not None:
            with suppress(_UnknownError, FormatUnsupportedError):
                await self._resolve(run, made, young)
                self._kept[run] = made
        return made

    async def update(self, run: RunName) -> Committed:
        """Returns the committed checkpoints of a run: those in memory, with what has
        changed since; otherwise as ``read``."""
        kept = self._kept.pop(run, None)  # until it is complete
        if kept is None or self._clock.elapsed() - kept.elapsed > LIFETIME_SECONDS:
            return await self.read(run)
        with suppress(_UnknownError, FormatUnsupportedError):
            tail = await self._journal.tail(run.namespace)
            numbers = [*numbers_to_resolve(kept.position, tail)]
            await self._resolve(run, kept, await self._announced(run, numbers))
            self._kept[run] = kept
            return kept
        return await self.read(run)

    async def is_current(self, run: RunName, committed: Committed) -> bool:
        """Returns whether all the checkpoints still have a slot."""
        return committed.known.keys() <= {*await self._catalog.steps(run)}

    async def _list(self, run: RunName) -> AsyncIterator[Known]:
        before = None
        while page := await self._catalog.checkpoints(run, before=before, limit=PAGE):
            for record in page:
                yield _describe(record)
            before = page[-1].step

    async def _young(self, namespace: str) -> "_Announced | None":
        """Returns the last announcement, and the young ones before it; None: one of
        them cannot be read."""
        first, batch, found = await self._journal.tail(namespace) + 1, 4, list[Any]()
        while first > 1:
            numbers = range(max(1, first - batch), first)
            try:
                new = await self._read(namespace, numbers)
            except CorruptDataError:
                return None
            if len(found) > MAX_CHANGES:
                return None
            found = [(n, a) for n, a in new if a is not None] + found
            if any(a is None or self._is_old(a) for _, a in new):
                break  # those before it were trimmed, or are older
            first, batch = numbers[0], min(2 * batch, READS_AT_ONCE)
        return found

    def _is_old(self, announcement: pb.Announcement) -> bool:
        made = announcement.create_time.ToDatetime(UTC)
        return self._clock.now() - made > YOUNG

    async def _announced(self, run: RunName, numbers: Sequence[int]) -> "_Announced":
        if len(numbers) > MAX_CHANGES:
            raise _UnknownError
        try:
            found = await self._read(run.namespace, numbers)
        except CorruptDataError as e:
            raise _UnknownError from e
        if any(announcement is None for _, announcement in found):
            raise _UnknownError
        return [(number, one) for number, one in found if one is not None]

    async def _read(
        self, namespace: str, numbers: Sequence[int]
    ) -> list[tuple[int, pb.Announcement | None]]:
        read = partial(self._journal.read, namespace)
        found = await gather_each(read, numbers)
        return [*zip(numbers, found, strict=True)]

    async def _resolve(
        self, run: RunName, committed: Committed, announced: "_Announced"
    ) -> None:
        """Reads what the announcements of a run name."""
        own = [(number, one) for number, one in announced if one.run == run.run]
        targets = {(one.tag, one.step, one.upload): one for _, one in own}
        looks = await gather_each(partial(self._held, run), targets.values())
        held = dict(zip(targets, looks, strict=True))
        position, now = committed.position, self._clock.now()
        for number, one in own:
            found = held[one.tag, one.step, one.upload]
            outcome = resolve(number, one, found, now=now)
            position = advance(position, number, outcome)
            if not one.tag:
                committed.known.pop(one.step, None)
                if isinstance(found, pb.CheckpointRecord) and found.state == COMMITTED:
                    committed.known[one.step] = _describe(found)
        last = max([position.last, *(number for number, _ in announced)])
        committed.position = Position(last, position.pending)
        if any(one.tag for _, one in own):
            committed.tags = await self._references.find_tags(run)

    async def _held(self, run: RunName, announcement: pb.Announcement) -> Held:
        """Reads the slot or the tag that an announcement names."""
        if announcement.tag:
            tag = await self._catalog.tag_slot(TagName(run, announcement.tag))
            return tag and tag[0]
        slot = await self._catalog.slot(run, announcement.step)
        if slot is None and announcement.kind == pb.Announcement.KIND_COMMIT:
            # A save in one call writes a slot that it has not reserved.
            return await self._catalog.reservation(run, announcement.upload)
        return slot and slot[0]


class _UnknownError(Exception):
    """The changes since the last read are not known."""


_Announced: TypeAlias = list[tuple[int, pb.Announcement]]


def _describe(record: pb.CheckpointRecord) -> Known:
    return Known(
        step=record.step,
        uid=record.upload,
        etag=record_etag(record),
        own_bytes=record.own_bytes,
        commit_time=record.commit_time.ToDatetime(UTC),
        metrics=dict(record.metrics),
        pinned=record.pinned,
    )
