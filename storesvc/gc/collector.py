"""Collects the garbage of a run in one pass.

The order of the steps makes a pass safe to cut off anywhere: a later pass continues.

1. Abort the uploads whose lease is over. The pass ends here if a slot was rolled back
   to a version before its commit (``expiry.History``).
2. Apply the retention policy.
3. Purge the deleted checkpoints whose purge time has come. Steps 1 to 3 need no
   consistent read of the run, so they also work while the run changes all the time.
4. Read the run until two reads of its slots agree, and let ``mark`` decide what is
   garbage in that state. `GarbageFinder` reads what it needs, and determines how long
   something has been unused: if a record has the time at which an upload ended, that
   time counts; without one, and where clocks differ, the observations of this process
   count.
5. Delete the garbage: objects that refer to data files, then data files, so that no
   reader finds a file table whose files are gone; unlisted leftovers of the uploads of
   which nothing else remains, before the objects by which a later pass would find these
   uploads again; records of uploads.
6. Delete FREE slots, each after the run's epoch floor was raised to its epoch, so that
   epochs never start again.
7. Delete expired holds and the records of deleted tags.

Concurrent passes of several processes are safe: garbage stays garbage, and each record
and slot is deleted on the condition that it is unchanged since it was judged.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.rollbacks import Reserve, data_missing
from storesvc.catalog.runs import Runs
from storesvc.catalog.slots import FREE, Observations
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    StorageDeniedError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.failpoints import Failpoint, reach
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, TagName
from storesvc.gc import mark
from storesvc.gc.expiry import Expirations, Expiry, History, LeaseExpiry
from storesvc.gc.mark import Fate, Marks, Naming, RunState, State
from storesvc.gc.run_state import FileTables, Hashes, RunReader, is_named, run_contents
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.holds import Reference, References
from storesvc.retention.enforcement import RetentionEnforcer
from storesvc.storage.bucket import Bucket, Generation, PreconditionError, list_pages
from storesvc.storage.requests import gather_each
from storesvc.telemetry.events import (
    RetentionApplied,
    RunCollected,
    RunContents,
    Span,
    publish,
)

RETRY_PERIOD: Final = timedelta(hours=24)
"""Time for which the record of an ended upload answers repeated requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    marks: Marks
    ranges: int
    """Number of objects below ``marks.ranges``."""
    partial: "Mapping[str, Partial]"
    """The prefixes of ``marks.partial`` with garbage."""
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
        partial = sum(one.garbage for one in self.partial.values())
        return sum(map(len, kinds)) + self.ranges + partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Data files of an upload of which some are garbage."""

    garbage: int
    """Number of these."""
    named: Hashes
    """Hashes of the files that are kept."""


_TABLES_AT_ONCE: Final = 4
"""File tables that are read at a time; each may have megabytes."""


@dataclass(eq=False, repr=False)
class GarbageFinder:
    """Finds the garbage of the runs of a bucket."""

    bucket: Bucket
    catalog: Catalog
    tables: FileTables
    leases: LeaseExpiry
    references: References
    observations: Observations
    clock: Clock

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
        named = await self.references.named(state.places.name)
        return {upload: named[upload] for upload in sorted(ended & named.keys())}

    async def find(self, state: RunState, past_grace: Collection[str]) -> Garbage:
        """Returns the garbage of a run.

        Args:
            state: The state read, with slots that agree.
            past_grace: Uploads that ended longer than a grace period ago, and are not
                lost.
        """
        # In threads: a hundred thousand objects would block the event loop.
        known = await asyncio.to_thread(mark.fates, state)
        unrecorded = mark.list_unrecorded(state, known)
        if unrecorded:
            raise CorruptDataError(
                f"upload {unrecorded[0]}: expected a record of the live upload, got "
                "none; the chunks that it may claim are unknown, so nothing of the run "
                "is collected"
            )
        past_retries = self._past_retries(state, known)
        tables = mark.tables(state, known, past_grace=past_grace)
        named = await self._read_tables(state, known, tables)
        marks = await asyncio.to_thread(
            mark.mark,
            state,
            known,
            past_grace=past_grace,
            past_retries=past_retries,
            named=named,
        )
        run = state.places.name
        partial = await self._look(state, known, marks.partial, named, tables)
        self._forget(state)
        return Garbage(
            marks=marks,
            ranges=sum(state.ranges[prefix].number for prefix in marks.ranges),
            partial=partial,
            holds=await self.leases.holds(run, state),
            tags=await self._tags(run),
        )

    async def _read_tables(
        self, state: RunState, known: Mapping[str, Fate], tables: Mapping[str, bool]
    ) -> Naming:
        named, listed = Naming(state), set(state.listed)
        summarize = self.tables.summarize
        found = await gather_each(summarize, tables, at_once=_TABLES_AT_ONCE)
        for (place, must_be), groups in zip(tables.items(), found, strict=True):
            # One that is remembered may have been removed since.
            if groups is not None and (
                place in listed or await self.bucket.read(place)
            ):
                named.add(place, groups)
            elif must_be:
                raise _without_table(state, known, place)
        return named

    async def _look(
        self,
        state: RunState,
        known: Mapping[str, Fate],
        prefixes: Sequence[str],
        named: Naming,
        tables: Mapping[str, bool],
    ) -> dict[str, Partial]:
        """Returns the garbage among data files of which some are named, by prefix."""
        kept = {prefix: np.empty(0, np.uint64) for prefix in prefixes}
        uploads = {state.places.parse_upload(p) or "": p for p in prefixes}
        for place in dict.fromkeys(t for u in uploads for t in named.tables[u]):
            hashes = await self.tables.read_hashes(place)
            if hashes is None and tables[place]:
                raise _without_table(state, known, place)
            for upload, group in (hashes or {}).items():
                if prefix := uploads.get(upload):
                    kept[prefix] = np.union1d(kept[prefix], group)
        found: dict[str, Partial] = {}
        for prefix, names in kept.items():
            count = 0
            async for page in list_pages(self.bucket, prefix):
                count += len(select_garbage(state.places, page, names))
            if count:
                found[prefix] = Partial(garbage=count, named=names)
        return found

    def past_grace(self, state: RunState, grace: timedelta) -> set[str]:
        """Returns the uploads that ended longer than a grace period ago.

        The clocks of other processes are trusted here: the grace period serves readers
        without a hold, and with a wrong clock the worst case is that such a reader
        finds its objects deleted. No checkpoint and no upload depends on it.
        """
        now = self.clock.now()
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
        """Returns whether something has been so for a length of time, as observed by
        this process, or by a time that is further back than any clock error."""
        now = self.clock.now()
        return self.observations.is_over(
            key,
            str(since).encode(),
            length=length,
            renew_time=since or now,
            clock_now=now,
            elapsed=self.clock.elapsed(),
        )

    async def _tags(self, run: RunName) -> dict[str, Generation]:
        """Returns the deleted tags whose records are no longer needed."""

        async def look(tag: str) -> tuple[str, Generation] | None:
            found = await self.catalog.tag_slot(TagName(run, tag))
            if found is None or found[0].upload:
                return None
            # Announcements are trimmed in order: if the one of the deletion is gone,
            # the journal has none of the tag.
            announced = layout.announcement(run.namespace, found[0].sequence)
            if await self.bucket.read(announced) is not None:
                return None
            return RunPaths(run).tag(tag), found[1]

        found = await gather_each(look, await self.catalog.tag_names(run))
        return dict(one for one in found if one is not None)

    def _forget(self, state: RunState) -> None:
        """Removes the observations of uploads and holds that no longer exist."""
        there = set(state.listed)
        for upload in state.uploads():
            record = state.places.upload(upload)
            there |= {state.places.lease(upload), f"{record} ended"}
            there |= {f"{record} {one.value} answers" for one in State}
        self.observations.forget(state.places.root, but=there)


def select_garbage(places: RunPaths, listed: Sequence[str], named: Hashes) -> list[str]:
    """Returns the paths of data files that are not named."""
    keep = is_named([path.removeprefix(places.pool) for path in listed], named)
    return [path for path, kept in zip(listed, keep, strict=True) if not kept]


def _without_table(
    state: RunState, known: Mapping[str, Fate], table: str
) -> CorruptDataError:
    """Returns the error for a missing file table of a checkpoint."""
    places = state.places
    slot = known[places.parse_upload(table) or ""].slot
    assert slot is not None
    if places.manifest(slot.upload, slot.manifest_digest) not in state.listed:
        return data_missing(places.name, slot)
    return CorruptDataError(f"{table} is missing")


_PROGRESS_DELETES: Final = 256
"""Deletions between two reports of progress."""


@dataclass(eq=False, repr=False)
class Sweeper:
    """Deletes the garbage of the runs of a bucket."""

    _bucket: Bucket
    _catalog: Catalog
    _runs: Runs
    _reserve: Reserve

    async def delete(
        self, state: RunState, garbage: Garbage
    ) -> AsyncGenerator[int, None]:
        """Deletes garbage; yields the number of objects deleted so far."""
        count, marks = 0, garbage.marks
        # 1. Tables before data files: a pass that is cut off in between leaves files
        #    that the next list shows, and no table that names missing files.
        for at in range(0, len(marks.garbage), _PROGRESS_DELETES):
            part = marks.garbage[at : at + _PROGRESS_DELETES]
            await gather_each(self._delete_object, part)
            count += len(part)
            yield count
        nothing = np.empty(0, np.uint64)
        ranges = dict.fromkeys(marks.ranges, nothing)
        ranges |= {prefix: one.named for prefix, one in garbage.partial.items()}
        for prefix, named in ranges.items():
            # What appeared below it since the list is garbage, too: see ``mark``.
            async for page in list_pages(self._bucket, prefix):
                doomed = select_garbage(state.places, page, named)
                for at in range(0, len(doomed), _PROGRESS_DELETES):
                    part = doomed[at : at + _PROGRESS_DELETES]
                    await gather_each(self._delete_object, part)
                    count += len(part)
                    yield count
        prefixes = [p for gone in marks.gone for p in state.places.list_prefixes(gone)]
        for delete, places in (
            # 2. Before the records: the next pass knows of these uploads only by them.
            (self._delete_below, prefixes),
            # 3. After all objects: without its record an upload that left objects
            #    behind would have to be observed for a grace period again.
            (self._delete_object, marks.records),
        ):
            for at in range(0, len(places), _PROGRESS_DELETES):
                part = places[at : at + _PROGRESS_DELETES]
                await gather_each(delete, part)
                count += len(part) if places is not prefixes else 0
                yield count
        # 4. After the records: an upload with a record but no slot counts as begun, so
        #    a pass that is cut off in between would keep it again.
        count += await self._delete_free_slots(state, marks.free_steps)
        # 5. In any order: no other object is found through these.
        count += await self._delete_unchanged({**garbage.holds, **garbage.tags})
        yield count

    async def _delete_object(self, place: str) -> None:
        await reach(Failpoint.COLLECT_BEFORE_DELETE)
        await self._reserve.spent_on(self._bucket.delete, place)

    async def _delete_below(self, prefix: str) -> None:
        await self._reserve.spent_on(self._bucket.delete_below, prefix)

    async def _delete_free_slots(self, state: RunState, steps: Iterable[int]) -> int:
        """Deletes FREE slots; returns their number."""
        run = state.places.name

        async def still_free(step: int) -> tuple[str, int, Generation] | None:
            found = await self._catalog.slot(run, step)
            if found is None or found[0].state != FREE:
                return None
            if found[0].upload != state.slots[step].upload:
                return None
            return state.places.checkpoint(step), found[0].epoch, found[1]

        found = [
            slot for slot in await gather_each(still_free, steps) if slot is not None
        ]
        if not found:
            return 0
        # The floor first: after a crash in the other order the epochs of the step would
        # begin at 1 again.
        floor = max(epoch for _, epoch, _ in found)
        await reach(Failpoint.COLLECT_BEFORE_FLOOR)
        await self._reserve.spent_on(self._runs.raise_epoch_floor, run, floor)
        return await self._delete_unchanged({place: g for place, _, g in found})

    async def _delete_unchanged(self, records: Mapping[str, Generation]) -> int:
        """Deletes records with the generation read; returns their number."""

        async def delete(record: tuple[str, Generation]) -> bool:
            place, generation = record
            await reach(Failpoint.COLLECT_BEFORE_EMPTYING)
            try:
                await self._reserve.spent_on(
                    self._bucket.delete, place, generation=generation
                )
            except PreconditionError:
                return False  # changed, so in use again
            return True

        return sum(await gather_each(delete, records.items()))


DEFAULT_GRACE: Final = timedelta(hours=1)
"""Minimum time since something lost its use, for readers without a hold."""

_MAX_FAILURES: Final = 3
"""Consecutive runs with an unavailable storage, after which the others are skipped."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a pass over a run, or of its preview."""

    run: RunName
    is_done: bool = False
    """True in the last message of a pass."""
    aborted_uploads: int = 0
    deleted_checkpoints: int = 0
    purged_checkpoints: int = 0
    garbage_objects: int = 0
    deleted_objects: int = 0
    postponed: str = ""
    """Reason why something was left for the next pass; "": nothing was."""
    is_unavailable: bool = False
    """True if the reason is a storage that did not answer or denied access."""
    is_failed: bool = False
    """True if an error ended the pass."""
    rest: timedelta = timedelta(0)
    """Time for which nothing will be due, unless the run changes; 0: unknown."""

    def after(self, expirations: Expirations) -> "Progress":
        """Returns the progress after steps 1 to 3."""
        return replace(
            self,
            aborted_uploads=len(expirations.aborted),
            deleted_checkpoints=len(expirations.deleted),
            purged_checkpoints=len(expirations.purged),
        )

    def failed(self, error: StoreError) -> "Progress":
        """Returns the progress of a pass that an error ended; other runs continue."""
        _log.warning("%s: its collection is postponed: %s", self.run, error)
        return replace(
            self,
            postponed=str(error),
            is_failed=True,
            is_unavailable=isinstance(
                error, StorageDeniedError | StorageUnavailableError
            ),
        )

    def knowing(
        self, garbage: Garbage, grace: timedelta, lost: Mapping[str, Reference]
    ) -> "Progress":
        """Returns the progress after step 4."""
        kept = [upload for upload in garbage.marks.waiting if upload in lost]
        count = len(garbage.marks.waiting) - len(kept)
        uploads = "1 upload" if count == 1 else f"{count} uploads"
        reasons = [f"{uploads} ended less than {grace} ago"] if count else []
        reasons += [
            f"upload {upload} lost its step to another one, and {lost[upload]} names "
            "it; restore the record of its step, or delete that"
            for upload in kept
        ]
        return replace(self, garbage_objects=len(garbage), postponed="; ".join(reasons))


