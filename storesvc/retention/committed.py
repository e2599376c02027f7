"""Remembers what a policy needs to know of the committed checkpoints of a run.

A policy is applied after each commit, and all slots of a long run are many. So they are
read once, and then only those whose changes the journal has announced since. For other
processes, what is remembered is written to the bucket (``CommittedCheckpoints``).
The memory is right because each change is announced before it is made:

1. What is announced and not yet made is read again until it is made or can no longer be
   (``resolve``), also if it was announced shortly before the slots were read.
2. Announcements that are missing or damaged, or very many, end the memory. It also ends
   after a day: a process may have slept for long before it made a change.
3. Slots that a person deleted are not announced. So ``enforcement`` compares a list of
   their names before it deletes a checkpoint by what is in memory.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from cachetools import LRUCache

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal, expired_token_error
from storesvc.catalog.records import read_record, record_etag, seal_record, timestamp
from storesvc.catalog.slots import COMMITTED
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    FormatUnsupportedError,
    ResumeTokenExpiredError,
)
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, TagName
from storesvc.lifecycle.holds import References
from storesvc.retention.policy import Candidate
from storesvc.storage.bucket import Bucket
from storesvc.storage.requests import gather_each
from storesvc.watch.events import Held, Position, advance, numbers_to_resolve, resolve
from storesvc_proto.v1 import bucket_pb2 as pb

PAGE: Final = 1000
"""Checkpoints per read of the catalog."""

MAX_KEPT: Final = 50_000
"""Maximum checkpoints of all runs in memory, each of some 700 bytes."""

MAX_CHANGES: Final = 1000
"""Announcements of the namespace that are read at most; more, and all slots are."""

LIFETIME_SECONDS: Final = 86_400.0
"""Time after which all slots are read again."""

LEAST_WRITTEN: Final = 64
"""Checkpoints from which on they are written for other processes; fewer are read as
soon."""

FEW_CHANGES: Final = 2
"""Announcements that are read rather than what other processes have written."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_ID_BYTES: Final = 16
"""Bytes of an upload's id, and of an etag."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Candidate):
    """A committed checkpoint, without its tags."""

    uid: str
    etag: str
    own_bytes: int


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
    is_written: bool = False
    """True if it was written for other processes, and has not changed since."""


@dataclass(eq=False, repr=False)
class CommittedCheckpoints:
    """Reads the committed checkpoints of runs, and remembers them."""

    bucket: Bucket
    catalog: Catalog
    references: References
    journal: Journal
    clock: Clock
    _kept: LRUCache[RunName, Committed] = field(
        default_factory=lambda: LRUCache(
            MAX_KEPT, getsizeof=lambda committed: len(committed.known) + 1
        )
    )

    async def read(self, run: RunName) -> Committed:
        """Reads all committed checkpoints of a run.

        Raises:
            RunNotFoundError: The run does not exist.
            CorruptDataError: A slot is damaged.
        """
        self._kept.pop(run, None)
        elapsed, known = self.clock.elapsed(), dict[int, Known]()
        # The journal before the slots: what is announced afterwards is read later.
        tail = await self.journal.tail(run.namespace)
        changes = self.journal.changes(run, since=self.clock.now())
        young = [change async for change in changes]
        tags, before = await self.references.find_tags(run), None
        while page := await self.catalog.checkpoints(run, before=before, limit=PAGE):
            known |= {record.step: _describe(record) for record in page}
            before = page[-1].step
        made = Committed(
            known=known, tags=tags, position=Position(tail), elapsed=elapsed
        )
        if len(known) < MAX_KEPT:
            with suppress(FormatUnsupportedError):
                await self._resolve(run, made, young[::-1])
                self._kept[run] = made
        return made

    async def update(self, run: RunName) -> Committed:
        """Returns the committed checkpoints of a run: those in memory, or those that a
        process has written, with what has changed since; otherwise as ``read``."""
        kept = self._kept.pop(run, None)  # until it is complete
        tail = await self.journal.tail(run.namespace)
        if kept is None or tail - kept.position.last > FEW_CHANGES:
            found = await self._read_written(run)
            if found and (not kept or found.position.last > kept.position.last):
                kept = found
        if kept is not None and self._is_valid(kept, tail):
            with suppress(
                CorruptDataError, FormatUnsupportedError, ResumeTokenExpiredError
            ):
                await self._catch_up(run, kept, tail)
                self._kept[run] = kept
                return kept
        return await self.read(run)

    async def write(self, run: RunName) -> None:
        """Writes the checkpoints in memory for other processes, if they are many and
        have changed."""
        kept = self._kept.get(run)
        if kept is None or kept.is_written or len(kept.known) < LEAST_WRITTEN:
            return
        kept.is_written = True
        age = timedelta(seconds=self.clock.elapsed() - kept.elapsed)
        record, path = _pack(kept, self.clock.now() - age), RunPaths(run).committed
        # Unconditionally: an older one with more announcements is as good.
        await self.bucket.write(path, seal_record(path, record))

    async def is_current(self, run: RunName, committed: Committed) -> bool:
        """Returns whether all the checkpoints still have a slot."""
        return committed.known.keys() <= {*await self.catalog.steps(run)}

    async def _read_written(self, run: RunName) -> Committed | None:
        path = RunPaths(run).committed
        try:
            found = await read_record(self.bucket, path, pb.CommittedCheckpoints)
            if found is None:
                return None
            age = self.clock.now() - found[0].read_time.ToDatetime(UTC)
            # A clock may be behind that of the process that has written it.
            elapsed = self.clock.elapsed() - abs(age.total_seconds())
            return _unpack(found[0], elapsed)
        except (CorruptDataError, FormatUnsupportedError, LookupError, ValueError) as e:
            _log.warning("%s; all slots of %s are read", e, run)
            return None

    def _is_valid(self, committed: Committed, tail: int) -> bool:
        # A bucket may be a copy that was made while it changed.
        is_of_journal = committed.position.last <= tail
        age = self.clock.elapsed() - committed.elapsed
        return is_of_journal and age <= LIFETIME_SECONDS

    async def _catch_up(self, run: RunName, kept: Committed, tail: int) -> None:
        numbers = [*numbers_to_resolve(kept.position, tail)]
        if len(numbers) > MAX_CHANGES:
            raise expired_token_error(run.namespace)
        read = partial(self.journal.recall, run.namespace)
        own = list[tuple[int, pb.Announcement]]()
        for number, one in zip(numbers, await gather_each(read, numbers), strict=True):
            if one is None:
                raise expired_token_error(run.namespace)
            if one.run == run.run:
                own.append((number, one))
        kept.position = Position(max(tail, kept.position.last), kept.position.pending)
        await self._resolve(run, kept, own)

    async def _resolve(
        self,
        run: RunName,
        committed: Committed,
        changes: Sequence[tuple[int, pb.Announcement]],
    ) -> None:
        """Reads what announced changes of a run name."""
        held = await gather_each(lambda change: self._held(run, change[1]), changes)
        now = self.clock.now()
        for (number, one), found in zip(changes, held, strict=True):
            outcome = resolve(number, one, found, now=now)
            committed.position = advance(committed.position, number, outcome)
            if not one.tag:
                committed.known.pop(one.step, None)
                if isinstance(found, pb.CheckpointRecord) and found.state == COMMITTED:
                    committed.known[one.step] = _describe(found)
            committed.is_written = False
        if any(one.tag for _, one in changes):
            committed.tags = await self.references.find_tags(run)

    async def _held(self, run: RunName, announcement: pb.Announcement) -> Held:
        """Reads the slot or the tag that an announcement names."""
        if announcement.tag:
            tag = await self.catalog.tag_slot(TagName(run, announcement.tag))
            return tag and tag[0]
        slot = await self.catalog.slot(run, announcement.step)
        if slot is None and announcement.kind == pb.Announcement.KIND_COMMIT:
            # A save in one call writes a slot that it has not reserved.
            return await self.catalog.reservation(run, announcement.upload)
        return slot and slot[0]


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


def _pack(committed: Committed, read_time: datetime) -> pb.CommittedCheckpoints:
    known = [*committed.known.values()]
    record = pb.CommittedCheckpoints(
        last=committed.position.last,
        pending=committed.position.pending,
        read_time=timestamp(read_time),
        step=[one.step for one in known],
        uid=bytes.fromhex("".join(one.uid for one in known)),
        etag=bytes.fromhex("".join(one.etag.strip('"') for one in known)),
        own_bytes=[one.own_bytes for one in known],
        commit_time=[(one.commit_time - _EPOCH) // _MICROSECOND for one in known],
        pinned=[one.pinned for one in known],
        tags=committed.tags,
    )
    for at, one in enumerate(known):
        for name, value in one.metrics.items():
            column = record.metrics[name]
            column.index.append(at)
            column.value.append(value)
    return record


def _unpack(record: pb.CommittedCheckpoints, elapsed: float) -> Committed:
    """Returns what a process has written.

    Raises:
        LookupError, ValueError: The record has more values of one kind than of another.
    """
    metrics = [dict[str, float]() for _ in record.step]
    for name, column in record.metrics.items():
        for at, value in zip(column.index, column.value, strict=True):
            metrics[at][name] = value
    columns = (
        *(record.step, _cut_ids(record.uid), _cut_ids(record.etag), record.own_bytes),
        *(record.commit_time, record.pinned, metrics),
    )
    known = {
        step: Known(
            step=step,
            uid=uid,
            etag=f'"{etag}"',
            own_bytes=own_bytes,
            commit_time=_EPOCH + committed_at * _MICROSECOND,
            pinned=pinned,
            metrics=values,
        )
        for step, uid, etag, own_bytes, committed_at, pinned, values in zip(
            *columns, strict=True
        )
    }
    return Committed(
        known=known,
        tags=dict(record.tags),
        position=Position(record.last, tuple(record.pending)),
        elapsed=elapsed,
        is_written=True,
    )


def _cut_ids(ids: bytes) -> list[str]:
    return [ids[at : at + _ID_BYTES].hex() for at in range(0, len(ids), _ID_BYTES)]
