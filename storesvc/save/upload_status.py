"""Upload status: reads what became of an upload, and lists the live uploads of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog, rows
from storesvc.catalog.records import read_record
from storesvc.errors import CorruptDataError, UploadNotFoundError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName, UploadName
from storesvc.save.receipts import Receipts
from storesvc.save.uploads import Uploads
from storesvc.storage.bucket import Bucket
from storesvc.storage.hedged_calls import AT_ONCE, each
from storesvc_proto.v1 import bucket_pb2 as pb


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """An upload, its lease and its progress."""

    name: UploadName
    record: pb.UploadRecord
    slot: pb.CheckpointRecord | None
    """The slot, while this upload owns it."""
    renew_time: Timestamp
    """Time of the last renewal of the lease."""
    finished_writers: frozenset[int]


class UploadStatuses:
    """Reads the status of uploads."""

    def __init__(
        self,
        bucket: Bucket,
        catalog: Catalog,
        uploads: Uploads,
        receipts: Receipts,
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._uploads = uploads
        self._receipts = receipts

    async def get(self, name: UploadName) -> UploadStatus:
        """Returns the status of an upload, live or ended.

        Raises:
            UploadNotFoundError: The upload does not exist.
        """
        record = await self._uploads.record(name)
        found = await self._catalog.slot(name.run, record.step)
        slot = found and found[0]
        lease = await read_record(
            self._bucket, RunPaths(name.run).lease(name.upload), pb.LeaseRecord
        )
        return UploadStatus(
            name,
            record,
            slot if slot and slots.owns(name, record, slot) else None,
            renew_time=lease[0].renew_time if lease else record.create_time,
            finished_writers=await self._receipts.finished_writers(name),
        )

    async def list_live(
        self, runs: Sequence[RunName], *, after: UploadName | None, limit: int
    ) -> list[tuple[UploadName, UploadStatus | CorruptDataError]]:
        """Returns the live uploads of runs by run and id, with the error for each one
        whose records are damaged.

        Args:
            runs: The runs, ascending.
            after: Returns only uploads after this one; None: all.
            limit: Maximum number of uploads.
        """
        found: list[tuple[UploadName, UploadStatus | CorruptDataError]] = []
        left = [run for run in runs if after is None or run >= after.run]
        while left and len(found) < limit:
            batch, left = left[:AT_ONCE], left[AT_ONCE:]
            begun = chain.from_iterable(await each(self._begun, batch))
            names = [name for name in begun if after is None or name > after]
            found += await rows(self._live, names, limit=limit - len(found))
        return found

    async def _begun(self, run: RunName) -> list[UploadName]:
        """Returns the uploads of a run that are live, or have left objects behind."""
        places = RunPaths(run)
        # A record stays long after its upload has ended. A live upload also has a leaf
        # table below its name, which it wrote before its slot.
        ids = sorted(
            {
                id_
                for place in await self._bucket.list(places.uploads)
                if (id_ := places.upload_of(place)) and place != places.upload(id_)
            }
        )
        return [UploadName(run, id_) for id_ in ids]

    async def _live(self, name: UploadName) -> UploadStatus | None:
        try:
            status = await self.get(name)
        except UploadNotFoundError:  # collected in the meantime
            return None
        is_live = status.slot and status.slot.state == slots.UPLOADING
        return status if is_live else None
