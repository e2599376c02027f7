"""Opens a store and builds the components that its services share in one process.

`Store.open` is the composition root: it opens or creates the record of the store, then
constructs each component once. Nothing below this module constructs another.
"""

from dataclasses import dataclass
from typing import Self

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.rollbacks import Reserve
from storesvc.catalog.runs import Runs
from storesvc.catalog.store_record import StoreFormat, open_record
from storesvc.clock import Clock, SystemClock
from storesvc.gc.collector import Collector
from storesvc.gc.run_state import RunReader, UsageReader
from storesvc.inspect.verify import Comparisons, Verifier
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.holds import Holds, References
from storesvc.lifecycle.tags import Tags
from storesvc.restore.sender import Sender
from storesvc.retention.committed import CommittedCheckpoints
from storesvc.retention.enforcement import RecentCommits, RetentionEnforcer
from storesvc.save.commit import Commits
from storesvc.save.receipts import Receipts, UploadStatuses
from storesvc.save.receiver import Receiver
from storesvc.save.reuse import Reuse
from storesvc.save.staging_tables import OwnTables
from storesvc.save.uploads import Uploads
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.watch.watcher import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One open store in one process."""

    uid: str
    format: StoreFormat
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
            clock: Clock for the time stamps of records; None: the system's.
            is_read_only: True to write nothing to an existing store.

        Raises:
            FormatUnsupportedError: The store's format is not known to this code.
            InvalidFieldError: The root holds other data, or no store can be created.
            StorageUnavailableError: The storage did not answer.
        """
        clock = clock or SystemClock()
        record = await open_record(bucket, clock, is_read_only=is_read_only)
        catalog = Catalog(bucket)
        journal = Journal(bucket, clock=clock)
        references = References(bucket, catalog, clock=clock)
        runs = Runs(bucket, catalog, clock=clock)
        uploads = Uploads(bucket, catalog, runs, clock=clock)
        reuse = Reuse(bucket, catalog, uploads)
        tables = OwnTables(clock=clock)
        receipts = Receipts(bucket, uploads, reuse, tables)
        receiver = Receiver(bucket, uploads, tables)
        lifecycle = CheckpointLifecycle(bucket, catalog, journal, references, clock)
        committed = CommittedCheckpoints(bucket, catalog, references, journal, clock)
        retention = RetentionEnforcer(catalog, lifecycle, references, committed, clock)
        reserve, recent_commits = Reserve(bucket), RecentCommits()
        return cls(
            uid=record.uid,
            format=StoreFormat(bucket, record, clock=clock),
            bucket=bucket,
            clock=clock,
            catalog=catalog,
            journal=journal,
            runs=runs,
            uploads=uploads,
            upload_statuses=UploadStatuses(bucket, catalog, uploads, receipts),
            receiver=receiver,
            receipts=receipts,
            commits=Commits(
                bucket,
                catalog,
                uploads,
                receipts,
                receiver,
                reuse,
                journal,
                on_commit=recent_commits.add,
                clock=clock,
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
            recent_commits=recent_commits,
            usage=UsageReader(bucket, catalog, RunReader(bucket, catalog)),
            tags=Tags(bucket, catalog, journal, clock),
            holds=Holds(bucket, catalog, clock=clock),
            verifier=Verifier(bucket, catalog, clock=clock),
            comparisons=Comparisons(catalog),
            watcher=Watcher(catalog, journal, bucket=bucket, clock=clock),
        )