class FailureLimit:
    """Limits the consecutive runs of a pass in which the storage is unavailable.

    After a few in a row the remaining runs are skipped: each would wait for the full
    timeout of the storage.
    """

    def __init__(self, *, at_once: int = 1) -> None:
        """Creates it for a number of runs that are collected at a time."""
        self._most = _MAX_FAILURES + at_once - 1
        self._failures = 0

    @property
    def is_reached(self) -> bool:
        """True if the remaining runs are left for the next pass."""
        return self._failures >= self._most

    def record(self, progress: Progress) -> None:
        """Counts the result of the pass over a run."""
        if progress.is_done:
            self._failures = self._failures + 1 if progress.is_unavailable else 0

    def skipped(self, run: RunName) -> Progress:
        return Progress(
            run=run,
            is_done=True,
            postponed=f"the storage was unavailable for {_MAX_FAILURES} runs in a row "
            "before this one; collect again later",
            is_unavailable=True,
        )


class Collector:
    """Collects the garbage of the runs of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        catalog: Catalog,
        runs: Runs,
        retention: RetentionEnforcer,
        lifecycle: CheckpointLifecycle,
        references: References,
        journal: Journal,
        reserve: Reserve,
        *,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._reserve = reserve
        self._clock = clock
        seen = Observations()
        self._reader = RunReader(bucket, catalog)
        leases = LeaseExpiry(bucket, catalog, seen, clock)
        self._expiry = Expiry(
            bucket,
            leases,
            retention,
            lifecycle,
            references,
            History(catalog, journal, references),
            reserve,
            clock,
        )
        self._sweeper = Sweeper(bucket, catalog, runs, reserve)
        tables = FileTables(self._reader)
        self._finder = GarbageFinder(
            bucket, catalog, tables, leases, references, seen, clock
        )

    async def collect(
        self, run: RunName, *, grace: timedelta
    ) -> AsyncGenerator[Progress, None]:
        """Makes a pass over a run; yields its progress."""
        progress, span, contents = Progress(run=run), Span(), None
        try:
            await reach(Failpoint.COLLECT_BEFORE_LIST)
            seen = await self._reader.read_once(run)
            contents = run_contents(seen)
            # 1. to 3. Abort expired uploads, apply retention, purge: in this order, so
            #    that the base of an aborted upload, and what retention deleted without
            #    a delay, can be purged in the same pass.
            await reach(Failpoint.COLLECT_BEFORE_ENDINGS)
            expirations = await self._expiry.apply(run, seen)
            progress = progress.after(expirations)
            yield progress
            if expirations.slots:
                # What ended is garbage only by a state that was read after it.
                seen = await self._reader.read_once(run)
            # 4. Find the garbage, in slots that agree: in a single read, a file that a
            #    commit and a purge move to another slot would be in neither.
            #    Lost uploads count as ended within the grace period, so that their file
            #    tables still keep data files.
            state = await self._reader.read_consistent(seen)
            await reach(Failpoint.COLLECT_BEFORE_MARKS)
            lost = await self._finder.lost(state)
            past_grace = self._finder.past_grace(state, grace) - lost.keys()
            garbage = await self._finder.find(state, past_grace)
            progress = progress.knowing(garbage, grace, lost)
            await reach(Failpoint.COLLECT_BEFORE_DELETES)
            yield progress
            # 5. to 7. Delete it. No lock is needed: what was garbage in step 4 is never
            #    used again.
            async for count in self._sweeper.delete(state, garbage):
                progress = replace(progress, deleted_objects=count)
                yield progress
            # Only now: deletions make the space that the reserve needs.
            await self._reserve.put_back()
            if not (len(garbage) or progress.postponed or expirations.slots):
                progress = replace(progress, rest=self._rest(state))
        except StoreError as e:
            progress = progress.failed(e)
        finally:  # a pass that is cancelled has deleted something, too
            publish(_event(progress, contents, span))
        await reach(Failpoint.COLLECT_BEFORE_REPLY)
        yield replace(progress, is_done=True)

    def _rest(self, state: RunState) -> timedelta:
        """Returns the time for which nothing will be due in a run without garbage."""
        if mark.list_unfinished(mark.fates(state)):
            return timedelta(0)
        deleted = [s for s in state.slots.values() if s.HasField("purge_time")]
        purges = [slot.purge_time.ToDatetime(UTC) for slot in deleted]
        return min(purges, default=datetime.max.replace(tzinfo=UTC)) - self._clock.now()

    async def preview(
        self, run: RunName, *, grace: timedelta
    ) -> AsyncGenerator[Progress, None]:
        """Yields the progress that ``collect`` would make; changes nothing."""
        progress = Progress(run=run)
        try:
            seen = await self._reader.read_once(run)
            expirations = await self._expiry.preview(run, seen)
            progress = progress.after(expirations)
            state = await self._reader.read_consistent(seen)
            lost = await self._finder.lost(state)
            past_grace = self._finder.past_grace(state, grace)
            after = state.with_slots(expirations.slots)
            if not grace:  # then collect would also delete what ends in this pass
                past_grace |= mark.list_ended(mark.fates(after))
            garbage = await self._finder.find(after, past_grace - lost.keys())
            progress = progress.knowing(garbage, grace, lost)
        except StoreError as e:
            progress = progress.failed(e)
        yield replace(progress, is_done=True)

    async def retain(self, run: RunName) -> int:
        """Applies only the retention policy of a run, if it has one; returns the number
        of deleted checkpoints."""
        outcomes = await self._expiry.retain(run)
        deleted = sum(not outcome.kept for outcome in outcomes)
        publish(RetentionApplied(run=str(run), deleted_checkpoints=deleted))
        return deleted

    async def trim(self, namespaces: Iterable[str]) -> None:
        """Deletes the oldest announcements of the journals of namespaces."""
        for namespace in namespaces:
            await self._reserve.spent_on(self._journal.trim, namespace)


def _event(
    progress: Progress, contents: RunContents | None, span: Span
) -> RunCollected:
    return RunCollected(
        run=str(progress.run),
        start=span.start,
        seconds=span.seconds,
        aborted_uploads=progress.aborted_uploads,
        deleted_checkpoints=progress.deleted_checkpoints,
        purged_checkpoints=progress.purged_checkpoints,
        deleted_objects=progress.deleted_objects,
        is_failed=progress.is_failed,
        contents=contents,
    )
