"""Tags: movable names for checkpoints.

A tag is set in this order:

1. Append the change to the journal, so that a watch cannot miss it.
2. Write the record of the tag, on the condition that it is unchanged.
3. Read the slot of the checkpoint. If it was deleted, roll the tag back.

A purge does the opposite: it sets PURGING, then looks for tags. So either the purge
sees the tag, or this module sees the purge.

A deleted tag stays as an empty record, from which watches learn of the deletion.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from storesvc.auth import call as access
from storesvc.auth.policy import Permission
from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog, rows_in_pages
from storesvc.catalog.journal import Journal
from storesvc.catalog.numbered import list_ids
from storesvc.catalog.records import (
    record_etag,
    seal_record,
    timestamp,
    update_record,
    write_record,
)
from storesvc.catalog.slots import COMMITTED, DELETED, NOTHING
from storesvc.clock import Clock
from storesvc.errors import CorruptDataError, InvalidFieldError, TagProtectedError
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName, TagName
from storesvc.lifecycle.holds import referenced_slot
from storesvc.storage.bucket import IF_ABSENT, Bucket, Generation, PreconditionError
from storesvc_proto.v1 import bucket_pb2 as pb

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Tags:
    """Sets, deletes and lists tags, with the errors that the contract lists."""

    _bucket: Bucket
    _catalog: Catalog
    _journal: Journal
    _clock: Clock

    async def set(
        self,
        name: TagName,
        checkpoint: CheckpointName,
        *,
        protected: bool | None,
        etag: str,
        write_id: str,
    ) -> pb.TagRecord:
        """Points a tag to a checkpoint, and returns the record of the tag.

        Args:
            protected: Whether later changes need the etag of the tag; None: unchanged.
            etag: Etag that the caller read; "": none.
        """

        async def attempt() -> pb.TagRecord:
            found = await self._catalog.tag_slot(name)
            if _is_repeated(found, write_id) and found and found[0].upload:
                # Write the record of an earlier try of this request again, under
                # another generation, so that the earlier try cannot roll it back.
                place = RunPaths(name.run).tag(name.tag)
                own = await self._bucket.write(
                    place, seal_record(place, found[0]), condition=found[1]
                )
                return await self._check_target(name, found[0], own, before=None)
            before = found[0] if found else None
            _check_change(name, before, etag)
            if before is None:
                await self._check_case(name)
            named = await self._catalog.checkpoint(checkpoint)
            record = self._next_record(before, write_id)
            record.step, record.upload = named.step, named.upload
            was_protected = bool(before and before.upload and before.protected)
            record.protected = was_protected if protected is None else protected
            # 1. and 2. Journal and record.
            written = await self._write(name, record, found)
            # 3. Read the slot again, after the write: the read above may be older than
            #    a purge that found no tag.
            return await self._check_target(name, record, written, before=before)

        return await self._update(name, attempt)

    async def delete(self, name: TagName, *, etag: str, write_id: str) -> None:
        async def attempt() -> None:
            found = await self._catalog.tag_slot(name)
            is_repeated = _is_repeated(found, write_id)
            if found is None or not found[0].upload:
                if is_repeated:  # another call may have left it not durable
                    await self._bucket.settle(RunPaths(name.run).tag(name.tag))
                    return
                raise await self._catalog.tag_not_found(name)
            _check_change(name, found[0], etag)
            emptied = self._next_record(found[0], write_id)
            await self._write(name, emptied, found, was=found[0])

        await self._update(name, attempt)

    async def list(
        self, run: RunName, *, after: str, limit: int
    ) -> list[tuple[TagName, pb.TagRecord | CorruptDataError]]:
        """Returns the tags of a run by name, with the error for each damaged record."""
        await self._catalog.check_run(run)

        async def look(name: TagName) -> pb.TagRecord | None:
            found = await self._catalog.tag_slot(name)
            return found[0] if found and found[0].upload else None

        places = RunPaths(run)

        def parse(path: str) -> TagName | None:
            tag = places.parse_tag(path)
            return TagName(run, tag) if tag else None

        pages = list_ids(self._bucket, places.tags, parse, after=after)
        return await rows_in_pages(look, pages, limit=limit)

    async def _update(self, name: TagName, attempt: Callable[[], Awaitable[T]]) -> T:
        return await update_record(
            attempt, record=f"tag {name}", run=str(name.run), tag=name.tag
        )

    async def _check_case(self, name: TagName) -> None:
        """Rejects a new tag that only case distinguishes from another."""
        # Some file systems would keep both in one file. Records of deleted tags stay,
        # so they count.
        for found in await self._catalog.tag_names(name.run):
            if found != name.tag and found.lower() == name.tag.lower():
                raise InvalidFieldError(
                    f"tag {name}: the run has, or had, the tag {found}, and names that "
                    f"differ in case only are rejected; use {found}, or another name"
                )

    def _next_record(self, before: pb.TagRecord | None, write_id: str) -> pb.TagRecord:
        """Returns the next record of a tag, without the checkpoint that it names."""
        now = timestamp(self._clock.now())
        is_set = before is not None and before.upload
        return pb.TagRecord(
            create_time=before.create_time if before and is_set else now,
            update_time=now,
            write_id=write_id,
            principal=access.principal_name(),
        )

    async def _check_target(
        self,
        name: TagName,
        record: pb.TagRecord,
        generation: Generation,
        *,
        before: pb.TagRecord | None,
    ) -> pb.TagRecord:
        """Returns a record whose checkpoint is committed; else rolls it back."""
        found = await referenced_slot(self._catalog, name.run, record)
        if found is not None and found[0].state == COMMITTED:
            return record
        # If another call has changed the tag since, that call checks its own record.
        with suppress(PreconditionError):
            await self._roll_back(name, record, generation, before)
        if found is not None:
            raise slots.is_deleted(name.run, found[0])
        raise await self._catalog.missing(CheckpointName(name.run, record.step))

    async def _roll_back(
        self,
        name: TagName,
        record: pb.TagRecord,
        generation: Generation,
        before: pb.TagRecord | None,
    ) -> None:
        """Restores the record that a tag had before, or deletes the tag if the earlier
        checkpoint was purged in the meantime."""
        # Write, then read the slot, as ``set`` does: no tag protected the earlier
        # checkpoint from a purge while this one was set.
        if before is not None and before.upload:
            back = pb.TagRecord()
            back.CopyFrom(before)
            written = await self._write(name, back, (record, generation))
            found = await referenced_slot(self._catalog, name.run, back)
            if found and found[0].state in (COMMITTED, DELETED):
                return
            record, generation = back, written
        emptied = self._next_record(None, "")
        await self._write(name, emptied, (record, generation), was=record)

    async def _write(
        self,
        name: TagName,
        record: pb.TagRecord,
        before: tuple[pb.TagRecord, Generation] | None,
        *,
        was: pb.TagRecord | None = None,
    ) -> Generation:
        """Appends a change of a tag to the journal, and writes its record; `was` is the
        record of the tag that the change deletes."""
        # 1. Journal before record: after a crash in the other order, no watch would
        #    ever report the change.
        announced = was or record
        kind = pb.Announcement.KIND_UNTAG if was else pb.Announcement.KIND_TAG
        record.sequence = await self._journal.announce(
            name.run.namespace,
            pb.Announcement(
                kind=kind,
                run=name.run.run,
                step=announced.step,
                upload=announced.upload,
                tag=name.tag,
                replaces=record_etag(before[0]) if before else NOTHING,
            ),
        )
        # 2. The record, on the condition that it is unchanged since before step 1.
        place = RunPaths(name.run).tag(name.tag)
        condition = before[1] if before else IF_ABSENT
        written = await write_record(self._bucket, place, record, condition=condition)
        self._journal.notify_landed(name.run.namespace)
        return written


def _is_repeated(found: tuple[pb.TagRecord, Generation] | None, write_id: str) -> bool:
    return found is not None and slots.is_repeated(found[0].write_id, write_id)


def _check_change(name: TagName, before: pb.TagRecord | None, etag: str) -> None:
    """Rejects a change without the etag that it needs, or with another one."""
    is_set = before is not None and bool(before.upload)
    if before and is_set and before.protected:
        access.require(Permission.TAGS_MANAGE, name.run)
    slots.check_etag(
        f"tag {name}", etag, record_etag(before) if before and is_set else "none"
    )
    if before and is_set and before.protected and not etag:
        raise TagProtectedError(
            f"tag {name} is protected; give its etag to change it",
            run=str(name.run),
            tag=name.tag,
        )
