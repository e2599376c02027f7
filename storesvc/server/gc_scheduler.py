"""Collecting, by itself: a server that looks after its store from time to time.

Of several servers of one store one does the work: the one that holds the lease in the
bucket, which it renews while it works. That only saves the others the work; nothing
depends on it. The lease is over for another server once that has seen it unchanged for
two of its intervals.

Beside the passes over all runs, the retention policy of a run is applied soon after a
checkpoint was committed here, so that "the latest 3" are not many more for long.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, timedelta
from typing import Final

from storesvc.catalog.lease_clock import Observations
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.errors import StoreError
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.gc.collector import DEFAULT_GRACE, Patience
from storesvc.storage.bucket import IF_ABSENT, PreconditionError
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb

DEFAULT_INTERVAL: Final = timedelta(minutes=10)
"""Between passes over all runs."""

_RENEWAL_SECONDS: Final = 60.0
_RELEASE_SECONDS: Final = 2.0
_SETTLING_SECONDS: Final = 2.0
"""After a commit: the next ones of a fast job are looked at with it."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def collecting(store: Store, interval: timedelta) -> AsyncIterator[None]:
    """Collects the garbage of a store while the context lasts; ends at once.

    Args:
        store: The store.
        interval: Between passes, and before the first; 0: never.
    """
    if not interval:
        yield
        return
    lease = Lease(store, length=2 * interval)
    tasks = [
        asyncio.create_task(_pass_after_pass(store, lease, interval)),
        asyncio.create_task(_look_after_commits(store)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await lease.release()


class Lease:
    """The lease of the process that collects the garbage of a store."""

    def __init__(self, store: Store, *, length: timedelta) -> None:
        self._store = store
        self._length = length
        self._owner = uuid.uuid4().hex
        self._observations = Observations()
        self._renewals = 0

    async def take(self) -> bool:
        """Takes it, or renews it; False: another process works."""
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
        with suppress(PreconditionError):  # another process was faster
            await write_record(
                self._store.bucket,
                layout.COLLECTOR,
                record,
                condition=found[1] if found else IF_ABSENT,
            )
            return True
        return False

    async def keep(self) -> None:
        """Renews it from time to time, until another process has it."""
        pause = min(_RENEWAL_SECONDS, self._length.total_seconds() / 4)
        while await self.take():  # noqa: ASYNC110 - it waits for no event of ours
            await asyncio.sleep(pause)

    async def release(self) -> None:
        """Gives it up, so that the next process need not wait for it to be over."""
        if not self._renewals:
            return
        with suppress(StoreError, PreconditionError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                found = await read_record(
                    self._store.bucket, layout.COLLECTOR, pb.CollectorRecord
                )
                if found is not None and found[0].owner == self._owner:
                    await self._store.bucket.delete(
                        layout.COLLECTOR, generation=found[1]
                    )

    def _is_free(self, record: pb.CollectorRecord) -> bool:
        """Whether it is ours, or nobody's any more."""
        is_over = self._observations.is_over(
            layout.COLLECTOR,
            record.SerializeToString(deterministic=True),
            length=self._length,
            renew_time=record.renew_time.ToDatetime(UTC),
            clock_now=self._store.clock.now(),
            elapsed=self._store.clock.elapsed(),
        )
        return is_over or record.owner == self._owner


async def _pass_after_pass(store: Store, lease: Lease, interval: timedelta) -> None:
    while True:
        await asyncio.sleep(interval.total_seconds())
        with _logged("a pass over all runs"):
            if await lease.take():
                await _pass(store, lease)


async def _pass(store: Store, lease: Lease) -> None:
    """Makes one pass over all runs; what fails in one of them keeps no other."""
    keeping = asyncio.create_task(lease.keep())
    try:
        runs, patience = await store.catalogue.run_names(None), Patience()
        for run in runs:
            with _logged(f"the collection of {run}"):
                await _collect(store, run, patience)
            if patience.is_over:
                _log.warning("a pass over all runs was given up at %s", run)
                return
        for namespace in sorted({run.namespace for run in runs}):
            with _logged(f"the trimming of the journal of {namespace}"):
                await store.collector.trim([namespace])
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _collect(store: Store, run: RunName, patience: Patience) -> None:
    async for progress in store.collector.collect(run, grace=DEFAULT_GRACE):
        patience.note(progress)
        if progress.is_done:
            _log.debug("%s", progress)


async def _look_after_commits(store: Store) -> None:
    while True:
        await store.recent.wait()
        await asyncio.sleep(_SETTLING_SECONDS)
        for run in store.recent.take():
            with _logged(f"retention after a commit to {run}"):
                await store.collector.retain(run)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Ends what fails inside, and says so; the next time it may work."""
    try:
        yield
    except StoreError as e:
        _log.warning("%s ended early: %s", what, e)
    except Exception:  # noqa: BLE001 - a boundary: the next pass may work
        _log.exception("%s ended early, by a bug; please report it", what)
