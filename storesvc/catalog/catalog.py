"""Lists and looks up runs, checkpoints, tags and manifests; reads only.

Readers see a slot as a checkpoint if it is COMMITTED or, where they ask for deleted
checkpoints, DELETED or PURGING; any other slot is absent to them.
"""

import logging
from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

from storesvc.access.call import may_list
from storesvc.byte_cache import TREES_BYTES, ByteCache
from storesvc.catalog import suggestions
from storesvc.catalog.records import corrupted_in_transit, read_listed
from storesvc.catalog.rollbacks import data_missing, rolled_back
from storesvc.catalog.row_lookup import rows, sound
from storesvc.catalog.slot_reader import SlotReader
from storesvc.catalog.slots import CHECKPOINTS, COMMITTED, UPLOADING
from storesvc.catalog.transitions import is_deleted, replaced
from storesvc.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    RunNotFoundError,
    TagNotFoundError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import (
    CorruptManifestError,
    Manifest,
    unpack_manifest,
)
from storesvc.format.names import LATEST, CheckpointName, RunName, TagName
from storesvc.offload import offload, rows_in
from storesvc.storage.bucket import Bucket, Generation
from storesvc_proto.v1 import bucket_pb2 as pb

_LISTED: Final = frozenset({COMMITTED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run and its newest checkpoint, for lists."""

    name: RunName
    record: pb.RunRecord
    latest: pb.CheckpointRecord | None
    """Newest committed checkpoint."""


class Catalog:
    """The runs and checkpoints of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._slots = SlotReader(bucket)
        self._manifests: ByteCache[str, Manifest] = ByteCache(
            TREES_BYTES, size_of=attrgetter("memory_bytes")
        )

    async def run(self, name: RunName) -> RunSummary:
        """Returns a run that was set up or has a checkpoint, deleted ones included.

        Raises:
            RunNotFoundError: There is no such run.
        """
        found = await self._summary(name)
        if found is None or not (_is_listed(found) or await self._newest(name)):
            raise await self._run_not_found(name)
        return found

    async def runs(
        self, namespace: str | None, *, after: RunName | None, limit: int
    ) -> list[tuple[RunName, RunSummary | CorruptDataError]]:
        """Returns the runs that have a committed checkpoint or were set up, by name;
        only those that the caller may list.

        If the record of a run or of its newest checkpoint is damaged, its row is that
        error.

        Args:
            namespace: The namespace; None for all.
            after: Returns only runs after this one.
            limit: Maximum number of runs.
        """
        names = await self.run_names(namespace)
        names = [
            name for name in names if (after is None or name > after) and may_list(name)
        ]

        async def look(name: RunName) -> RunSummary | None:
            summary = await self._summary(name)
            return summary if summary and _is_listed(summary) else None

        return await rows(look, names, limit=limit)

    async def run_names(self, namespace: str | None) -> list[RunName]:
        """Returns the names of all runs of a namespace, or of all namespaces for None.

        Includes runs that lists do not show, because they have no checkpoint.
        """
        prefix = layout.RUNS if namespace is None else f"{layout.RUNS}{namespace}/"
        found = await self._bucket.list(prefix)
        return sorted(name for path in found if (name := layout.run_of_record(path)))

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
            RunNotFoundError: There is no such run.
            CorruptDataError: The record of a checkpoint is damaged.
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
        """Returns checkpoints by step, newest first; for a damaged record, its error.

        Args:
            run: The run.
            before: Returns only checkpoints of lower steps.
            limit: Maximum number of checkpoints.
            show_deleted: Whether to include deleted ones that are not purged yet.

        Raises:
            RunNotFoundError: There is no such run.
        """
        states = CHECKPOINTS if show_deleted else _LISTED
        found = await self._slots.newest(run, states, before=before, limit=limit)
        if not found:
            await self.check_run(run)
        return found

    async def checkpoint(self, name: CheckpointName) -> pb.CheckpointRecord:
        """Returns a committed checkpoint by step, by tag, or the newest one.

        Raises:
            RunNotFoundError: There is no such run.
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointDeletedError: The checkpoint was deleted.
            TagNotFoundError: There is no such tag.
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
        """Returns the checkpoint of a name, if it has the given uid; also a deleted one
        that is not purged yet.

        Raises:
            RunNotFoundError: There is no such run.
            CheckpointNotFoundError: It was purged, or replaced by another one.
            TagNotFoundError: There is no such tag.
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
        """Returns the error of a checkpoint that does not exist."""
        if not await self._exists(name.run):
            return await self._run_not_found(name.run)
        return await suggestions.checkpoint_not_found(
            name,
            partial(self._slots.steps, name.run),
            lambda step: self._slot_in(name.run, step, _LISTED),
        )

    async def check_run(self, name: RunName) -> None:
        """Rejects a run that was not set up and has no checkpoint, deleted ones
        included.

        Raises:
            RunNotFoundError: There is no such run.
        """
        if not await self._exists(name):
            raise await self._run_not_found(name)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, committed or not.

        Raises:
            CorruptDataError: The slot is damaged, or belongs to another step.
        """
        return await self._slots.slot(run, step)

    async def tag_slot(self, name: TagName) -> tuple[pb.TagRecord, Generation] | None:
        """Returns the record of a tag and its generation, also of a deleted tag."""
        path = RunPaths(name.run).tag(name.tag)
        return await read_listed(self._bucket, path, pb.TagRecord, of=f"tag {name}")

    async def tag_names(self, run: RunName) -> list[str]:
        """Returns the names of a run's tags in order, deleted ones included."""
        places = RunPaths(run)
        names = map(places.tag_of, await self._bucket.list(places.tags))
        return sorted(name for name in names if name is not None)

    async def tag_not_found(self, name: TagName) -> TagNotFoundError:
        """Returns the error of a tag that does not exist."""
        existing = await self.tag_names(name.run)
        return await suggestions.tag_not_found(name, existing, self.tag_slot)

    async def manifest(self, run: RunName, record: pb.CheckpointRecord) -> Manifest:
        """Returns the manifest of a checkpoint; cached, because it never changes.

        Raises:
            CorruptDataError: The manifest is missing or damaged.
        """
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        return await self._manifests.get(path, lambda: self.read_manifest(run, record))

    async def read_manifest(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> Manifest:
        """Returns the stored manifest, past the cache; reads a damaged one twice.

        The first response may have been corrupted in transit.

        Raises:
            CorruptDataError: The manifest is missing or damaged.
        """
        try:
            return await self._unpacked(run, record)
        except CorruptManifestError:
            pass
        try:
            manifest = await self._unpacked(run, record)
        except CorruptManifestError as e:
            raise CorruptDataError(f"{run}@{record.step}: {e}") from e
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        _log.warning("%s", corrupted_in_transit(path))
        return manifest

    async def _unpacked(self, run: RunName, record: pb.CheckpointRecord) -> Manifest:
        data = await self.manifest_bytes(run, record)
        return await offload(
            rows_in(data),
            unpack_manifest,
            data,
            size_bytes=record.manifest_bytes,
            expected=record.manifest_digest,
        )

    async def manifest_bytes(self, run: RunName, record: pb.CheckpointRecord) -> bytes:
        """Returns the stored bytes of a manifest, unchecked.

        Raises:
            CorruptDataError: The manifest is missing.
        """
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        stored = await self._bucket.read(path)
        if stored is None:
            raise await self._without_manifest(run, record)
        return stored.data

    async def _without_manifest(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> CorruptDataError:
        """Returns the error of a checkpoint whose manifest is missing."""
        table = RunPaths(run).file_table(record.upload, record.files_digest)
        if not record.files_digest or await self._bucket.read(table) is not None:
            return CorruptDataError(
                f"{run}@{record.step}: its manifest is missing; use another checkpoint"
            )
        return data_missing(run, record)

    async def manifest_parts(
        self, run: RunName, record: pb.CheckpointRecord, *, size_bytes: int
    ) -> AsyncGenerator[bytes]:
        """Yields the stored bytes of a manifest in parts, unchecked; reads each part on
        demand.

        Args:
            run: The run.
            record: The record of the checkpoint.
            size_bytes: Size of a part.

        Raises:
            CorruptDataError: The manifest is missing or truncated.
        """
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        size = record.manifest_bytes
        for at in range(0, size, size_bytes):
            try:
                part = await self._bucket.read_range(
                    path, at, min(size, at + size_bytes)
                )
            except CorruptDataError as e:
                raise CorruptDataError(
                    f"{run}@{record.step}: its manifest is missing or truncated; use "
                    "another checkpoint"
                ) from e
            yield part
            del part  # so that only the caller holds its memory

    async def _resolved(self, name: CheckpointName) -> pb.CheckpointRecord | None:
        """The checkpoint of a name, deleted ones included."""
        if name.which == LATEST:
            return await self._newest(name.run, _LISTED)
        if isinstance(name.which, int):
            return await self._slot_in(name.run, name.which, CHECKPOINTS)
        return await self._tagged(TagName(name.run, name.which))

    async def _resolved_again(self, name: CheckpointName) -> pb.CheckpointRecord | None:
        """The checkpoint of a step that one read did not find, if a list has its
        slot."""
        if not isinstance(name.which, int):
            return None  # the latest checkpoint and tags have been listed already
        path = RunPaths(name.run).checkpoint(name.which)
        if path not in await self._bucket.list(path):
            return None
        return await self._resolved(name)

    async def _tagged(self, name: TagName) -> pb.CheckpointRecord | None:
        """The checkpoint that a tag points to; None if it was purged."""
        tagged = await self.tag_slot(name)
        if tagged is None or not tagged[0].upload:
            await self.check_run(name.run)
            raise await self.tag_not_found(name)
        tag = tagged[0]
        found = await self._slots.checked(name.run, tag.step)
        if found is None or found[0].upload != tag.upload:
            return None
        if found[0].state == UPLOADING:  # a tag is set only after the commit
            why = f"tag {name.tag} names it"
            raise rolled_back(name.run, tag.step, tag.upload, why)
        return found[0] if found[0].state in CHECKPOINTS else None

    async def _newest(
        self, run: RunName, states: Container[int] = CHECKPOINTS
    ) -> pb.CheckpointRecord | None:
        found = await self._slots.newest(run, states, before=None, limit=1)
        return sound(found[0][1]) if found else None

    async def _slot_in(
        self, run: RunName, step: int, states: Container[int]
    ) -> pb.CheckpointRecord | None:
        found = await self._slots.checked(run, step)
        return found[0] if found and found[0].state in states else None

    async def _exists(self, name: RunName) -> bool:
        try:
            summary = await self._summary(name)
            return summary is not None and (
                _is_listed(summary) or await self._newest(name) is not None
            )
        except CorruptDataError:  # a damaged record exists, too
            return True

    async def _summary(self, name: RunName) -> RunSummary | None:
        """The summary of a run; its record is written just before its first slot."""
        path = layout.run_record(name)
        found = await read_listed(self._bucket, path, pb.RunRecord)
        if found is None:
            return None
        return RunSummary(name, found[0], await self._newest(name, _LISTED))

    async def _run_not_found(self, name: RunName) -> RunNotFoundError:
        existing = await self.run_names(name.namespace)
        return suggestions.run_not_found(name, filter(may_list, existing))


def _is_listed(summary: RunSummary) -> bool:
    """Returns whether a run has a committed checkpoint, or was set up."""
    record = summary.record
    return (
        summary.latest is not None
        or bool(record.write_id or record.labels)
        or record.HasField("retention")
        or record.HasField("purge_delay")
    )
