"""Runs garbage collection in the background of a server.

Of several servers of one store, only the holder of a lease in the bucket collects; it
renews the lease while it works. The lease only saves duplicate work; safety does not
depend on it. Another server may take the lease once it has seen it unchanged for two of
its own intervals.

In addition, the retention policy of a run is applied soon after a commit in this
process or a change of the policy, at the latest when the process ends, so that "the
latest 3" does not exceed three for long. Before that, the hint of the newest checkpoint
is written, from which a new process begins its lists: no save waits for it, and at most
every two seconds a process writes one of a run.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, timedelta
from typing import Final

from storesvc.auth.call import RPCS, Effect
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.slots import Observations
from storesvc.errors import StoreError
from storesvc.format import layout
from storesvc.format.names import InvalidNameError, RunName
from storesvc.gc.collector import DEFAULT_GRACE, FailureLimit, Progress
from storesvc.gc.due_runs import DueRuns
from storesvc.storage.bucket import IF_ABSENT, PreconditionError
from storesvc.storage.requests import background_task, gather_each
from storesvc.store import Store
from storesvc.telemetry.events import (
    CallEnded,
    CollectorChanged,
    Event,
    Span,
    StoreCollected,
    publish,
    subscribe,
    unsubscribe,
)
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_INTERVAL: Final = timedelta(minutes=10)
"""Interval between two collections of all runs."""

_RUNS_AT_ONCE: Final = 4
"""Runs that are collected at a time."""

_COLLECTED_WITHIN: Final = timedelta(days=1)
"""Time after the last renewal of the lease for which a store counts as collected."""

_SETTLING_SECONDS: Final = 2.0
"""Delay after a commit: further commits of a fast job are handled with it."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def collecting(store: Store, interval: timedelta) -> AsyncIterator[None]:
    """Collects the garbage of a store while the context lasts.

    Leaving the context cancels a pass in progress; the next one continues it.

    Args:
        interval: Interval between passes, and before the first one; 0: none, so that
            only policies are applied, after commits.
    """
    if not interval:
        async with background_task(_apply_retention_after_commits(store)):
            yield
        return
    lease = Lease(store, length=2 * interval)
    due_runs = DueRuns(store.journal, clock=store.clock)

    def note(event: Event) -> None:
        if isinstance(event, CallEnded) and (run := event.subject.get("run")):
            rpc = RPCS.get(event.method.rpartition("/")[2])
            if rpc is not None and rpc.effect in (Effect.CHANGE, Effect.GRAVE_CHANGE):
                with suppress(InvalidNameError):
                    due_runs.note(RunName.parse(run))

    subscribe(note)
    tasks = [
        asyncio.create_task(_collect_periodically(store, lease, interval, due_runs)),
        asyncio.create_task(_apply_retention_after_commits(store, is_collected=True)),
    ]
    try:
        yield
    finally:
        unsubscribe(note)
        # The tasks before the lease: one that still runs would take it again.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await lease.release()


class Lease:
    """The lease of the one process that collects the garbage of a store."""

    def __init__(self, store: Store, *, length: timedelta) -> None:
        self._store = store
        self._length = length
        self._owner = uuid.uuid4().hex
        self._observations = Observations()
        self._renewals = 0

    async def take(self) -> bool:
        """Takes or renews the lease; returns False if another process holds it."""
        found = await read_record(
            self._store.bucket, layout.COLLECTOR, pb.CollectorRecord
        )
        if found is not None and not self._is_free(found[0]):
            return False
        self._renewals += 1
        record = pb.CollectorRecord(
            owner=self._owner,
            renewals=self._renewals,
            renew_time=timestamp(self._store.clock.now()),
        )
        with suppress(PreconditionError):  # another process took it first
            await write_record(
                self._store.bucket,
                layout.COLLECTOR,
                record,
                condition=found[1] if found else IF_ABSENT,
            )
            return True
        return False

    async def keep(self) -> None:
        """Renews the lease periodically until another process holds it."""
        pause_seconds = min(60.0, self._length.total_seconds() / 4)
        while await self.take():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(pause_seconds)

    async def release(self) -> None:
        """Deletes the lease, so that the next process need not wait for it to
        expire."""
        if not self._renewals:
            return
        with suppress(StoreError, PreconditionError, TimeoutError):
            async with asyncio.timeout(2.0):
                found = await read_record(
                    self._store.bucket, layout.COLLECTOR, pb.CollectorRecord
                )
                if found is not None and found[0].owner == self._owner:
                    await self._store.bucket.delete(
                        layout.COLLECTOR, generation=found[1]
                    )

    def _is_free(self, record: pb.CollectorRecord) -> bool:
        """Returns whether this process holds the lease, or it has expired."""
        is_over = self._observations.is_over(
            layout.COLLECTOR,
            record.SerializeToString(deterministic=True),
            length=self._length,
            renew_time=record.renew_time.ToDatetime(UTC),
            clock_now=self._store.clock.now(),
            elapsed=self._store.clock.elapsed(),
        )
        return is_over or record.owner == self._owner


