"""A store, opened: what its services share in one process."""

import logging
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.disk_reserve import Reserve
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import read_record, timestamp, write_record
from storesvc.catalog.runs import Runs
from storesvc.clock import Clock, SystemClock
from storesvc.errors import (
    InvalidFieldError,
    StorageDeniedError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.gc.collector import Collector
from storesvc.gc.recent_commits import Recent
from storesvc.gc.run_state import Snapshots
from storesvc.gc.usage import Usages
from storesvc.inspect.diff import Comparisons
from storesvc.inspect.verify import Verifier
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.holds import Holds
from storesvc.lifecycle.references import References
from storesvc.lifecycle.tags import Tags
from storesvc.restore.sender import Sender
from storesvc.retention.enforcement import Retaining
from storesvc.save.commit import Commits
from storesvc.save.receipts import Receipts
from storesvc.save.receiver import Receiver
from storesvc.save.reuse import Reuse
from storesvc.save.upload_status import UploadStatuses
from storesvc.save.uploads import Uploads
from storesvc.storage.bucket import IF_ABSENT, Generation, PreconditionError
from storesvc.storage.condition_probe import check_conditions
from storesvc.storage.location import LOCK_SUFFIX
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc.watch.watcher import Watcher
from storesvc_proto.v1 import bucket_pb2 as pb

_LOOKED_AT: Final = 100
"""Entries of a root, at most."""

_SHOWN: Final = 2
"""Of those, in a message."""

_OWN: Final = (layout.STORE, layout.RESERVE, layout.PROBES.removesuffix("/"))
"""What the creation of a store leaves that is killed before it is done."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One store, in one process."""

    uid: str
    bucket: KvBucket
    clock: Clock
    catalogue: Catalogue
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
    retaining: Retaining
    reserve: Reserve
    collector: Collector
    recent: Recent
    usages: Usages
    tags: Tags
    holds: Holds
    verifier: Verifier
    comparisons: Comparisons
    watcher: Watcher

    @classmethod
    async def open(
        cls,
        bucket: KvBucket,
        *,
        clock: Clock | None = None,
        is_read_only: bool = False,
    ) -> Self:
        """Returns the store of a bucket; makes one where there is none.

        Args:
            bucket: The bucket.
            clock: That of its records; None: the system's.
            is_read_only: Whether nothing is to be written to a store that is there.

        Raises:
            FormatUnsupportedError: It is in a format that this code does not know.
            InvalidFieldError: None can be made there, or something else is there.
            StorageUnavailableError: The storage does not answer.
        """
        clock = clock or SystemClock()
        found = await read_record(bucket, layout.STORE, pb.StoreRecord)
        if found is None:
            found = await _made(bucket, clock)
        elif not (bucket.is_first_party or is_read_only):
            # the one that serves it now may be another than the one it was made on
            with suppress(StorageDeniedError):  # who may not write loses nothing
                await check_conditions(bucket)
        catalogue = Catalogue(bucket)
        journal = Journal(bucket, clock=clock)
        references = References(bucket, catalogue, clock=clock)
        runs = Runs(bucket, catalogue, clock=clock)
        uploads = Uploads(bucket, catalogue, runs, clock=clock)
        reuse = Reuse(bucket, catalogue, uploads)
        receipts = Receipts(bucket, uploads, reuse)
        lifecycle = CheckpointLifecycle(
            bucket, catalogue, journal, references, clock=clock
        )
        retaining = Retaining(catalogue, lifecycle, references, clock=clock)
        reserve = Reserve(bucket)
        return cls(
            uid=found[0].uid,
            bucket=bucket,
            clock=clock,
            catalogue=catalogue,
            journal=journal,
            runs=runs,
            uploads=uploads,
            upload_statuses=UploadStatuses(bucket, catalogue, uploads, receipts),
            receiver=Receiver(bucket, uploads),
            receipts=receipts,
            commits=Commits(
                bucket, catalogue, uploads, receipts, reuse, journal, clock=clock
            ),
            sender=Sender(bucket),
            references=references,
            lifecycle=lifecycle,
            retaining=retaining,
            reserve=reserve,
            collector=Collector(
                bucket,
                catalogue,
                runs,
                retaining,
                lifecycle,
                references,
                journal,
                reserve,
                clock=clock,
            ),
            recent=Recent(),
            usages=Usages(catalogue, Snapshots(bucket, catalogue)),
            tags=Tags(bucket, catalogue, journal, clock=clock),
            holds=Holds(bucket, catalogue, clock=clock),
            verifier=Verifier(bucket, catalogue, clock=clock),
            comparisons=Comparisons(catalogue),
            watcher=Watcher(catalogue, journal, store_uid=found[0].uid, clock=clock),
        )


async def _made(bucket: KvBucket, clock: Clock) -> tuple[pb.StoreRecord, Generation]:
    """Returns the record of a store that is made now, by us or by another."""
    foreign = foreign_names(await bucket.first_names(_LOOKED_AT))
    if foreign:
        found = await read_record(bucket, layout.STORE, pb.StoreRecord)
        if found is None:
            raise _not_a_store(bucket, foreign)
        return found  # another was faster, and its store is in use
    await check_conditions(bucket)
    created = pb.StoreRecord(uid=str(uuid.uuid4()), create_time=timestamp(clock.now()))
    with suppress(PreconditionError):  # another was faster
        await write_record(bucket, layout.STORE, created, condition=IF_ABSENT)
        # so that a root with a typing error is seen
        _log.info("new store at %s", bucket.name)
    found = await read_record(bucket, layout.STORE, pb.StoreRecord)
    if found is None:
        raise StorageUnavailableError(f"{layout.STORE} vanished; retry")
    return found


def foreign_names(names: Iterable[str]) -> list[str]:
    """Returns what lies at a root and keeps a store from being made there, by name.

    Not counted is what a killed creation of a store leaves, and what file systems and
    their mounts put into a directory: ``lost+found``, and names that begin with a dot.

    Args:
        names: Of entries at the root; or of objects, which may lie deeper.
    """
    tops = {name.partition("/")[0].removesuffix(LOCK_SUFFIX) for name in names}
    return sorted(
        top
        for top in tops
        # "" is a folder of a bucket as consoles make one
        if top not in ("", "lost+found", *_OWN) and not top.startswith(".")
    )


def _not_a_store(bucket: KvBucket, foreign: list[str]) -> InvalidFieldError:
    shown = ", ".join(map(repr, foreign[:_SHOWN]))
    more = " and more" if len(foreign) > _SHOWN else ""
    return InvalidFieldError(
        f"root {bucket.name}: expected a store, or nothing yet, found {shown}{more} "
        f"and no {layout.STORE}; correct the root, or name a directory for a new store"
    )
