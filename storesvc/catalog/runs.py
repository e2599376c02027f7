"""Creates and updates the records of runs, with one conditional write per change."""

import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeAlias, get_args

from storesvc.auth.call import principal_name
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.records import read_record, record_etag, timestamp, write_record
from storesvc.catalog.slots import check_etag, is_repeated
from storesvc.clock import Clock
from storesvc.errors import (
    ConflictError,
    CorruptDataError,
    EtagMismatchError,
    InvalidFieldError,
)
from storesvc.format import layout
from storesvc.format.names import RunName
from storesvc.storage.bucket import IF_ABSENT, Bucket, PreconditionError
from storesvc_proto.v1 import bucket_pb2 as pb

RunField: TypeAlias = Literal["labels", "retention", "purge_delay", "migrations"]

RUN_FIELDS: Final[tuple[RunField, ...]] = get_args(RunField)
"""Fields that an update may set."""

_TRIES: Final = 10
"""Maximum attempts of a change while other processes change the same run."""


class Runs:
    """The records of a bucket's runs."""

    def __init__(self, bucket: Bucket, catalog: Catalog, *, clock: Clock) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._clock = clock

    async def create(self, name: RunName) -> pb.RunRecord:
        """Returns the record of a run; creates it if there is none."""
        path = layout.run_record(name)
        found = await read_record(self._bucket, path, pb.RunRecord)
        if found is not None:
            return found[0]
        await self._check_case(name)
        record = self._new_record()
        with suppress(PreconditionError):  # another process has created it
            await write_record(self._bucket, path, record, condition=IF_ABSENT)
        found = await read_record(self._bucket, path, pb.RunRecord)
        return found[0] if found else record

    async def migrations(self, name: RunName) -> Sequence[bytes]:
        """Returns the migrations of a run; none if it has no record.

        Raises:
            CorruptDataError: The record is damaged; the message says how to restore.
        """
        path = layout.run_record(name)
        try:
            found = await read_record(self._bucket, path, pb.RunRecord)
        except CorruptDataError as e:
            raise CorruptDataError(
                f"{e}; it has the migrations of {name}, restore without them: "
                "run.open(step).restore()",
                migrations_of=str(name),
            ) from e
        return () if found is None else found[0].migrations

    async def update(
        self,
        name: RunName,
        given: pb.RunRecord,
        fields: Collection[RunField],
        *,
        etag: str,
        write_id: str,
    ) -> pb.RunRecord:
        """Sets fields of a run, and returns its record; creates it if there is none.

        Args:
            given: The new values, in no other fields than ``RUN_FIELDS``.
            fields: The fields to set; a field that ``given`` lacks is cleared.
            etag: The etag that the run must have; "" matches any.
            write_id: Id of this change: a repeated one changes nothing more.

        Raises:
            EtagMismatchError: The run has another etag, or does not exist.
            RequestIdReusedError: The request id was used for another change of it.
            ConflictError: Other processes changed the run during each attempt.
        """
        kept = pb.RunRecord()
        kept.CopyFrom(given)
        for field in set(RUN_FIELDS).difference(fields):
            kept.ClearField(field)

        def changed(record: pb.RunRecord | None) -> pb.RunRecord | None:
            if record is not None and is_repeated(record.write_id, write_id):
                return None
            if record is not None:
                check_etag(f"run {name}", etag, run_etag(record))
            elif etag:
                raise EtagMismatchError(
                    f"run {name}: expected no etag, as it does not exist, got "
                    f"{etag[:80]}; create it without one"
                )
            record = record or self._new_record()
            for field in fields:
                record.ClearField(field)
            record.MergeFrom(kept)
            record.write_id = write_id
            record.change_principal = principal_name()
            return record

        return await self._change(name, changed)

    async def raise_epoch_floor(self, name: RunName, epoch: int) -> None:
        """Raises the floor above which the epochs of empty slots begin; keeps a higher
        one.

        Raises:
            ConflictError: Other processes changed the run during each attempt.
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
        path = layout.run_record(name)
        for _ in range(_TRIES):
            found = await read_record(self._bucket, path, pb.RunRecord)
            if found is None:
                await self._check_case(name)
            record = changed(found[0] if found else None)
            if record is None:
                assert found is not None, f"{name}: every change creates the record"
                # The call that wrote it may have been cut off before it was durable.
                await self._bucket.settle(path)
                return found[0]
            with suppress(PreconditionError):
                condition = found[1] if found else IF_ABSENT
                await write_record(self._bucket, path, record, condition=condition)
                return record
        raise ConflictError(
            f"run {name} was changed by others during each of {_TRIES} attempts to "
            "change it; change it again",
            run=str(name),
        )

    async def _check_case(self, name: RunName) -> None:
        """Rejects a new run if only case distinguishes it, or its namespace, from one
        that exists: some file systems would keep both in one directory."""
        names = await self._catalog.run_names(name.namespace)
        if not names:  # the namespace is new
            names = await self._catalog.run_names(None)
        for other in names:
            pairs = (other.namespace, name.namespace), (str(other), str(name))
            for found, given in pairs:
                if found != given and found.lower() == given.lower():
                    raise InvalidFieldError(
                        f"run {name}: {found} exists, and names that differ in case "
                        f"only are rejected; use {found}, or another name"
                    )

    def _new_record(self) -> pb.RunRecord:
        return pb.RunRecord(
            uid=str(uuid.uuid4()), create_time=timestamp(self._clock.now())
        )


def run_etag(record: pb.RunRecord) -> str:
    """Returns the etag of a run, which differs after every update and only then."""
    updated = pb.RunRecord()
    updated.CopyFrom(record)
    updated.ClearField("epoch_floor")  # the collector changes it, not an update
    return record_etag(updated)