async def _collect_periodically(
    store: Store, lease: Lease, interval: timedelta, due_runs: DueRuns
) -> None:
    while True:
        await asyncio.sleep(interval.total_seconds())
        with _log_errors("a pass over all runs"):
            await store.format.check()
            if await lease.take():
                await _collect_all(store, lease, due_runs)
            else:
                publish(CollectorChanged())


async def _collect_all(store: Store, lease: Lease, due_runs: DueRuns) -> None:
    """Makes one pass over all runs that are due; an error in one run does not stop the
    others."""
    renewal, span = asyncio.create_task(lease.keep()), Span()
    try:
        runs = await store.catalog.run_names(None)
        failures = FailureLimit(at_once=_RUNS_AT_ONCE)
        due = await due_runs.choose(runs)
        failed_runs = await _collect_each(store, due, failures, due_runs)
        publish(
            StoreCollected(
                start=span.start,
                seconds=span.seconds,
                runs=tuple(map(str, runs)),
                is_complete=not (failures.is_reached or failed_runs),
            )
        )
        if failures.is_reached:
            return
        for namespace in sorted({run.namespace for run in due}):
            with _log_errors(f"the trimming of the journal of {namespace}"):
                await store.collector.trim([namespace])
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)


async def _collect_each(
    store: Store, runs: Sequence[RunName], failures: FailureLimit, due_runs: DueRuns
) -> int:
    """Collects runs, some at a time, until the storage is unavailable; returns how many
    failed."""

    async def collect(run: RunName) -> bool:
        if failures.is_reached:
            return False
        await store.format.check()
        last: Progress | None = None
        with _log_errors(f"the collection of {run}"):
            async for progress in store.collector.collect(run, grace=DEFAULT_GRACE):
                failures.record(progress)
                last = progress
            _log.debug("%s", last)
        if last is not None and last.rest:
            due_runs.rest(run, last.rest)
        return last is None or not last.is_done or last.is_failed

    failed = await gather_each(collect, runs, at_once=_RUNS_AT_ONCE)
    if failures.is_reached:
        _log.warning("a pass over all runs was abandoned")
    return sum(failed)


async def _apply_retention_after_commits(
    store: Store, *, is_collected: bool = False
) -> None:
    while True:
        await store.recent_commits.wait()
        await asyncio.sleep(_SETTLING_SECONDS)
        await _apply_retention(store, is_collected=is_collected)


async def _apply_retention(store: Store, *, is_collected: bool) -> None:
    for run in store.recent_commits.runs:
        try:
            with _log_errors(f"retention after a commit to {run}"):
                store.recent_commits.remove(run)
                await store.format.check()
                with _log_errors(f"the hint of the newest checkpoint of {run}"):
                    await store.catalog.write_hint(run)
                deleted = await store.collector.retain(run)
                with _log_errors(f"the committed checkpoints of {run}"):
                    await store.retention.committed.write(run)
                if deleted and not is_collected:
                    await _warn_uncollected(store, run, deleted)
        except asyncio.CancelledError:
            store.recent_commits.add(run)  # for ``apply_pending_retention``
            raise


_warned: Final[set[str]] = set()
"""Stores about which a warning was logged."""


async def _warn_uncollected(store: Store, run: RunName, deleted: int) -> None:
    """Logs once that what a policy deletes may stay stored for ever."""
    if store.uid in _warned:
        return
    found = await read_record(store.bucket, layout.COLLECTOR, pb.CollectorRecord)
    now = store.clock.now()
    if found and now - found[0].renew_time.ToDatetime(UTC) < _COLLECTED_WITHIN:
        return
    _warned.add(store.uid)
    _log.warning(
        "%s: its policy deleted %d checkpoints, whose bytes stay in %s until they are "
        "collected, and no server collects this store: run 'storectl gc' at intervals, "
        "a server, or connect(collect=True)",
        *(run, deleted, store.bucket.name),
    )


async def apply_pending_retention(
    store: Store, seconds: float, *, is_collected: bool = True
) -> None:
    """Applies the policies of the runs that were committed to since they were applied,
    once no more calls are served; logs errors."""
    try:
        async with asyncio.timeout(seconds):
            await _apply_retention(store, is_collected=is_collected)
    except TimeoutError:
        _log.warning(
            "retention after the last commits has not ended within %g s; the next "
            "collection continues it",
            seconds,
        )


@contextmanager
def _log_errors(what: str) -> Iterator[None]:
    """Logs an error raised inside instead of propagating it; the next pass retries."""
    try:
        yield
    except StoreError as e:
        _log.warning("%s ended early: %s", what, e)
    except Exception:  # noqa: BLE001 - a boundary: the next pass may succeed
        _log.exception("%s ended early because of a bug; please report it", what)
