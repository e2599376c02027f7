"""Tags: movable names for checkpoints.

A tag is written first, and only then its checkpoint is looked at, so that a purge
either sees the tag or is seen; a tag whose checkpoint turns out to be deleted is taken
back. A deleted tag stays as a record that names nothing, for those who watch.
"""

from typing import Final

from storesvc.catalog import transitions
from storesvc.catalog.announcements import NOTHING
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import etag_of, sealed, timestamp, write_record
from storesvc.catalog.row_lookup import rows
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, DELETED
from storesvc.clock import Clock
from storesvc.errors import ConflictError, CorruptDataError, TagProtectedError
from storesvc.format.layout import RunPlaces
from storesvc.format.names import CheckpointName, RunName, TagName
from storesvc.storage.bucket import (
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
)
from storesvc_proto.v1 import bucket_pb2 as pb

_TRIES: Final = 8


class Tags:
    """Those of a bucket."""

    def __init__(
        self, bucket: Bucket, catalogue: Catalogue, journal: Journal, *, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._catalogue = catalogue
        self._journal = journal
        self._clock = clock

    async def set(
        self,
        name: TagName,
        checkpoint: CheckpointName,
        *,
        protected: bool | None,
        etag: str,
        write_id: str,
    ) -> pb.TagRecord:
        """Makes a tag name a checkpoint, and returns its record.

        Args:
            name: The tag.
            checkpoint: What it shall name.
            protected: Whether later changes need its etag; None: as it was.
            etag: What the caller read, or "".
            write_id: Of the request.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps.
            CheckpointDeletedError: The checkpoint was deleted.
            TagNotFoundError: Another tag, which shall tell the checkpoint.
            TagProtectedError: It is, and there is no etag.
            EtagMismatchError: It changed since the etag was read.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: Others change it all the time.
        """
        for _ in range(_TRIES):
            found = await self._catalogue.tag_slot(name)
            if _is_repeated(found, write_id) and found and found[0].upload:
                if (own := await self._again(name, *found)) is None:
                    continue
                return await self._checked(name, found[0], own, before=None)
            before = found[0] if found else None
            _check_change(name, before, etag)
            named = await self._catalogue.checkpoint(checkpoint)
            record = self._changed(before, write_id)
            record.step, record.upload = named.step, named.upload
            was_protected = bool(before and before.upload and before.protected)
            record.protected = was_protected if protected is None else protected
            written = await self._write(name, record, found)
            if written is not None:
                return await self._checked(name, record, written, before=before)
        raise _contended(name)

    async def delete(self, name: TagName, *, etag: str, write_id: str) -> None:
        """Deletes a tag.

        Raises:
            TagNotFoundError: There is none.
            TagProtectedError: It is, and there is no etag.
            EtagMismatchError: It changed since the etag was read.
            RequestIdReusedError: The request id made another change of it.
            ConflictError: Others change it all the time.
        """
        for _ in range(_TRIES):
            found = await self._catalogue.tag_slot(name)
            is_repeated = _is_repeated(found, write_id)
            if found is None or not found[0].upload:
                if is_repeated:  # as another call may have left it
                    await self._bucket.settle(RunPlaces(name.run).tag(name.tag))
                    return
                raise await self._catalogue.tag_not_found(name)
            _check_change(name, found[0], etag)
            emptied = self._changed(found[0], write_id)
            if await self._write(name, emptied, found, was=found[0]) is not None:
                return
        raise _contended(name)

    async def list(
        self, run: RunName, *, after: str, limit: int
    ) -> list[tuple[TagName, pb.TagRecord | CorruptDataError]]:
        """Returns the tags of a run by name; of a damaged record, that.

        Args:
            run: The run.
            after: Only those after this name.
            limit: At most so many.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        await self._catalogue.check_run(run)
        tags = await self._catalogue.tag_names(run)
        names = [TagName(run, tag) for tag in tags if tag > after]

        async def look(name: TagName) -> pb.TagRecord | None:
            found = await self._catalogue.tag_slot(name)
            return found[0] if found and found[0].upload else None

        return await rows(look, names, limit=limit)

    def _changed(self, before: pb.TagRecord | None, write_id: str) -> pb.TagRecord:
        """A record after a change, but for what it names."""
        now = timestamp(self._clock.now())
        lives = before is not None and before.upload
        return pb.TagRecord(
            create_time=before.create_time if before and lives else now,
            update_time=now,
            write_id=write_id,
        )

    async def _checked(
        self,
        name: TagName,
        record: pb.TagRecord,
        generation: Generation,
        *,
        before: pb.TagRecord | None,
    ) -> pb.TagRecord:
        """The record, if what it names is still there; else it is taken back."""
        slot = await self._slot(name.run, record)
        if slot is not None and slot.state == COMMITTED:
            return record
        await self._take_back(name, record, generation, before)
        if slot is not None:
            raise transitions.is_deleted(name.run, slot)
        raise await self._catalogue.missing(CheckpointName(name.run, record.step))

    async def _take_back(
        self,
        name: TagName,
        record: pb.TagRecord,
        generation: Generation,
        before: pb.TagRecord | None,
    ) -> None:
        """Makes a tag what it was; where that is gone meanwhile, nothing."""
        if before is not None and before.upload:
            back = pb.TagRecord()
            back.CopyFrom(before)
            written = await self._write(name, back, (record, generation))
            slot = await self._slot(name.run, back)
            if written is None or (slot and slot.state in (COMMITTED, DELETED)):
                return
            record, generation = back, written
        emptied = self._changed(None, "")
        await self._write(name, emptied, (record, generation), was=record)

    async def _again(
        self, name: TagName, record: pb.TagRecord, generation: Generation
    ) -> Generation | None:
        """Writes what an earlier try of the same request wrote, so that this one can
        no longer take it back; None: it changed meanwhile."""
        place = RunPlaces(name.run).tag(name.tag)
        try:
            return await self._bucket.write(
                place, sealed(place, record), condition=generation
            )
        except PreconditionError:
            return None

    async def _slot(
        self, run: RunName, record: pb.TagRecord
    ) -> pb.CheckpointRecord | None:
        """The slot of what a tag names; None: it was purged."""
        found = await self._catalogue.slot(run, record.step)
        if found is None or found[0].state not in CHECKPOINTS:
            return None
        return found[0] if found[0].upload == record.upload else None

    async def _write(
        self,
        name: TagName,
        record: pb.TagRecord,
        before: tuple[pb.TagRecord, Generation] | None,
        *,
        was: pb.TagRecord | None = None,
    ) -> Generation | None:
        """Announces and writes a change of a tag; None: it changed since it was read.

        Args:
            name: The tag.
            record: What it becomes.
            before: What was read.
            was: What it named, where it shall name nothing any more.
        """
        told = was or record
        kind = pb.Announcement.KIND_UNTAG if was else pb.Announcement.KIND_TAG
        record.sequence = await self._journal.announce(
            name.run.namespace,
            pb.Announcement(
                kind=kind,
                run=name.run.run,
                step=told.step,
                upload=told.upload,
                tag=name.tag,
                replaces=etag_of(before[0]) if before else NOTHING,
            ),
        )
        place = RunPlaces(name.run).tag(name.tag)
        try:
            condition = before[1] if before else IF_ABSENT
            written = await write_record(
                self._bucket, place, record, condition=condition
            )
        except PreconditionError:
            return None
        self._journal.landed(name.run.namespace)
        return written


def _is_repeated(found: tuple[pb.TagRecord, Generation] | None, write_id: str) -> bool:
    return found is not None and transitions.is_repeated(found[0].write_id, write_id)


def _check_change(name: TagName, before: pb.TagRecord | None, etag: str) -> None:
    """Refuses a change that the etag, or the lack of one, forbids."""
    lives = before is not None and bool(before.upload)
    transitions.check_etag(
        f"tag {name}", etag, etag_of(before) if before and lives else "none"
    )
    if before and lives and before.protected and not etag:
        raise TagProtectedError(
            f"tag {name} is protected; give its etag to change it",
            run=str(name.run),
            tag=name.tag,
        )


def _contended(name: TagName) -> ConflictError:
    return ConflictError(
        f"tag {name}: others changed it {_TRIES} times meanwhile; try again",
        run=str(name.run),
        tag=name.tag,
    )
