"""Finds the garbage of a run, from the state read and from earlier observations.

``mark`` decides; this module reads what it needs, and determines how long something has
been unused. If a record has the time at which an upload ended, that time counts;
without one, and where clocks differ, the observations of this process count.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.rollbacks import data_missing
from storesvc.catalog.slots import Observations
from storesvc.clock import Clock
from storesvc.errors import CorruptDataError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, TagName
from storesvc.gc import mark
from storesvc.gc.lease_expiry import LeaseExpiry
from storesvc.gc.mark import Fate, Marks, RunState, State
from storesvc.gc.run_state import RunReader
from storesvc.lifecycle.references import Reference, References
from storesvc.storage.bucket import Bucket, Generation
from storesvc.storage.hedged_calls import each

RETRY_PERIOD: Final = timedelta(hours=24)
"""Time for which the record of an ended upload answers repeated requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """The garbage that was found in a run."""

    marks: Marks
    holds: Mapping[str, Generation]
    """Paths of expired holds, with the generations read."""
    tags: Mapping[str, Generation]
    """Paths of deleted tags, with the generations read."""

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


class GarbageFinder:
    """Finds the garbage of the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalog: Catalog,
        reader: RunReader,
        leases: LeaseExpiry,
        references: References,
        observations: Observations,
        *,
        clock: Clock,
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._reader = reader
        self._leases = leases
        self._references = references
        self._observations = observations
        self._clock = clock

    async def lost(self, state: RunState) -> dict[str, Reference]:
        """Returns the uploads that lost their step although a tag or a hold names them.

        This happens if a slot was rolled back and the step was saved again. Their
        objects may be all that is left of a checkpoint.
        """
        known = await asyncio.to_thread(mark.fates, state)
        ended = {
            upload
            for upload, fate in known.items()
            if fate.state is State.ENDED and fate.slot is None
        }
        if not ended:
            return {}
        named = await self._references.named(state.places.name)
        return {upload: named[upload] for upload in sorted(ended & named.keys())}

    async def find(self, state: RunState, past_grace: Collection[str]) -> Garbage:
        """Returns the garbage of a run.

        Args:
            state: The state read, with slots that agree.
            past_grace: Uploads that ended longer than a grace period ago, and are not
                lost.

        Raises:
            CorruptDataError: The objects that are needed are unknown, so none may be
                deleted.
        """
        # In threads: a hundred thousand objects would block the event loop.
        known = await asyncio.to_thread(mark.fates, state)
        unrecorded = mark.unrecorded(state, known)
        if unrecorded:
            raise CorruptDataError(
                f"upload {unrecorded[0]}: expected a record of the live upload, got "
                "none; the chunks that it may claim are unknown, so nothing of the run "
                "is collected"
            )
        past_retries = self._past_retries(state, known)
        named: set[str] = set()
        tables = mark.tables(state, known, past_grace=past_grace)
        found = await each(self._reader.file_table, tables)
        for (place, must_be), table in zip(tables.items(), found, strict=True):
            if table is not None:
                named.update(table.file)
            elif must_be:
                raise _without_table(state, known, place)
        marks = await asyncio.to_thread(
            mark.mark,
            state,
            known,
            past_grace=past_grace,
            past_retries=past_retries,
            named=named,
        )
        run = state.places.name
        self._forget(state)
        return Garbage(
            marks=marks,
            holds=await self._leases.holds(run, state),
            tags=await self._tags(run),
        )

    def past_grace(self, state: RunState, grace: timedelta) -> set[str]:
        """Returns the uploads that ended longer than a grace period ago.

        The clocks of other processes are trusted here: the grace period serves readers
        without a hold, and with a wrong clock the worst case is that such a reader
        finds its objects deleted. No checkpoint and no upload depends on it.
        """
        now = self._clock.now()
        found = set()
        for upload, fate in mark.fates(state).items():
            if fate.state is not State.ENDED:
                continue
            key = f"{state.places.upload(upload)} ended"
            if self._was_seen(key, fate.since, grace) or (
                fate.since is not None and now - fate.since >= grace
            ):
                found.add(upload)
        return found

    def _past_retries(self, state: RunState, known: Mapping[str, Fate]) -> set[str]:
        """Returns the uploads whose record is no longer needed, whatever the clocks."""
        found, listed = set(), set(state.listed)
        for upload, fate in known.items():
            if state.places.upload(upload) not in listed:
                continue
            record = state.records.get(upload)
            begun = record and mark.moment(record.create_time)
            since = max(filter(None, (fate.since, begun)), default=None)
            key = f"{state.places.upload(upload)} {fate.state.value} answers"
            if self._was_seen(key, since, RETRY_PERIOD):
                found.add(upload)
        return found

    def _was_seen(self, key: str, since: datetime | None, length: timedelta) -> bool:
        """Returns whether something has been so for a length of time.

        Either this process has observed it that long by its own monotonic clock, or the
        recorded time is further back than any clock error.
        """
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
        """Returns the deleted tags whose records are no longer needed.

        Announcements are trimmed in order: if the one of the deletion is gone, the
        journal has none of the tag.
        """

        async def look(tag: str) -> tuple[str, Generation] | None:
            found = await self._catalog.tag_slot(TagName(run, tag))
            if found is None or found[0].upload:
                return None
            announced = layout.announcement(run.namespace, found[0].sequence)
            if await self._bucket.read(announced) is not None:
                return None
            return RunPaths(run).tag(tag), found[1]

        found = await each(look, await self._catalog.tag_names(run))
        return dict(one for one in found if one is not None)

    def _forget(self, state: RunState) -> None:
        """Removes the observations of uploads and holds that no longer exist."""
        there = set(state.listed)
        for upload in state.uploads():
            record = state.places.upload(upload)
            there |= {state.places.lease(upload), f"{record} ended"}
            there |= {f"{record} {one.value} answers" for one in State}
        self._observations.forget(state.places.root, but=there)


def _without_table(
    state: RunState, known: Mapping[str, Fate], table: str
) -> CorruptDataError:
    """Returns the error for a missing file table of a checkpoint."""
    places = state.places
    slot = known[places.upload_of(table) or ""].slot
    assert slot is not None
    if places.manifest(slot.upload, slot.manifest_digest) not in state.listed:
        return data_missing(places.name, slot)
    return CorruptDataError(f"{table} is missing")
