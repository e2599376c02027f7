"""The catalogue: which runs and checkpoints there are, and their manifests.

Reads only. To a reader, a slot is absent that is neither COMMITTED nor, where it asks
for those, DELETED or PURGING.
"""

import asyncio
import difflib
import logging
from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from storesvc.byte_cache import TREES_BYTES, ByteCache
from storesvc.catalog.records import on_its_way, or_damage, read_listed, sound
from storesvc.catalog.rollbacks import purged, put_back
from storesvc.catalog.row_lookup import rows
from storesvc.catalog.slot_reader import SlotReads
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING
from storesvc.catalog.transitions import is_deleted, replaced
from storesvc.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    RunNotFoundError,
    TagNotFoundError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import (
    CorruptManifestError,
    Manifest,
    unpack_manifest,
)
from storesvc.format.names import LATEST, CheckpointName, RunName, TagName
from storesvc.storage.bounded_gather import AT_ONCE
from storesvc.storage.bucket import Bucket, Generation
from storesvc_proto.v1 import bucket_pb2 as pb

_NEAREST: Final = 3
_LISTED: Final = frozenset({COMMITTED})


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run, as lists show it."""

    name: RunName
    record: pb.RunRecord
    latest: pb.CheckpointRecord | None
    """The newest committed checkpoint."""


class Catalogue:
    """The runs and checkpoints of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._reads = SlotReads(bucket)
        self._manifests: ByteCache[str, Manifest] = ByteCache(
            TREES_BYTES, size_of=attrgetter("memory_bytes")
        )

    async def run(self, name: RunName) -> RunSummary:
        """Returns a run.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        found = await self._summary(name)
        if found is None or not (_is_listed(found) or await self._newest(name)):
            raise await self._run_not_found(name)
        return found

    async def runs(
        self, namespace: str | None, *, after: RunName | None, limit: int
    ) -> list[tuple[RunName, RunSummary | CorruptDataError]]:
        """Returns the runs that have a committed checkpoint or were set up, in the
        order of their names; of one whose record, or whose newest checkpoint's, is
        damaged, that.

        Args:
            namespace: Of this namespace; None: of all.
            after: Only those after it.
            limit: At most so many.
        """
        names = await self.run_names(namespace)
        names = [name for name in names if after is None or name > after]

        async def look(name: RunName) -> RunSummary | None:
            summary = await self._summary(name)
            return summary if summary and _is_listed(summary) else None

        return await rows(look, names, limit=limit)

    async def run_names(self, namespace: str | None) -> list[RunName]:
        """Returns the runs of a namespace; None: of all. Those included that no list
        shows, because they have no checkpoint."""
        prefix = layout.RUNS if namespace is None else f"{layout.RUNS}{namespace}/"
        found = await self._bucket.list(prefix)
        return sorted(name for place in found if (name := layout.run_of_record(place)))

    async def checkpoints(
        self,
        run: RunName,
        *,
        before: int | None,
        limit: int,
        show_deleted: bool = False,
    ) -> Sequence[pb.CheckpointRecord]:
        """Returns checkpoints, newest first; arguments as of ``checkpoint_rows``.

        Raises:
            RunNotFoundError: With the most similar names.
            CorruptDataError: The record of one is damaged.
        """
        listed = await self.checkpoint_rows(
            run, before=before, limit=limit, show_deleted=show_deleted
        )
        return [sound(row) for _, row in listed]

    async def checkpoint_rows(
        self,
        run: RunName,
        *,
        before: int | None,
        limit: int,
        show_deleted: bool = False,
    ) -> Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]:
        """Returns checkpoints by step, newest first; of a damaged record, that.

        Args:
            run: Of this run.
            before: Only those of lower steps.
            limit: At most so many.
            show_deleted: Whether deleted ones too, until they are purged.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        states = CHECKPOINTS if show_deleted else _LISTED
        found = await self._reads.newest(run, states, before=before, limit=limit)
        if not found:
            await self.check_run(run)
        return found

    async def checkpoint(self, name: CheckpointName) -> pb.CheckpointRecord:
        """Returns a committed checkpoint by its step, as the newest one, or by a tag.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps.
            CheckpointDeletedError: It was deleted.
            TagNotFoundError: With the most similar tags.
        """
        record = await self._resolved(name) or await self._resolved_again(name)
        if record is None:
            raise await self.missing(name)
        if record.state != COMMITTED:
            raise is_deleted(name.run, record)
        return record

    async def checkpoint_of_uid(
        self, name: CheckpointName, uid: str
    ) -> pb.CheckpointRecord:
        """Returns the very checkpoint of a uid, also where it was deleted and is not
        yet purged.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: It was purged, or replaced by another one.
            TagNotFoundError: With the most similar tags.
        """
        record = await self._resolved(name) or await self._resolved_again(name)
        if record is None:
            raise await self.missing(name)
        if record.upload != uid:
            raise replaced(name.run, record, uid)
        return record

    async def missing(
        self, name: CheckpointName
    ) -> CheckpointNotFoundError | RunNotFoundError:
        """Returns the refusal of a checkpoint that is not there."""
        if not await self._exists(name.run):
            return await self._run_not_found(name.run)
        return await self._checkpoint_not_found(name)

    async def check_run(self, name: RunName) -> None:
        """Refuses a run that has no checkpoint, deleted ones included, and was not set
        up either.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        if not await self._exists(name):
            raise await self._run_not_found(name)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns what a step's slot holds, committed or not.

        Raises:
            CorruptDataError: It holds the slot of another step, or is damaged.
        """
        return await self._reads.slot(run, step)

    async def tag_slot(self, name: TagName) -> tuple[pb.TagRecord, Generation] | None:
        """Returns what the place of a tag holds, also of one that was deleted."""
        place = RunPlaces(name.run).tag(name.tag)
        return await read_listed(self._bucket, place, pb.TagRecord, of=f"tag {name}")

    async def tag_names(self, run: RunName) -> list[str]:
        """Returns the names of tags in order, those of deleted ones among them."""
        places = RunPlaces(run)
        names = map(places.tag_of, await self._bucket.list(places.tags))
        return sorted(name for name in names if name is not None)

    async def tag_not_found(self, name: TagName) -> TagNotFoundError:
        """Returns the refusal of a tag that is not there, with the most similar."""
        similar = difflib.get_close_matches(
            name.tag, await self.tag_names(name.run), n=AT_ONCE, cutoff=0.5
        )
        names = [TagName(name.run, tag) for tag in similar]
        found = await rows(self.tag_slot, names, limit=len(names))
        nearest = [other.tag for other, tag in found if _names_something(tag)]
        return TagNotFoundError(
            f"{name.run} has no tag {name.tag} (nearest: "
            f"{', '.join(nearest[:_NEAREST]) or 'none'}); list its tags to see all",
            run=str(name.run),
            tag=name.tag,
            nearest=",".join(nearest[:_NEAREST]),
        )

    async def manifest(self, run: RunName, record: pb.CheckpointRecord) -> Manifest:
        """Returns the manifest of a checkpoint; kept, for it never changes.

        Raises:
            CorruptDataError: It is missing or damaged.
        """
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        return await self._manifests.get(place, lambda: self.read_manifest(run, record))

    async def read_manifest(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> Manifest:
        """Returns the manifest as it lies now, not one that was kept; where that is
        damaged, of a second read: the answer may have been corrupted on its way.

        Raises:
            CorruptDataError: It is missing or damaged.
        """
        try:
            return await self._unpacked(run, record)
        except CorruptManifestError:
            pass
        try:
            manifest = await self._unpacked(run, record)
        except CorruptManifestError as e:
            raise CorruptDataError(f"{run}@{record.step}: {e}") from e
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        _log.warning("%s", on_its_way(place))
        return manifest

    async def _unpacked(self, run: RunName, record: pb.CheckpointRecord) -> Manifest:
        data = await self.manifest_bytes(run, record)
        return await asyncio.to_thread(
            unpack_manifest,
            data,
            size_bytes=record.manifest_bytes,
            expected=record.manifest_digest,
        )

    async def manifest_bytes(self, run: RunName, record: pb.CheckpointRecord) -> bytes:
        """Returns a manifest as it lies, unchecked.

        Raises:
            CorruptDataError: It is missing.
        """
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        stored = await self._bucket.read(place)
        if stored is None:
            raise await self._without_manifest(run, record)
        return stored.data

    async def _without_manifest(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> CorruptDataError:
        """The refusal of a checkpoint whose manifest is missing."""
        table = RunPlaces(run).file_table(record.upload, record.files_digest)
        if not record.files_digest or await self._bucket.read(table) is not None:
            return CorruptDataError(
                f"{run}@{record.step}: its manifest is missing; use another checkpoint"
            )
        return purged(run, record)

    async def manifest_parts(
        self, run: RunName, record: pb.CheckpointRecord, *, size_bytes: int
    ) -> AsyncGenerator[bytes]:
        """Yields a manifest as it lies, unchecked, each part once it is asked for.

        Args:
            run: The run.
            record: Of the checkpoint.
            size_bytes: Of a part.

        Raises:
            CorruptDataError: It is missing, or cut off.
        """
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        size = record.manifest_bytes
        for at in range(0, size, size_bytes):
            try:
                part = await self._bucket.read_range(
                    place, at, min(size, at + size_bytes)
                )
            except CorruptDataError as e:
                raise CorruptDataError(
                    f"{run}@{record.step}: its manifest is missing or cut off; use "
                    "another checkpoint"
                ) from e
            yield part
            del part  # its memory is the caller's

    async def _resolved(self, name: CheckpointName) -> pb.CheckpointRecord | None:
        """The checkpoint that a name stands for, deleted ones included."""
        if name.which == LATEST:
            return await self._newest(name.run, _LISTED)
        if isinstance(name.which, int):
            return await self._held_slot(name.run, name.which, CHECKPOINTS)
        return await self._tagged(TagName(name.run, name.which))

    async def _resolved_again(self, name: CheckpointName) -> pb.CheckpointRecord | None:
        """The checkpoint of a step that one read has found absent, where a list has
        its record."""
        if not isinstance(name.which, int):
            return None  # the latest one is looked for by a list, and tags by theirs
        place = RunPlaces(name.run).checkpoint(name.which)
        if place not in await self._bucket.list(place):
            return None
        return await self._resolved(name)

    async def _tagged(self, name: TagName) -> pb.CheckpointRecord | None:
        """The checkpoint that a tag names; None: it is gone."""
        tag = await self._tag(name)
        found = await self._reads.checked(name.run, tag.step)
        if found is None or found[0].upload != tag.upload:
            return None
        if found[0].state == UPLOADING:  # a tag is set only after the commit
            why = f"tag {name.tag} names it"
            raise put_back(name.run, tag.step, tag.upload, why)
        return found[0] if found[0].state in CHECKPOINTS else None

    async def _tag(self, name: TagName) -> pb.TagRecord:
        found = await self.tag_slot(name)
        if found is None or not found[0].upload:
            await self.check_run(name.run)
            raise await self.tag_not_found(name)
        return found[0]

    async def _newest(
        self, run: RunName, states: Container[int] = CHECKPOINTS
    ) -> pb.CheckpointRecord | None:
        found = await self._reads.newest(run, states, before=None, limit=1)
        return sound(found[0][1]) if found else None

    async def _held_slot(
        self, run: RunName, step: int, states: Container[int]
    ) -> pb.CheckpointRecord | None:
        found = await self._reads.checked(run, step)
        return found[0] if found and found[0].state in states else None

    async def _exists(self, name: RunName) -> bool:
        try:
            summary = await self._summary(name)
            return summary is not None and (
                _is_listed(summary) or await self._newest(name) is not None
            )
        except CorruptDataError:  # there is something
            return True

    async def _summary(self, name: RunName) -> RunSummary | None:
        """What is known of a run; its record comes a moment before its first slot."""
        place = layout.run_record(name)
        found = await read_listed(self._bucket, place, pb.RunRecord)
        if found is None:
            return None
        return RunSummary(name, found[0], await self._newest(name, _LISTED))

    async def _run_not_found(self, name: RunName) -> RunNotFoundError:
        # of its own namespace: others are not even named to it
        names = [str(n) for n in await self.run_names(name.namespace) if n != name]
        nearest = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
        known = f"nearest: {', '.join(nearest)}" if nearest else "no run is similar"
        return RunNotFoundError(
            f"run {name} has no checkpoint ({known}); list the runs to see all",
            run=str(name),
            nearest=",".join(nearest),
        )

    async def _checkpoint_not_found(
        self, name: CheckpointName
    ) -> CheckpointNotFoundError:
        if name.which == LATEST:
            return CheckpointNotFoundError(
                f"{name.run} has no committed checkpoint yet; save one",
                run=str(name.run),
                nearest="",
            )
        if isinstance(name.which, str):
            return CheckpointNotFoundError(
                f"{name}: the checkpoint that the tag names is gone; set the tag anew",
                run=str(name.run),
                nearest="",
            )
        wanted = name.which
        steps = await self._reads.steps(name.run)
        steps.sort(key=lambda step: abs(step - wanted))
        found: list[int] = []
        while steps and len(found) < _NEAREST:
            batch, steps = steps[:_NEAREST], steps[_NEAREST:]
            slots = await asyncio.gather(
                *(or_damage(self._held_slot(name.run, s, _LISTED)) for s in batch)
            )
            found += [s.step for s in slots if isinstance(s, pb.CheckpointRecord)]
        near = sorted(found[:_NEAREST])
        nearest = ",".join(map(str, near))
        return CheckpointNotFoundError(
            f"{name} does not exist; the nearest steps of {name.run} are "
            f"{nearest.replace(',', ', ') or 'none'}",
            run=str(name.run),
            step=str(wanted),
            nearest=nearest,
        )


def _names_something(
    tag: tuple[pb.TagRecord, Generation] | CorruptDataError,
) -> bool:
    return isinstance(tag, tuple) and bool(tag[0].upload)


def _is_listed(summary: RunSummary) -> bool:
    """Whether a run has a committed checkpoint, or was set up."""
    record = summary.record
    return (
        summary.latest is not None
        or bool(record.write_id or record.labels)
        or record.HasField("retention")
        or record.HasField("purge_delay")
    )
