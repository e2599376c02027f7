"""The garbage of a run: found by what was read, and by what this process has seen.

``mark`` decides; this module reads for it, and tells what has been so for how long.
Where a record tells when an upload ended, that moment counts; else, and where clocks
differ, what this process has seen itself.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.lease_clock import Observations
from storesvc.catalog.rollbacks import data_missing
from storesvc.clock import Clock
from storesvc.errors import CorruptDataError
from storesvc.format import layout
from storesvc.format.layout import RunPlaces
from storesvc.format.names import RunName, TagName
from storesvc.gc import mark
from storesvc.gc.lease_expiry import Expiry
from storesvc.gc.mark import Fate, Marks, Snapshot, State
from storesvc.gc.run_state import Snapshots
from storesvc.lifecycle.references import Reference, References
from storesvc.storage.bounded_gather import each
from storesvc.storage.bucket import Bucket, Generation

ANSWERED: Final = timedelta(hours=24)
"""How long the record of an upload answers repeated requests, once all is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What was found without use."""

    marks: Marks
    holds: Mapping[str, Generation]
    """Places of holds that are over, with what was read there."""
    tags: Mapping[str, Generation]
    """Places of deleted tags, with what was read there."""

    def __len__(self) -> int:
        marks = self.marks
        kinds: tuple[Collection[object], ...] = (
            marks.garbage,
            marks.records,
            marks.free_steps,
            self.holds,
            self.tags,
        )
        return sum(map(len, kinds))


class Search:
    """Finds the garbage of the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalogue: Catalogue,
        snapshots: Snapshots,
        expiry: Expiry,
        references: References,
        observations: Observations,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._snapshots = snapshots
        self._expiry = expiry
        self._references = references
        self._observations = observations
        self._clock = clock

    async def lost(self, snapshot: Snapshot) -> dict[str, Reference]:
        """Returns the uploads that lost their step to another one although a tag or a
        hold names them, as after a slot was put back and the step was saved again.
        What they stored may be all that is left of a checkpoint."""
        known = await asyncio.to_thread(mark.fates, snapshot)
        ended = {
            upload
            for upload, fate in known.items()
            if fate.state is State.ENDED and fate.slot is None
        }
        if not ended:
            return {}
        named = await self._references.named(snapshot.places.name)
        return {upload: named[upload] for upload in sorted(ended & named.keys())}

    async def find(self, snapshot: Snapshot, over: Collection[str]) -> Garbage:
        """Returns what has no use.

        Args:
            snapshot: What was read of a run.
            over: Uploads that ended longer than a grace ago, and are not lost.

        Raises:
            CorruptDataError: What something needs cannot be told: nothing may go.
        """
        # Threads: a ping must not wait for a hundred thousand objects.
        known = await asyncio.to_thread(mark.fates, snapshot)
        blind = mark.blind(snapshot, known)
        if blind:
            raise CorruptDataError(
                f"upload {blind[0]} lives and has no record, so that it is not known "
                "what it needs"
            )
        answered = self._answered(snapshot, known)
        named: set[str] = set()
        tables = mark.tables(snapshot, known, over=over)
        found = await each(self._snapshots.file_table, tables)
        for (place, must_be), table in zip(tables.items(), found, strict=True):
            if table is not None:
                named.update(table.file)
            elif must_be:
                raise _without_table(snapshot, known, place)
        marks = await asyncio.to_thread(
            mark.mark, snapshot, known, over=over, answered=answered, named=named
        )
        run = snapshot.places.name
        self._forget(snapshot)
        return Garbage(
            marks=marks,
            holds=await self._expiry.holds(run, snapshot),
            tags=await self._tags(run),
        )

    def over(self, snapshot: Snapshot, grace: timedelta) -> set[str]:
        """Returns the uploads that ended longer than a grace ago.

        Here the clocks of others are believed: a grace is for readers that have no
        hold, and where a clock is wrong, the worst is that such a reader finds nothing
        more to read. No checkpoint and no upload depends on it.
        """
        now = self._clock.now()
        found = set()
        for upload, fate in mark.fates(snapshot).items():
            if fate.state is not State.ENDED:
                continue
            key = f"{snapshot.places.upload(upload)} ended"
            if self._was_seen(key, fate.since, grace) or (
                fate.since is not None and now - fate.since >= grace
            ):
                found.add(upload)
        return found

    def _answered(self, snapshot: Snapshot, known: Mapping[str, Fate]) -> set[str]:
        """Uploads whose record nobody asks for any more, whatever the clocks say."""
        found, listed = set(), set(snapshot.listed)
        for upload, fate in known.items():
            if snapshot.places.upload(upload) not in listed:
                continue
            record = snapshot.records.get(upload)
            begun = record and mark.moment(record.create_time)
            since = max(filter(None, (fate.since, begun)), default=None)
            key = f"{snapshot.places.upload(upload)} {fate.state.value} answers"
            if self._was_seen(key, since, ANSWERED):
                found.add(upload)
        return found

    def _was_seen(self, key: str, since: datetime | None, length: timedelta) -> bool:
        """Whether something has been so for long: as this process has seen it by a
        clock of its own, or by the clock of whoever wrote down when it began, where
        that is further back than any clock is wrong."""
        now = self._clock.now()
        return self._observations.is_over(
            key,
            str(since).encode(),
            length=length,
            renew_time=since or now,
            clock_now=now,
            elapsed=self._clock.elapsed(),
        )

    async def _tags(self, run: RunName) -> dict[str, Generation]:
        """The deleted tags of which the journal tells nothing any more: announcements
        are trimmed in order, so that where the one of the deletion is gone, none is
        left that tells of the tag."""

        async def look(tag: str) -> tuple[str, Generation] | None:
            found = await self._catalogue.tag_slot(TagName(run, tag))
            if found is None or found[0].upload:
                return None
            told = layout.announcement(run.namespace, found[0].sequence)
            if await self._bucket.read(told) is not None:
                return None
            return RunPlaces(run).tag(tag), found[1]

        found = await each(look, await self._catalogue.tag_names(run))
        return dict(one for one in found if one is not None)

    def _forget(self, snapshot: Snapshot) -> None:
        """Forgets what this process saw of uploads and holds that are gone."""
        there = {
            key
            for upload in snapshot.uploads()
            for key in self._keys(snapshot.places, upload)
        }
        self._observations.forget(
            snapshot.places.root, but=there | set(snapshot.listed)
        )

    def _keys(self, places: RunPlaces, upload: str) -> list[str]:
        record = places.upload(upload)
        answers = [f"{record} {state.value} answers" for state in State]
        return [places.lease(upload), f"{record} ended", *answers]


def _without_table(
    snapshot: Snapshot, known: Mapping[str, Fate], table: str
) -> CorruptDataError:
    """The refusal to collect while the file table of a checkpoint is missing."""
    places = snapshot.places
    slot = known[places.upload_of(table) or ""].slot
    assert slot is not None
    if places.manifest(slot.upload, slot.manifest_digest) not in snapshot.listed:
        return data_missing(places.name, slot)
    return CorruptDataError(f"{table} is missing")
