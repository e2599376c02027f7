"""The records of runs: created, and changed by one conditional write each."""

import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, Literal, TypeAlias

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.records import etag_of, read_record, timestamp, write_record
from storesvc.catalog.transitions import check_etag, is_repeated
from storesvc.clock import Clock
from storesvc.errors import ConflictError, EtagMismatchError
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.storage.bucket import IF_ABSENT, Bucket, PreconditionError
from storesvc_proto.v1 import bucket_pb2 as pb

RunField: TypeAlias = Literal["labels", "retention", "purge_delay"]

RUN_FIELDS: Final[tuple[RunField, ...]] = ("labels", "retention", "purge_delay")
"""What an update may set."""

_TRIES: Final = 10
"""Of a change, while others change the same run."""


class Runs:
    """Those of a bucket."""

    def __init__(self, bucket: Bucket, catalogue: Catalogue, *, clock: Clock) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._clock = clock

    async def create(self, name: RunName) -> pb.RunRecord:
        """Returns the record of a run; creates it where there is none."""
        place = layout.run_record(name)
        found = await read_record(self._bucket, place, pb.RunRecord)
        if found is not None:
            return found[0]
        record = self._new_record()
        with suppress(PreconditionError):  # it exists, whoever made it
            await write_record(self._bucket, place, record, condition=IF_ABSENT)
        found = await read_record(self._bucket, place, pb.RunRecord)
        return found[0] if found else record

    async def update(
        self,
        name: RunName,
        given: pb.RunRecord,
        fields: Collection[RunField],
        *,
        etag: str,
        write_id: str,
    ) -> pb.RunRecord:
        """Sets fields of a run, and returns its record; creates it where there is none.

        Args:
            name: The run.
            given: Holds what to set, and nothing else than ``RUN_FIELDS``.
            fields: Which of them to set; one that ``given`` lacks is cleared.
            etag: What the run must still have; empty: whatever it has.
            write_id: Names this change: repeated, it changes nothing more.

        Raises:
            EtagMismatchError: The run has another etag, or does not exist.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: Others did not stop changing it.
        """

        def changed(record: pb.RunRecord | None) -> pb.RunRecord | None:
            if record is not None and is_repeated(record.write_id, write_id):
                return None
            _check_etag(name, record, etag)
            record = record or self._new_record()
            for field in fields:
                record.ClearField(field)
            record.MergeFrom(_only(given, fields))
            record.write_id = write_id
            return record

        return await self._change(name, changed)

    async def raise_epoch_floor(self, name: RunName, epoch: int) -> None:
        """Lets no epoch of an empty slot begin at or below this one; a higher floor
        stays as it is.

        Raises:
            ConflictError: Others did not stop changing the run.
        """

        def changed(record: pb.RunRecord | None) -> pb.RunRecord | None:
            if record is not None and record.epoch_floor >= epoch:
                return None
            record = record or self._new_record()
            record.epoch_floor = epoch
            return record

        await self._change(name, changed)

    async def _change(
        self,
        name: RunName,
        changed: Callable[[pb.RunRecord | None], pb.RunRecord | None],
    ) -> pb.RunRecord:
        """Writes what a run's record becomes, on the condition that it is still the one
        that was read; None from ``changed``: it is so already."""
        place = layout.run_record(name)
        for _ in range(_TRIES):
            found = await read_record(self._bucket, place, pb.RunRecord)
            before = pb.RunRecord()
            if found is not None:
                before.CopyFrom(found[0])
            record = changed(found[0] if found else None)
            if record is None:  # as another call may have left it
                await self._bucket.settle(place)
                return before
            condition = found[1] if found else IF_ABSENT
            with suppress(PreconditionError):  # then look again
                await write_record(self._bucket, place, record, condition=condition)
                return record
        raise ConflictError(
            f"run {name} was changed {_TRIES} times while it was to be changed; "
            "change it again",
            run=str(name),
        )

    def _new_record(self) -> pb.RunRecord:
        return pb.RunRecord(
            uid=str(uuid.uuid4()), create_time=timestamp(self._clock.now())
        )


def run_etag(record: pb.RunRecord) -> str:
    """Returns what changes with every update of a run, and with nothing else."""
    updated = pb.RunRecord()
    updated.CopyFrom(record)
    updated.ClearField("epoch_floor")  # the collector's
    return etag_of(updated)


def _check_etag(name: RunName, record: pb.RunRecord | None, etag: str) -> None:
    if record is not None:
        check_etag(f"run {name}", etag, run_etag(record))
    elif etag:
        raise EtagMismatchError(
            f"run {name}: expected no etag, as it does not exist, got {etag[:80]}; "
            "create it without one"
        )


def _only(given: pb.RunRecord, fields: Collection[RunField]) -> pb.RunRecord:
    """What is given of some fields."""
    kept = pb.RunRecord()
    kept.CopyFrom(given)
    for field in set(RUN_FIELDS).difference(fields):
        kept.ClearField(field)
    return kept
