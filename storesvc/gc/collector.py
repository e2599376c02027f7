"""Collects the garbage of a run in one pass.

The order of the steps makes a pass safe to cut off anywhere: a later pass continues.

1. Abort the uploads whose lease is over. The pass ends here if a slot was rolled back
   to a version before its commit (``history``).
2. Apply the retention policy.
3. Purge the deleted checkpoints whose purge time has come. Steps 1 to 3 need no
   consistent read of the run, so they also work while the run changes all the time.
4. Read the run until two reads of its slots agree, and let ``mark`` decide what is
   garbage in that state.
5. Delete the garbage in the order of ``sweep``: objects that refer to data files, data
   files, unlisted leftovers of uploads, records of uploads.
6. Delete FREE slots, after the epoch floor of the run was raised to their epochs.
7. Delete expired holds and the records of deleted tags.

Concurrent passes of several processes are safe: garbage stays garbage, and each record
is deleted on the condition that it is unchanged since it was judged.
"""

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.rollbacks import Reserve
from storesvc.catalog.runs import Runs
from storesvc.catalog.slots import Observations
from storesvc.clock import Clock
from storesvc.errors import StorageDeniedError, StorageUnavailableError, StoreError
from storesvc.failpoints import Failpoint, reach
from storesvc.format.names import RunName
from storesvc.gc import mark
from storesvc.gc.expiry import Expirations, Expiry
from storesvc.gc.garbage import Garbage, GarbageFinder
from storesvc.gc.history import History
from storesvc.gc.lease_expiry import LeaseExpiry
from storesvc.gc.run_state import RunReader, contents_of
from storesvc.gc.sweep import Sweeper
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.references import Reference, References
from storesvc.retention.enforcement import RetentionEnforcer
from storesvc.storage.bucket import Bucket
from storesvc.telemetry.events import (
    RetentionApplied,
    RunCollected,
    RunContents,
    Span,
    publish,
)

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

    def __init__(self) -> None:
        self._failures = 0

    @property
    def is_reached(self) -> bool:
        """True if the remaining runs are left for the next pass."""
        return self._failures >= _MAX_FAILURES

    def record(self, progress: Progress) -> None:
        """Counts the result of the pass over a run."""
        if progress.is_done:
            self._failures = self._failures + 1 if progress.is_unavailable else 0

    def skipped(self, run: RunName) -> Progress:
        """Returns the progress of a run that is skipped."""
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
        seen = Observations()
        self._reader = RunReader(bucket, catalog)
        leases = LeaseExpiry(bucket, catalog, seen, clock=clock)
        self._expiry = Expiry(
            bucket,
            leases,
            retention,
            lifecycle,
            references,
            History(catalog, journal, references),
            reserve,
            clock=clock,
        )
        self._sweeper = Sweeper(bucket, catalog, runs, reserve)
        self._finder = GarbageFinder(
            bucket, catalog, self._reader, leases, references, seen, clock=clock
        )

    async def collect(
        self, run: RunName, *, grace: timedelta
    ) -> AsyncGenerator[Progress, None]:
        """Makes a pass over a run; yields its progress."""
        progress, span, contents = Progress(run=run), Span(), None
        try:
            await reach(Failpoint.COLLECT_BEFORE_LIST)
            seen = await self._reader.read_once(run)
            contents = contents_of(seen)
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
        except StoreError as e:
            progress = progress.failed(e)
        finally:  # a pass that is cancelled has deleted something, too
            publish(_event(progress, contents, span))
        await reach(Failpoint.COLLECT_BEFORE_REPLY)
        yield replace(progress, is_done=True)

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
                past_grace |= mark.ended(mark.fates(after))
            garbage = await self._finder.find(after, past_grace - lost.keys())
            progress = progress.knowing(garbage, grace, lost)
        except StoreError as e:
            progress = progress.failed(e)
        yield replace(progress, is_done=True)

    async def retain(self, run: RunName) -> None:
        """Applies only the retention policy of a run, if it has one."""
        outcomes = await self._expiry.retain(run)
        deleted = sum(not outcome.kept for outcome in outcomes)
        publish(RetentionApplied(run=str(run), deleted_checkpoints=deleted))

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
