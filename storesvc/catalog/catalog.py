"""Lists and looks up runs, checkpoints, tags and manifests; reads only.

Readers see a slot as a checkpoint if it is COMMITTED or, where they ask for deleted
checkpoints, DELETED or PURGING; any other slot is absent to them. The error of a run, a
checkpoint or a tag that does not exist names the nearest existing ones.

The rows of a list are looked up concurrently, until the list is full. A damaged record
is a row, too: the list shows its error and continues.

To find the newest checkpoint, a list returns the slots, and reads then return their
states, one after another. While they run, a skipped slot may be committed and one below
it deleted, so that the result was the newest at no time. So skipped slots are read
again, until none has changed.

No such list contains all slots of a long run. It begins at the newest checkpoint that
this process has seen, and so has all newer ones, whichever process committed them; if
that one is gone, or more are needed, the steps below are listed, as far as needed. A
process that has seen none begins at the hint that the last commit left in a bucket
(``RecentCheckpoint``). What it has seen, or the hint, is the record of that checkpoint,
too, if the list shows the generation that this had; otherwise the slot is read.
"""

import asyncio
import difflib
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Final, ParamSpec, TypeVar

from cachetools import LRUCache

from storesvc.auth.call import may_list
from storesvc.catalog.numbered import MAX_NUMBER, PAGE, NumberedObjects, Span, list_ids
from storesvc.catalog.records import (
    corrupted_in_transit,
    damage_error,
    read_listed,
    read_record,
    seal_record,
)
from storesvc.catalog.rollbacks import Rollbacks, data_missing, rolled_back
from storesvc.catalog.slots import (
    CHECKPOINTS,
    COMMITTED,
    UPLOADING,
    is_deleted,
    replaced_error,
    reservation,
    slot_state,
)
from storesvc.concurrency import TREES_BYTES, ByteCache, offload, rows_in
from storesvc.errors import (
    CheckpointNotFoundError,
    ConflictError,
    CorruptDataError,
    FormatUnsupportedError,
    RunNotFoundError,
    TagNotFoundError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import CorruptManifestError, Manifest, unpack_manifest
from storesvc.format.names import LATEST, CheckpointName, RunName, TagName
from storesvc.storage.bucket import UNLISTED, Bucket, Generation
from storesvc.storage.requests import AT_ONCE, background_task, gather_each
from storesvc_proto.v1 import bucket_pb2 as pb

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


async def rows(
    look: Callable[[S], Awaitable[T | None]], names: Sequence[S], *, limit: int
) -> list[tuple[S, T | CorruptDataError]]:
    """Returns rows in the order of their names: each name with its record, or with the
    error of a damaged one.

    Args:
        look: Looks up one name; None means that it is no row.
        names: The names; only as many are looked up as the limit needs.
    """
    found: list[tuple[S, T | CorruptDataError]] = []
    count = limit  # usually each name is a row
    while names and len(found) < limit:
        batch, names = names[:count], names[count:]
        looks = await gather_each(lambda name: or_damage(look, name), batch)
        seen = zip(batch, looks, strict=True)
        found += [(name, one) for name, one in seen if one is not None]
        count = max(limit - len(found), AT_ONCE)
    return found[:limit]


async def rows_in_pages(
    look: Callable[[S], Awaitable[T | None]],
    pages: AsyncGenerator[list[S], None],
    *,
    limit: int,
) -> list[tuple[S, T | CorruptDataError]]:
    """Returns rows as ``rows``, of names that are listed page by page, as far as
    needed."""
    found: list[tuple[S, T | CorruptDataError]] = []
    async with aclosing(pages):
        async for names in pages:
            found += await rows(look, names, limit=limit - len(found))
            if len(found) == limit:
                break
    return found


async def or_damage(
    read: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T | CorruptDataError:
    """Returns the result of a read, or its error if the data are damaged, so that a
    list continues with the next row.

    A function, because a coroutine that exists before a task is cancelled at its start
    would never be awaited.
    """
    try:
        return await read(*args, **kwargs)
    except CorruptDataError as e:
        return e


def sound(found: T | CorruptDataError) -> T:
    """Returns a row of a list; raises the error of a damaged one."""
    if isinstance(found, CorruptDataError):
        raise found
    return found


_PASSES: Final = 10
"""Passes after which a result that may be stale is returned."""

_MAX_PASSES: Final = 50
_PAUSE_SECONDS: Final = 0.01
"""Pause after the first empty pass; each pause is longer than the last one."""


_MAX_SEEN: Final = 10_000
"""Maximum runs whose newest checkpoint is remembered."""

_GROWTH: Final = 16
"""Factor by which the next range of steps is longer if the last one had no slot."""


class _Descent:
    """Lists the slots of a run from the newest down, as far as they are needed."""

    def __init__(
        self,
        slots: NumberedObjects,
        seen: pb.RecentCheckpoint,
        *,
        before: int | None,
    ) -> None:
        self._slots = slots
        self._newest = seen.slot.step if seen.HasField("slot") else None
        self._below = before
        """All slots from this step on were returned, or are not wanted; None: none."""
        self._is_sparse = False
        """True after a range without two slots, where many were expected."""
        self._has_begun = False
        """True once the list of the first slots has been tried."""
        self._factor = 1
        """Growth of the ranges, while they are empty."""
        self.stride = seen.stride
        """Mean distance of two steps, as far as lists have shown it; 0: unknown."""

    @property
    def is_over(self) -> bool:
        """True if no slot is left."""
        return self._below is not None and self._below <= 0

    async def list_next(self, count: int) -> dict[int, Generation]:
        """Returns the next steps, newest first, with the generations of their slots:
        about `count` of them, or none if there is none where so many were expected."""
        below, step = self._below, self._newest
        is_below = below is not None or (step is not None and count > 1)
        if is_below and not self._has_begun and (self._is_sparse or not self.stride):
            self._has_begun = True
            span = await self._slots.list()  # usually that is all
            self.stride = max(self.stride, span.stride, 1)
            if span.end is None or self._is_complete(span.end):
                self._below = 0
                return _descending(span, below)
        if below is None:
            first = 0 if step is None else step - (count - 1) * self.stride
            span = await self._slots.list_end(after=max(0, first) - 1)
            self.stride = self.stride or span.stride
        else:
            first = max(0, below - count * self.stride * self._factor)
            limit = min(count + 1, PAGE)
            span = await self._slots.list_between(first, below, limit=limit)
            self._is_sparse = not span.stride
            self._factor = self._factor * _GROWTH if self._is_sparse else 1
            self.stride = span.stride or self.stride
        self._below = span.first
        return _descending(span, below)

    def _is_complete(self, end: str) -> bool:
        """Returns whether a list that ends with a path has all slots that are left."""
        return self._below is not None and end >= self._slots.path(self._below - 1)


def _descending(span: Span, below: int | None) -> dict[int, Generation]:
    found = reversed(span.found.items())
    return {number: one for number, one in found if below is None or number < below}


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over the slots of a run, from the newest down."""

    listed: Mapping[int, Generation]
    """The slots that were listed."""
    found: Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]
    """Matching slots by step; a damaged one may have any state."""
    skipped: Mapping[int, Generation | None]
    """Generations of the other slots above the last matching one."""


class SlotReader:
    """Reads the slots of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._rollbacks = Rollbacks(bucket)
        self._seen: LRUCache[RunName, pb.RecentCheckpoint] = LRUCache(_MAX_SEEN)
        """The newest checkpoints that were seen: they decide where lists begin, and
        save the read of a slot that a list shows to be unchanged, and nothing else."""

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, committed or not.

        Raises:
            CorruptDataError: The slot is damaged, or belongs to another step.
            FormatUnsupportedError: This release does not know the slot's state.
        """
        path, of = RunPaths(run).checkpoint(step), f"{run}@{step}"
        try:
            found = await read_record(self._bucket, path, pb.CheckpointRecord, of=of)
            if found is not None and found[0].step != step:
                how = f"expected step {step}, got {found[0].step}"
                raise damage_error(path, how, of=of)
        except CorruptDataError as e:
            raise _damage_error(e, run, step) from e
        if found is not None:
            slot_state(found[0])
        return found

    async def checked(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, for readers of checkpoints.

        Raises:
            CorruptDataError: The slot is damaged, belongs to another step, or was
                rolled back to a version before its commit.
        """
        found = await self.slot(run, step)
        damage = await self._rollbacks.damage(run, found)
        if damage is not None:
            raise _damage_error(damage, run, step)
        return found

    async def steps(
        self, run: RunName, *, after: int | None = None, before: int | None = None
    ) -> list[int]:
        """Returns the steps that have a slot, newest first."""
        first = 0 if after is None else after + 1
        stop = MAX_NUMBER + 1 if before is None else before
        span = await self._slots(run).list_between(first, stop)
        return span.numbers[::-1]

    async def newest(
        self, run: RunName, states: Container[int], *, before: int | None, limit: int
    ) -> Sequence[tuple[int, pb.CheckpointRecord | CorruptDataError]]:
        """Returns the newest slots of some states by step, or errors of damaged slots.

        A slot that matched during the whole call is never missing.
        """
        for passes in count(1):
            one = await self._pass(run, states, before, limit)
            if not one.skipped:
                break
            above = one.found[-1][0] if len(one.found) == limit else None
            later = await self.steps(run, after=above, before=before)
            if one.listed.keys() >= {*later} and await self._is_unchanged(
                run, one.skipped
            ):
                break
            # In a run that changes all the time, a result that may be stale is better
            # than none; "no checkpoint" must be certain.
            if one.found and passes >= _PASSES:
                break
            if passes >= _MAX_PASSES:
                raise ConflictError(
                    f"{run}: its checkpoints changed during each of {passes} reads; "
                    "try again",
                    run=str(run),
                )
            if not one.found:
                await asyncio.sleep(passes * _PAUSE_SECONDS)
        return one.found

    async def presumed_newest(self, run: RunName) -> pb.CheckpointRecord | None:
        """Returns the newest committed checkpoint if it is the one that this process
        has seen last, whose slot is read while the slots after it are listed; else
        None. Also None where the list itself shows whether that slot has changed."""
        seen = self._seen.get(run)
        if seen is None or not seen.HasField("slot") or self._bucket.lists_pages:
            return None
        step = seen.slot.step
        async with background_task(or_damage(self.checked, run, step)) as reading:
            if (await self.steps(run, after=step - 1)) != [step]:
                return None
            found = await reading
        if found is None or isinstance(found, CorruptDataError):
            return None
        return found[0] if found[0].state == COMMITTED else None

    async def _pass(
        self, run: RunName, states: Container[int], before: int | None, limit: int
    ) -> _Pass:
        found: list[tuple[int, pb.CheckpointRecord | CorruptDataError]] = []
        skipped: dict[int, Generation | None] = {}
        listed: dict[int, Generation] = {}
        seen = await self._recall(run)
        descent, steps = _Descent(self._slots(run), seen, before=before), list[int]()
        generations: dict[int, Generation] = {}

        async def look(step: int) -> tuple[pb.CheckpointRecord, Generation] | None:
            is_same = listed[step] == seen.generation != UNLISTED
            if not is_same or step != seen.slot.step:
                return await self.checked(run, step)
            slot = pb.CheckpointRecord()
            slot.CopyFrom(seen.slot)  # callers may change theirs
            return slot, listed[step]

        # Usually the first slots match. Others are reservations of saves in progress,
        # or freed, and are read in larger batches.
        count = limit
        while len(found) < limit:
            while not steps and not descent.is_over:
                next_steps = await descent.list_next(count)
                listed |= next_steps
                steps = [*next_steps]
            if not steps:
                break
            batch, steps = steps[:count], steps[count:]
            slots = await gather_each(lambda step: or_damage(look, step), batch)
            for step, slot in zip(batch, slots, strict=True):
                if len(found) == limit:
                    break
                if isinstance(slot, CorruptDataError):
                    found.append((step, slot))
                elif slot is not None and slot[0].state in states:
                    generations[step] = slot[1]
                    found.append((step, slot[0]))
                else:
                    skipped[step] = slot and slot[1]
            count = max(limit - len(found), AT_ONCE)
        if self._seen.get(run) is seen:  # else a commit of this process is newer
            now = pb.RecentCheckpoint()
            now.CopyFrom(seen)
            if found and before is None:
                step, top = found[0]
                if isinstance(top, CorruptDataError):
                    top = pb.CheckpointRecord(step=step)
                generation = generations.get(step, UNLISTED)
                now = pb.RecentCheckpoint(slot=top, generation=generation)
            now.stride = descent.stride
            self._seen[run] = now
        return _Pass(listed, found, skipped)

    def note_commit(
        self, run: RunName, slot: pb.CheckpointRecord, generation: Generation
    ) -> None:
        """Remembers a checkpoint that this process has committed, if it is the
        newest."""
        seen = self._seen.get(run) or pb.RecentCheckpoint()
        if not seen.HasField("slot") or seen.slot.step <= slot.step:
            self._seen[run] = pb.RecentCheckpoint(
                slot=slot, generation=generation, stride=seen.stride
            )

    async def write_hint(self, run: RunName) -> None:
        """Writes the newest checkpoint that this process knows, for processes that know
        none; only to a storage that lists in pages."""
        seen, path = self._seen.get(run), RunPaths(run).recent
        if seen is not None and seen.generation and self._bucket.lists_pages:
            # Unconditionally, as no answer depends on it.
            await self._bucket.write(path, seal_record(path, seen))

    async def _recall(self, run: RunName) -> pb.RecentCheckpoint:
        """Returns the memory of a run; the hint in the bucket, if there is none."""
        if run not in self._seen:
            found, path = None, RunPaths(run).recent
            try:
                if self._bucket.lists_pages:
                    found = await read_record(self._bucket, path, pb.RecentCheckpoint)
            except (CorruptDataError, FormatUnsupportedError) as e:
                _log.warning("%s; the newest checkpoint of %s is searched", e, run)
            seen = found[0] if found else pb.RecentCheckpoint()
            self._seen.setdefault(run, seen)
        return self._seen[run]

    def _slots(self, run: RunName) -> NumberedObjects:
        places = RunPaths(run)
        return NumberedObjects(self._bucket, places.checkpoints, places.checkpoint)

    async def _is_unchanged(
        self, run: RunName, skipped: Mapping[int, Generation | None]
    ) -> bool:
        """Returns whether slots still have their generations."""
        slots = await gather_each(lambda step: or_damage(self.slot, run, step), skipped)
        for before, slot in zip(skipped.values(), slots, strict=True):
            if isinstance(slot, CorruptDataError) or (slot and slot[1]) != before:
                return False
        return True


def _damage_error(
    damage: CorruptDataError, run: RunName, step: int
) -> CorruptDataError:
    text = f"{damage}; other steps can be used as before"
    return CorruptDataError(text, run=str(run), step=str(step))


_NEAREST: Final = 3
"""Maximum suggestions."""

_SIMILARITY: Final = 0.5
"""Minimum ratio of ``difflib`` between two similar names."""


def run_not_found(name: RunName, existing: Iterable[RunName]) -> RunNotFoundError:
    """Returns the error of a run that has no record, or has nothing but its record.

    Args:
        existing: Runs of its namespace that have a record. Runs of others must not be
            named to a caller that may not know them.
    """
    others = [*existing]
    if name in others:  # a save has begun once
        return RunNotFoundError(
            f"run {name} has no checkpoint: none was committed yet, or all were "
            "purged; save one",
            run=str(name),
            nearest="",
        )
    names = [*map(str, others)]
    nearest = difflib.get_close_matches(
        str(name), names, n=_NEAREST, cutoff=_SIMILARITY
    )
    known = f"nearest: {', '.join(nearest)}" if nearest else "no run is similar"
    return RunNotFoundError(
        f"run {name} does not exist ({known}); list the runs to see all",
        run=str(name),
        nearest=",".join(nearest),
    )


async def checkpoint_not_found(
    name: CheckpointName,
    steps: Callable[[], Awaitable[list[int]]],
    committed: Callable[[int], Awaitable[pb.CheckpointRecord | None]],
) -> CheckpointNotFoundError:
    """Returns the error of a checkpoint that does not exist."""
    if name.which == LATEST:
        return CheckpointNotFoundError(
            f"{name.run} has no committed checkpoint yet; save one",
            run=str(name.run),
            nearest="",
        )
    if isinstance(name.which, str):
        return CheckpointNotFoundError(
            f"{name}: the tag points to a purged checkpoint; point it at another step",
            run=str(name.run),
            nearest="",
        )
    wanted = name.which
    rest = sorted(await steps(), key=lambda step: abs(step - wanted))
    found: list[int] = []
    while rest and len(found) < _NEAREST:
        batch, rest = rest[:_NEAREST], rest[_NEAREST:]
        slots = await gather_each(lambda step: or_damage(committed, step), batch)
        found += [s.step for s in slots if isinstance(s, pb.CheckpointRecord)]
    near = sorted(found[:_NEAREST])
    return CheckpointNotFoundError(
        f"{name} does not exist; the nearest steps of {name.run} are "
        f"{', '.join(map(str, near)) or 'none'}",
        run=str(name.run),
        step=str(wanted),
        nearest=",".join(map(str, near)),
    )


async def tag_not_found(
    name: TagName,
    existing: Iterable[str],
    read: Callable[[TagName], Awaitable[tuple[pb.TagRecord, Generation] | None]],
) -> TagNotFoundError:
    similar = difflib.get_close_matches(
        name.tag, existing, n=AT_ONCE, cutoff=_SIMILARITY
    )
    names = [TagName(name.run, tag) for tag in similar]
    found = await rows(read, names, limit=len(names))
    # Deleted and damaged tags are no suggestions.
    live = [
        other.tag for other, tag in found if isinstance(tag, tuple) and tag[0].upload
    ]
    nearest = live[:_NEAREST]
    return TagNotFoundError(
        f"{name.run} has no tag {name.tag} (nearest: {', '.join(nearest) or 'none'}); "
        "list its tags to see all",
        run=str(name.run),
        tag=name.tag,
        nearest=",".join(nearest),
    )


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
        """Returns a run that was set up or has a checkpoint, deleted ones included."""
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
        """

        async def look(name: RunName) -> RunSummary | None:
            summary = await self._summary(name) if may_list(name) else None
            return summary if summary and _is_listed(summary) else None

        if namespace is None:
            names = await self.run_names(None)
            names = [name for name in names if after is None or name > after]
            return await rows(look, names, limit=limit)
        prefix, last = f"{layout.RUNS}{namespace}/", after.run if after else ""
        pages = list_ids(self._bucket, prefix, layout.parse_run_record, after=last)
        return await rows_in_pages(look, pages, limit=limit)

    async def run_names(self, namespace: str | None) -> list[RunName]:
        """Returns the names of all runs of a namespace, or of all namespaces for None.

        Includes runs that lists do not show, because they have no checkpoint.
        """
        prefix = layout.RUNS if namespace is None else f"{layout.RUNS}{namespace}/"
        found = await self._bucket.list(prefix)
        return sorted(name for path in found if (name := layout.parse_run_record(path)))

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
        """Returns checkpoints by step, newest first; a damaged record as its error."""
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
        record = await self._find_record(name)
        if record.state != COMMITTED:
            raise is_deleted(name.run, record)
        return record

    async def find_base(self, name: CheckpointName) -> pb.CheckpointRecord:
        """Returns the checkpoint that ``checkpoint`` returns, usually sooner: if it is
        the newest one, it may be deleted in the meantime."""
        found = None
        if name.which == LATEST:
            found = await self._slots.presumed_newest(name.run)
        return found or await self.checkpoint(name)

    async def checkpoint_with_uid(
        self, name: CheckpointName, uid: str
    ) -> pb.CheckpointRecord:
        """Returns the checkpoint of a name, if it has the given uid; also a deleted one
        that is not purged yet.

        Raises:
            RunNotFoundError: There is no such run.
            CheckpointNotFoundError: It was purged, or replaced by another one.
            TagNotFoundError: There is no such tag.
        """
        record = await self._find_record(name)
        if record.upload != uid:
            raise replaced_error(name.run, record, uid)
        return record

    async def missing(
        self, name: CheckpointName
    ) -> CheckpointNotFoundError | RunNotFoundError:
        """Returns the error of a checkpoint that does not exist."""
        if not await self._exists(name.run):
            return await self._run_not_found(name.run)
        return await checkpoint_not_found(
            name,
            partial(self._slots.steps, name.run),
            lambda step: self._slot_in(name.run, step, _LISTED),
        )

    async def check_run(self, name: RunName) -> None:
        """Rejects a run that was not set up and has no checkpoint, deleted ones
        included."""
        if not await self._exists(name):
            raise await self._run_not_found(name)

    def note_commit(
        self, run: RunName, slot: pb.CheckpointRecord, generation: Generation
    ) -> None:
        """Remembers a checkpoint that this process has committed."""
        self._slots.note_commit(run, slot, generation)

    async def write_hint(self, run: RunName) -> None:
        """Writes a hint of the newest checkpoint; see ``SlotReader``."""
        await self._slots.write_hint(run)

    async def steps(self, run: RunName) -> list[int]:
        """Returns the steps that have a slot, newest first."""
        return await self._slots.steps(run)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns the slot of a step and its generation, committed or not."""
        return await self._slots.slot(run, step)

    async def reservation(
        self, run: RunName, upload: str
    ) -> pb.CheckpointRecord | None:
        """Returns the slot that an upload may still write, if it is absent; None: it
        has no record, so it never will."""
        path = RunPaths(run).upload(upload)
        found = await read_record(self._bucket, path, pb.UploadRecord)
        return found and reservation(upload, found[0])

    async def begun_uploads(self, run: RunName) -> list[str]:
        """Returns the ids of the uploads of a run that are live, or have left objects
        behind, in order.

        A record stays long after its upload has ended. A live upload also has a leaf
        table below its name, from before the response of its begin.
        """
        places = RunPaths(run)
        return sorted(
            {
                upload
                for path in await self._bucket.list(places.uploads)
                if (upload := places.parse_upload(path))
                and path != places.upload(upload)
            }
        )

    async def tag_slot(self, name: TagName) -> tuple[pb.TagRecord, Generation] | None:
        """Returns the record of a tag and its generation, also of a deleted tag."""
        path = RunPaths(name.run).tag(name.tag)
        return await read_listed(self._bucket, path, pb.TagRecord, of=f"tag {name}")

    async def tag_names(self, run: RunName) -> list[str]:
        """Returns the names of a run's tags in order, deleted ones included."""
        places = RunPaths(run)
        names = map(places.parse_tag, await self._bucket.list(places.tags))
        return sorted(name for name in names if name is not None)

    async def tag_not_found(self, name: TagName) -> TagNotFoundError:
        """Returns the error of a tag that does not exist."""
        existing = await self.tag_names(name.run)
        return await tag_not_found(name, existing, self.tag_slot)

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
        """
        try:
            return await self._unpack_manifest(run, record)
        except CorruptManifestError:
            pass
        try:
            manifest = await self._unpack_manifest(run, record)
        except CorruptManifestError as e:
            raise CorruptDataError(f"{run}@{record.step}: {e}") from e
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        _log.warning("%s", corrupted_in_transit(path))
        return manifest

    async def _unpack_manifest(
        self, run: RunName, record: pb.CheckpointRecord
    ) -> Manifest:
        data = await self.manifest_bytes(run, record)
        return await offload(
            rows_in(data),
            unpack_manifest,
            data,
            size_bytes=record.manifest_bytes,
            expected=record.manifest_digest,
        )

    async def manifest_bytes(self, run: RunName, record: pb.CheckpointRecord) -> bytes:
        """Returns the stored bytes of a manifest, unchecked."""
        path = RunPaths(run).manifest(record.upload, record.manifest_digest)
        stored = await self._bucket.read(path)
        if stored is not None:
            return stored.data
        table = RunPaths(run).file_table(record.upload, record.files_digest)
        if not record.files_digest or await self._bucket.read(table) is not None:
            raise CorruptDataError(
                f"{run}@{record.step}: its manifest is missing; use another checkpoint"
            )
        raise data_missing(run, record)

    async def manifest_parts(
        self, run: RunName, record: pb.CheckpointRecord, *, size_bytes: int
    ) -> AsyncGenerator[bytes]:
        """Yields the stored bytes of a manifest in parts, unchecked; reads each part on
        demand."""
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

    async def _resolve_name(self, name: CheckpointName) -> pb.CheckpointRecord | None:
        """The checkpoint of a name, deleted ones included."""
        if name.which == LATEST:
            return await self._newest(name.run, _LISTED)
        if isinstance(name.which, int):
            return await self._slot_in(name.run, name.which, CHECKPOINTS)
        return await self._resolve_tag(TagName(name.run, name.which))

    async def _find_record(self, name: CheckpointName) -> pb.CheckpointRecord:
        """Returns the checkpoint of a name, deleted ones included."""
        record = await self._resolve_name(name)
        # The latest checkpoint and tags have been listed already; a list may have the
        # slot of a step that one read did not find.
        if record is None and isinstance(name.which, int):
            path = RunPaths(name.run).checkpoint(name.which)
            if path in await self._bucket.list(path):
                record = await self._resolve_name(name)
        if record is None:
            raise await self.missing(name)
        return record

    async def _resolve_tag(self, name: TagName) -> pb.CheckpointRecord | None:
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
        return run_not_found(name, filter(may_list, existing))


def _is_listed(summary: RunSummary) -> bool:
    """Returns whether a run has a committed checkpoint, or was set up."""
    record = summary.record
    return (
        summary.latest is not None
        or bool(record.write_id or record.labels)
        or record.HasField("retention")
        or record.HasField("purge_delay")
    )
