"""Opens a store and builds the components that its services share in one process.

`Store.open` is the composition root: it reads or creates the record of the store, then
constructs each component once. Nothing below this module constructs another.
"""

import logging
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.rollbacks import Reserve
from storesvc.catalog.runs import Runs
from storesvc.clock import Clock, SystemClock
from storesvc.errors import (
    InvalidFieldError,
    StorageDeniedError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.gc.collector import Collector
from storesvc.gc.run_state import RunReader, UsageReader
from storesvc.inspect.verify import Comparisons, Verifier
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.holds import Holds, References
from storesvc.lifecycle.tags import Tags
from storesvc.restore.sender import Sender
from storesvc.retention.enforcement import RecentCommits, RetentionEnforcer
from storesvc.save.commit import Commits
from storesvc.save.receipts import Receipts, UploadStatuses
from storesvc.save.receiver import Receiver
from storesvc.save.reuse import Reuse
from storesvc.save.staging_tables import OwnTables
from storesvc.save.uploads import Uploads
from storesvc.storage.bucket import (
    IF_ABSENT,
    Generation,
    PreconditionError,
    check_conditions,
)
from storesvc.storage.location import LOCK_SUFFIX
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.watch.watcher import Watcher
from storesvc_proto.v1 import bucket_pb2 as pb

_CHECKED_ENTRIES: Final = 100
"""Maximum entries of a root that are read to find foreign files."""

_SHOWN: Final = 2
"""Maximum foreign names in an error message."""

_OWN: Final = (layout.STORE, layout.RESERVE, layout.PROBES.removesuffix("/"))
"""Entries that a store's creation leaves if its process is killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One open store in one process."""

    uid: str
    bucket: TensorStoreBucket
    clock: Clock
    catalog: Catalog
    journal: Journal
    runs: Runs
    uploads: Uploads
    upload_statuses: UploadStatuses
    receiver: Receiver
    receipts: Receipts
    commits: Commits
    sender: Sender
    references: References
    lifecycle: CheckpointLifecycle
    retention: RetentionEnforcer
    reserve: Reserve
    collector: Collector
    recent_commits: RecentCommits
    usage: UsageReader
    tags: Tags
    holds: Holds
    verifier: Verifier
    comparisons: Comparisons
    watcher: Watcher

    @classmethod
    async def open(
        cls,
        bucket: TensorStoreBucket,
        *,
        clock: Clock | None = None,
        is_read_only: bool = False,
    ) -> Self:
        """Returns the store of a bucket; creates one if the bucket has none.

        Args:
            bucket: The bucket.
            clock: Clock for the time stamps of records; None: the system's.
            is_read_only: True to write nothing to an existing store.

        Raises:
            FormatUnsupportedError: The store's format is not known to this code.
            InvalidFieldError: The root holds other data, or no store can be created.
            StorageUnavailableError: The storage did not answer.
        """
        clock = clock or SystemClock()
        found = await read_record(bucket, layout.STORE, pb.StoreRecord)
        if found is None:
            found = await _create(bucket, clock)
        elif not (bucket.is_first_party or is_read_only):
            # The storage may have been replaced since the store was created on it.
            # A process without permission to write cannot lose a write.
            with suppress(StorageDeniedError):
                await check_conditions(bucket)
        catalog = Catalog(bucket)
        journal = Journal(bucket, clock=clock)
        references = References(bucket, catalog, clock=clock)
        runs = Runs(bucket, catalog, clock=clock)
        uploads = Uploads(bucket, catalog, runs, clock=clock)
        reuse = Reuse(bucket, catalog, uploads)
        tables = OwnTables(clock=clock)
        receipts = Receipts(bucket, uploads, reuse, tables)
        lifecycle = CheckpointLifecycle(
            bucket, catalog, journal, references, clock=clock
        )
        retention = RetentionEnforcer(catalog, lifecycle, references, clock=clock)
        reserve = Reserve(bucket)
        return cls(
            uid=found[0].uid,
            bucket=bucket,
            clock=clock,
            catalog=catalog,
            journal=journal,
            runs=runs,
            uploads=uploads,
            upload_statuses=UploadStatuses(bucket, catalog, uploads, receipts),
            receiver=Receiver(bucket, uploads, tables),
            receipts=receipts,
            commits=Commits(
                bucket, catalog, uploads, receipts, reuse, journal, clock=clock
            ),
            sender=Sender(bucket),
            references=references,
            lifecycle=lifecycle,
            retention=retention,
            reserve=reserve,
            collector=Collector(
                bucket,
                catalog,
                runs,
                retention,
                lifecycle,
                references,
                journal,
                reserve,
                clock=clock,
            ),
            recent_commits=RecentCommits(),
            usage=UsageReader(bucket, catalog, RunReader(bucket, catalog)),
            tags=Tags(bucket, catalog, journal, clock=clock),
            holds=Holds(bucket, catalog, clock=clock),
            verifier=Verifier(bucket, catalog, clock=clock),
            comparisons=Comparisons(catalog),
            watcher=Watcher(catalog, journal, bucket=bucket, clock=clock),
        )


async def _create(
    bucket: TensorStoreBucket, clock: Clock
) -> tuple[pb.StoreRecord, Generation]:
    """Returns the record of a new store, whichever process creates it first."""
    foreign = foreign_names(await bucket.first_names(_CHECKED_ENTRIES))
    if foreign:
        found = await read_record(bucket, layout.STORE, pb.StoreRecord)
        if found is None:
            shown = ", ".join(map(repr, foreign[:_SHOWN]))
            more = " and more" if len(foreign) > _SHOWN else ""
            raise InvalidFieldError(
                f"root {bucket.name}: expected a store, or nothing yet, found {shown}"
                f"{more} and no {layout.STORE}; correct the root, or name a directory "
                "for a new store"
            )
        return found  # another process created the store, and it is in use already
    await check_conditions(bucket)
    created = pb.StoreRecord(uid=str(uuid.uuid4()), create_time=timestamp(clock.now()))
    with suppress(PreconditionError):  # another process created it first
        await write_record(bucket, layout.STORE, created, condition=IF_ABSENT)
        # Logged as a warning sign for a mistyped root.
        _log.info("new store at %s", bucket.name)
    found = await read_record(bucket, layout.STORE, pb.StoreRecord)
    if found is None:
        raise StorageUnavailableError(
            f"{layout.STORE}: expected the record of the store, got none right after "
            "its creation; retry"
        )
    return found


def foreign_names(names: Iterable[str]) -> list[str]:
    """Returns the entries of a root that prevent a store from being created there.

    Ignores what an interrupted creation of a store leaves, and what file systems and
    mounts put into a directory: ``lost+found`` and names that begin with a dot.

    Args:
        names: Names of entries at the root, or of objects at any depth below it.

    Returns:
        Top-level names, sorted.
    """
    tops = {name.partition("/")[0].removesuffix(LOCK_SUFFIX) for name in names}
    return sorted(
        top
        for top in tops
        # "" is the folder object that bucket consoles create
        if top not in ("", "lost+found", *_OWN) and not top.startswith(".")
    )
