"""Collection: what has no more use goes, and nothing else, whatever goes on."""

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc import slots
from storesvc.collecting import Lease, _pass, collecting
from storesvc.collection import DEFAULT_GRACE, Progress
from storesvc.errors import StorageFullError
from storesvc.format import layout
from storesvc.format.layout import RunPlaces
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import pack_leaves
from storesvc.records import read_record
from storesvc.reserve import RESERVE_BYTES
from storesvc.store import Store
from storesvc.uploads import DEFAULT_LEASE, NewUpload
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.contract import frame, mixed_sums, tree_of
from tests.faulty_bucket import (
    Call,
    DiedError,
    Fault,
    FaultyBucket,
    dies_before,
    no_faults,
)
from tests.server_process import EndedError, ServerProcess

RUN = RunName("tests", "collection")
PLACES = RunPlaces(RUN)
CHUNKS = 3
NOW = timedelta(0)


class Hands:
    """Two clocks that a test turns."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)
        self.seconds = 0.0

    def now(self) -> datetime:
        """Returns the time of day."""
        return self.time

    def elapsed(self) -> float:
        """Returns seconds."""
        return self.seconds

    def turn(self, by: timedelta) -> None:
        """Turns both forward."""
        self.time += by
        self.seconds += by.total_seconds()


@dataclass
class Process:
    """A process that serves a bucket, and what it saved there."""

    bucket: FaultyBucket
    clock: Hands
    store: Store
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By step, the version of each chunk."""

    @classmethod
    async def over(cls, bucket: FaultyBucket, clock: Hands | None = None) -> "Process":
        clock = clock or Hands()
        return cls(bucket, clock, await Store.open(bucket, clock=clock))

    async def beside(self, clock: Hands | None = None) -> "Process":
        """Another process of the same bucket."""
        other = await Process.over(self.bucket.reopened(), clock or self.clock)
        other.contents = self.contents
        return other

    async def begin(self, step: int, *, base: int | None = None) -> UploadName:
        name = UploadName(RUN, uuid.uuid4().hex)
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=DEFAULT_LEASE,
            base=None if base is None else CheckpointName(RUN, base),
            body=str(step).encode(),
        )
        table = b"".join(pack_leaves(tree_of(CHUNKS)))
        await self.store.uploads.begin(name, new, table)
        return name

    async def send(self, name: UploadName, versions: Mapping[int, int]) -> None:
        opened = await self._open(name)

        async def frames() -> Any:
            for chunk, version in versions.items():
                yield frame(chunk, version=version)

        async for _ in self.store.receiver.write(opened, 0, frames()):
            pass

    async def finish(self, name: UploadName, content: Sequence[int]) -> None:
        opened = await self._open(name)
        sums = mixed_sums(dict(enumerate(content)))
        await self.store.receiver.finish(opened, 0, sums)

    async def commit(self, name: UploadName, content: Sequence[int]) -> None:
        record = await self.store.uploads.record(name)
        await self.store.commits.commit(name, record.epoch)
        self.contents[record.step] = tuple(content)

    async def save(
        self, step: int, content: Sequence[int] = (0, 0, 0), *, base: int | None = None
    ) -> UploadName:
        """Saves a step; of a base, sends only what differs."""
        name = await self.begin(step, base=base)
        before = self.contents[base] if base is not None else (None,) * CHUNKS
        versions = {
            chunk: version
            for chunk, version in enumerate(content)
            if version != before[chunk]
        }
        if versions:
            await self.send(name, versions)
        await self.finish(name, content)
        await self.commit(name, content)
        return name

    async def delete(self, step: int, *, purge_delay: timedelta = NOW) -> None:
        await self.store.lives.delete(
            RUN, step, purge_delay=purge_delay, etag="", write_id=str(uuid.uuid4())
        )

    async def collect(self, *, grace: timedelta = NOW) -> Progress:
        told = [p async for p in self.store.collector.collect(RUN, grace=grace)]
        assert [False] * (len(told) - 1) + [True] == [p.is_done for p in told]
        return told[-1]

    async def preview(self, *, grace: timedelta = NOW) -> Progress:
        told = [p async for p in self.store.collector.preview(RUN, grace=grace)]
        return told[-1]

    async def check(self) -> None:
        """Every checkpoint that there is holds what was saved, in both views."""
        found = await self.store.catalogue.checkpoints(
            RUN, before=None, limit=100, show_deleted=True
        )
        for record in found:
            content = self.contents[record.step]
            manifest = await self.store.catalogue.manifest(RUN, record)
            sent = self.store.sender.send(RUN, manifest, range(CHUNKS))
            pieces = {
                chunk: f.data[at * 1004 : (at + 1) * 1004]
                async for f in sent
                for at, chunk in enumerate(f.chunk)
            }
            expected = [frame(c, version=v).data for c, v in enumerate(content)]
            assert expected == [pieces[chunk] for chunk in range(CHUNKS)]
            space = self.bucket.key_space(
                place=PLACES.key_space(record.upload, record.attempt), pool=PLACES.pool
            )
            keys = list(map(tree_of(CHUNKS).chunk_key, range(CHUNKS)))
            reads = [space.opened().read(key) for key in keys]
            values = [(await read).value for read in reads]
            assert expected == values
            assert await self.bucket.read(
                PLACES.manifest(record.upload, record.manifest_digest)
            )

    async def objects(self, upload: UploadName) -> list[str]:
        """What carries an upload's id, but for its record."""
        listed = await self.bucket.list(PLACES.root)
        found = [p for p in listed if PLACES.upload_of(p) == upload.upload]
        return [p for p in found if p != PLACES.upload(upload.upload)]

    async def steps(self) -> list[int]:
        found = await self.store.catalogue.checkpoints(RUN, before=None, limit=100)
        return [record.step for record in found]

    async def _open(self, name: UploadName) -> Any:
        record = await self.store.uploads.record(name)
        return await self.store.uploads.open(name, record.epoch)


async def started(root: str = "memory://") -> Process:
    return await Process.over(await FaultyBucket.faulty(root))


def test_a_purged_checkpoint_leaves_only_what_others_share() -> None:
    async def main() -> None:
        process = await started()
        first = await process.save(1, (0, 0, 0))
        await process.save(2, (0, 1, 0), base=1)
        third = await process.save(3, (2, 2, 2), base=2)
        before = await process.objects(first)
        await process.delete(1)
        await process.delete(3)

        told = await process.collect()

        assert 2 == told.purged_checkpoints
        assert told.garbage_objects == told.deleted_objects > 0
        assert "" == told.postponed
        assert [] == await process.objects(third)
        left = await process.objects(first)
        assert 0 < len(left) < len(before)
        assert all(place.startswith(PLACES.pool) for place in left)
        assert [2] == await process.steps()
        await process.check()

        await process.delete(2)
        await process.collect()
        assert [] == await process.objects(first)

    asyncio.run(main())


def test_a_pass_over_what_is_all_needed_changes_nothing() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        await process.save(2, (1, 0, 0), base=1)
        await process.begin(3, base=2)
        await process.collect()  # a save may leave a node that it wrote twice
        before = await process.bucket.list(PLACES.root)

        told = await process.collect()

        assert Progress(run=RUN, is_done=True) == told
        assert before == await process.bucket.list(PLACES.root)

    asyncio.run(main())


def test_what_a_purge_left_stays_for_readers_until_the_grace_is_over() -> None:
    async def main() -> None:
        process = await started()
        upload = await process.save(1)
        before = await process.objects(upload)
        await process.delete(1)

        told = await process.collect(grace=DEFAULT_GRACE)

        assert (1, 0) == (told.purged_checkpoints, told.deleted_objects)
        assert "1 upload ended less than 1:00:00 ago" == told.postponed
        assert before == await process.objects(upload)
        process.clock.turn(DEFAULT_GRACE)
        assert "" == (await process.collect(grace=DEFAULT_GRACE)).postponed
        assert [] == await process.objects(upload)

    asyncio.run(main())


def test_shared_files_stay_for_readers_of_the_last_that_shared_them() -> None:
    async def main() -> None:
        process = await started()
        first = await process.save(1)
        await process.save(2, (0, 0, 1), base=1)
        await process.delete(1)
        await process.collect()
        shared = await process.objects(first)
        await process.delete(2)

        await process.collect(grace=DEFAULT_GRACE)
        assert shared == await process.objects(first)

        process.clock.turn(DEFAULT_GRACE)
        await process.collect(grace=DEFAULT_GRACE)
        assert [] == await process.objects(first)

    asyncio.run(main())


def test_an_upload_that_nothing_is_heard_of_is_aborted_and_goes() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        upload = await process.begin(2, base=1)
        await process.send(upload, {0: 2})

        assert 0 == (await process.collect()).aborted_uploads
        process.clock.turn(DEFAULT_LEASE)
        told = await process.collect()

        assert 1 == told.aborted_uploads
        assert [] == await process.objects(upload)
        slot = await process.store.uploads.slot(RUN, 2)
        assert slot is not None
        assert slots.FREE == slot.state
        await process.check()
        await process.save(2, (1, 2, 1))
        await process.check()

    asyncio.run(main())


def test_an_upload_that_is_heard_of_lives_on_whatever_the_clocks_say() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        upload = await process.begin(2, base=1)
        await process.send(upload, {0: 2})
        days = [timedelta(days=1), timedelta(days=-2), timedelta(days=1)]
        for day in days * 3:
            process.clock.time += day
            for _ in range(3):
                process.clock.turn(DEFAULT_LEASE / 2)
                opened = await process._open(upload)
                await process.store.uploads.renew(opened)
                assert 0 == (await process.collect()).aborted_uploads
        await process.finish(upload, (2, 0, 0))
        await process.commit(upload, (2, 0, 0))
        await process.check()

    asyncio.run(main())


def test_clocks_a_day_off_neither_kill_nor_keep_an_upload() -> None:
    async def main() -> None:
        for skew in (timedelta(days=1), timedelta(days=-1)):
            process = await started()
            upload = await process.begin(1)
            clock = Hands()
            clock.time += skew
            other = await process.beside(clock)

            assert 0 == (await other.collect()).aborted_uploads
            clock.turn(DEFAULT_LEASE - timedelta(seconds=1))
            assert 0 == (await other.collect()).aborted_uploads
            clock.turn(timedelta(seconds=1))
            assert 1 == (await other.collect()).aborted_uploads
            assert [] == await process.objects(upload)

    asyncio.run(main())


def test_what_a_superseded_upload_stored_stays_while_its_successor_may_claim_it() -> (
    None
):
    async def main() -> None:
        process = await started()
        cut_off = await process.begin(1)
        await process.send(cut_off, {0: 0, 1: 0})
        stored = await process.objects(cut_off)
        successor = await process.begin(1)

        await process.collect()
        assert stored == await process.objects(cut_off)
        await process.send(successor, {2: 0})
        await process.finish(successor, (0, 0, 0))
        await process.collect()
        await process.commit(successor, (0, 0, 0))
        await process.collect()

        left = await process.objects(cut_off)
        assert left
        assert all(place.startswith(PLACES.pool) for place in left)
        await process.check()
        await process.delete(1)
        await process.collect()
        assert [] == await process.objects(cut_off)

    asyncio.run(main())


def test_a_base_is_not_purged_while_an_upload_lives_that_may_claim_it() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        upload = await process.begin(2, base=1)
        await process.delete(1)

        assert 0 == (await process.collect()).purged_checkpoints
        await process.finish(upload, (0, 0, 0))
        await process.commit(upload, (0, 0, 0))
        assert 1 == (await process.collect()).purged_checkpoints

        assert [2] == await process.steps()
        await process.check()

    asyncio.run(main())


def test_a_begin_that_was_cut_off_can_no_longer_reserve_its_step() -> None:
    async def main() -> None:
        process = await started()
        await process.save(0)
        changes = process.bucket.calls.changes
        await process.begin(1)
        count = process.bucket.calls.changes - changes
        for cut in range(count):
            process = await started()
            await process.save(0)
            dying = await process.beside()
            dying.bucket.calls.follow(dies_before(cut))
            with pytest.raises(DiedError):
                await dying.begin(1)

            before = await process.bucket.list(PLACES.uploads)
            await process.collect()
            assert before == await process.bucket.list(PLACES.uploads)
            process.clock.turn(DEFAULT_LEASE)
            await process.collect()

            uploads = await process.bucket.list(PLACES.uploads)
            assert all(p.count("/") == PLACES.uploads.count("/") for p in uploads)
            await process.save(1)
            await process.check()

    asyncio.run(main())


def test_the_record_of_an_upload_answers_for_a_day() -> None:
    async def main() -> None:
        process = await started()
        upload = await process.save(1)
        place = PLACES.upload(upload.upload)
        await process.collect()
        process.clock.turn(timedelta(hours=23))
        await process.collect()
        assert await process.bucket.read(place)

        process.clock.turn(timedelta(hours=1))
        await process.collect()

        assert await process.bucket.read(place) is None
        await process.check()

    asyncio.run(main())


def test_a_free_slot_is_emptied_last_and_its_epoch_never_comes_again() -> None:
    async def main() -> None:
        process = await started()
        for _ in range(3):
            upload = await process.begin(1)
            await process.store.uploads.abort(upload)
        place = PLACES.checkpoint(1)
        await process.collect()
        assert await process.bucket.read(place)  # an answer is still given
        process.clock.turn(timedelta(hours=24))
        await process.collect()
        await process.collect()

        assert await process.bucket.read(place) is None
        assert [] == await process.bucket.list(PLACES.root)
        run = await read_record(process.bucket, layout.run_record(RUN), pb.RunRecord)
        assert run is not None
        assert 3 == run[0].epoch_floor
        again = await process.store.uploads.record(await process.begin(1))
        assert 4 == again.epoch

    asyncio.run(main())


def test_holds_that_are_over_and_deleted_tags_go() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        hold, tag = HoldName(RUN, "a" * 32), TagName(RUN, "best")
        await process.store.holds.create(
            hold, CheckpointName(RUN, 1), owner="eval", ttl=timedelta(minutes=1)
        )
        tags = process.store.tags
        await tags.set(
            tag,
            CheckpointName(RUN, 1),
            protected=False,
            etag="",
            write_id=str(uuid.uuid4()),
        )
        await tags.delete(tag, etag="", write_id=str(uuid.uuid4()))
        await process.collect()
        assert await process.bucket.list(PLACES.holds)
        assert await process.bucket.list(PLACES.tags)

        process.clock.turn(timedelta(days=8))
        await process.save(2)
        await process.store.collector.trim([RUN.namespace])
        told = await process.collect()

        assert "" == told.postponed
        assert [] == await process.bucket.list(PLACES.holds)
        assert [] == await process.bucket.list(PLACES.tags)

    asyncio.run(main())


async def _history(process: Process) -> None:
    """A run with all kinds of garbage, and of what must stay."""
    await process.save(1)
    await process.save(2, (1, 0, 0), base=1)
    await process.save(3, (1, 2, 0), base=2)
    cut_off = await process.begin(4, base=3)
    await process.send(cut_off, {0: 2})
    successor = await process.begin(4, base=3)
    await process.send(successor, {1: 2})
    aborted = await process.begin(5)
    await process.send(aborted, {0: 1})
    await process.store.uploads.abort(aborted)
    await process.begin(6, base=1)
    await process.delete(1)
    await process.delete(2)


def test_a_preview_tells_what_is_done_then_and_changes_nothing() -> None:
    async def main() -> None:
        for turn in (timedelta(0), DEFAULT_LEASE):
            for grace in (NOW, DEFAULT_GRACE):
                process = await started()
                await _history(process)
                await process.collect(grace=timedelta(days=1))
                process.clock.turn(turn)
                writes = process.bucket.calls.changes

                told = await process.preview(grace=grace)

                assert writes == process.bucket.calls.changes
                assert 0 == told.deleted_objects
                done = await process.collect(grace=grace)
                assert done.garbage_objects == done.deleted_objects
                assert (
                    told.aborted_uploads,
                    told.purged_checkpoints,
                    told.garbage_objects,
                    told.postponed,
                ) == (
                    done.aborted_uploads,
                    done.purged_checkpoints,
                    done.garbage_objects,
                    done.postponed,
                )

    asyncio.run(main())


def test_a_pass_that_dies_before_any_change_is_gone_on_with() -> None:
    async def main() -> None:
        async def prepared() -> Process:
            process = await started()
            await _history(process)
            await process.collect(grace=timedelta(days=1))
            process.clock.turn(DEFAULT_LEASE)
            return process

        process = await prepared()
        await process.collect()
        expected = sorted(map(_kind, await process.bucket.list(PLACES.root)))
        for cut in itertools.count():
            process = await prepared()
            # sees what the first process saw, and dies on the way
            process.bucket.calls.follow(dies_before(cut))
            try:
                await process.collect()
            except DiedError:
                has_died = True
            else:
                has_died = False
            survivor = await process.beside()
            await survivor.check()
            await survivor.collect()
            survivor.clock.turn(DEFAULT_LEASE)
            await survivor.collect()
            await survivor.check()
            left = sorted(map(_kind, await survivor.bucket.list(PLACES.root)))
            assert expected == left
            if not has_died:
                break
        assert cut > 10

    asyncio.run(main())


def _kind(place: str) -> str:
    return place.removeprefix(PLACES.root).partition("/")[0]


def test_a_second_collector_beside_the_first_does_no_harm() -> None:
    async def main() -> None:
        process = await started()
        await _history(process)
        other = await process.beside()
        for one in (process, other):
            await one.collect(grace=timedelta(days=1))
        process.clock.turn(DEFAULT_LEASE)

        told = await asyncio.gather(*(p.collect() for p in (process, other) * 2))

        assert all(p.is_done for p in told)
        await process.check()
        assert 0 == (await process.collect()).garbage_objects

    asyncio.run(main())


def test_saves_and_restores_go_on_beside_collectors() -> None:
    async def main() -> None:
        process = await started()
        other = await process.beside()
        await process.save(0)
        is_over = False

        async def collect_often() -> None:
            while not is_over:
                await other.collect()

        collecting_often = asyncio.create_task(collect_often())
        for step in range(1, 25):
            content = tuple(step // (chunk + 1) % 3 for chunk in range(CHUNKS))
            if step % 5 == 0:
                await process.send(await process.begin(step), {0: 2})
            await process.save(step, content, base=step - 1)
            await process.check()
            if step > 1:
                await process.delete(step - 2)
        is_over = True
        await collecting_often
        await process.check()

        await process.collect()
        await process.check()
        assert [24, 23] == await process.steps()

    asyncio.run(main())


class HookedBucket(FaultyBucket):
    """A bucket where something else happens once, right before a certain call."""

    def before(
        self, operation: str, place: str, hook: Callable[[], Awaitable[None]]
    ) -> None:
        """Sets what happens."""
        self.hook = (operation, place, hook)

    async def _happen(self, operation: str, place: str) -> None:
        waiting = getattr(self, "hook", None)
        if waiting and waiting[:2] == (operation, place):
            del self.hook
            await waiting[2]()

    async def read(self, place: str) -> Any:
        await self._happen("read", place)
        return await super().read(place)

    async def list(self, prefix: str, **kwargs: Any) -> Any:
        await self._happen("list", prefix)
        return await super().list(prefix, **kwargs)

    async def write(self, place: str, data: bytes, **kwargs: Any) -> Any:
        await self._happen("write", place)
        return await super().write(place, data, **kwargs)


async def hooked() -> tuple[Process, HookedBucket, Process]:
    """A process whose collector something comes before, and one that brings it."""
    bucket = await HookedBucket.faulty("memory://")
    assert isinstance(bucket, HookedBucket)
    process = await Process.over(bucket)
    return process, bucket, await process.beside()


def test_an_upload_that_begins_during_a_pass_is_left_alone() -> None:
    async def main() -> None:
        process, bucket, other = await hooked()
        await process.save(1)
        uploads = []

        async def begin() -> None:
            upload = await other.begin(2)
            await other.send(upload, {0: 0, 1: 0, 2: 0})
            await other.finish(upload, (0, 0, 0))
            uploads.append(upload)

        bucket.before("list", PLACES.root, begin)
        await process.collect()

        await other.commit(uploads[0], (0, 0, 0))
        await process.check()

    asyncio.run(main())


def test_slots_that_change_while_they_are_read_are_read_again() -> None:
    async def main() -> None:
        process, bucket, other = await hooked()
        await process.save(2)

        async def move() -> None:
            await other.save(1, (0, 0, 1), base=2)
            await other.delete(2)
            await other.store.lives.purge(RUN, 2, etag="")

        # when the slot of step 1 was found absent, and that of step 2 is next
        bucket.before("read", PLACES.checkpoint(2), move)
        await process.collect()

        assert [1] == await process.steps()
        await process.check()

    asyncio.run(main())


def test_what_is_committed_before_a_purge_keeps_what_it_shares() -> None:
    async def main() -> None:
        process, bucket, other = await hooked()
        await process.save(2)
        upload = await other.begin(1, base=2)
        await other.finish(upload, (0, 0, 0))
        await process.delete(2)

        async def commit() -> None:
            await other.commit(upload, (0, 0, 0))

        # the pass has seen the upload alive by now, and looks at what uses its base
        bucket.before("list", PLACES.uploads, commit)
        told = await process.collect()

        assert 1 == told.purged_checkpoints
        await process.check()

    asyncio.run(main())


def test_a_run_is_collected_though_saves_begin_whenever_it_is_read() -> None:
    async def main() -> None:
        process, bucket, other = await hooked()
        first = await process.save(1)
        await process.save(9, (1, 1, 1))
        await process.delete(1)
        steps = itertools.count(10)

        async def begin() -> None:
            await other.begin(next(steps))
            bucket.before("read", PLACES.checkpoint(9), begin)

        bucket.before("read", PLACES.checkpoint(9), begin)
        told = await process.collect()

        assert (1, "") == (told.purged_checkpoints, told.postponed)
        assert [] == await process.objects(first)
        assert next(steps) > 11
        await process.check()

    asyncio.run(main())


def test_what_is_due_ends_in_a_run_that_never_holds_still() -> None:
    async def main() -> None:
        process, bucket, other = await hooked()
        first = await process.save(1)
        await process.save(9)
        await process.delete(1)

        async def take_over() -> None:
            await other.begin(5)
            bucket.before("read", PLACES.checkpoint(9), take_over)

        bucket.before("read", PLACES.checkpoint(9), take_over)
        told = await process.collect()

        assert 1 == told.purged_checkpoints
        assert "taken over" in told.postponed
        assert await process.objects(first)

    asyncio.run(main())


def test_what_no_list_shows_goes_with_the_last_of_its_upload(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Hands()

        async def prepared(name: str) -> tuple[Process, Path]:
            """A purged checkpoint whose record was swept while it was kept."""
            bucket = await FaultyBucket.faulty((tmp_path / name).as_uri())
            process = await Process.over(bucket, clock)
            upload = await process.save(1)
            root = tmp_path / name / PLACES.root
            (root / f"pool/{upload.upload}/killed.__lock").write_bytes(bytes(1000))
            for _ in range(2):
                await process.collect()
                clock.turn(timedelta(days=1))
            await process.collect()
            assert await bucket.read(PLACES.upload(upload.upload)) is None
            assert upload.upload in "".join(map(str, root.rglob("*")))
            await process.delete(1)
            return process, root

        for cut in itertools.count():
            process, root = await prepared(str(cut))
            process.bucket.calls.follow(dies_before(cut))
            try:
                await process.collect()
            except DiedError:
                has_died = True
            else:
                has_died = False
            await (await process.beside()).collect()

            assert [] == [p for p in root.rglob("*") if p.is_file()]
            assert {root} == {p.parent for p in root.rglob("*")}
            if not has_died:
                break

    asyncio.run(main())


def test_the_journal_is_not_listed_for_tags_that_are_there() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        await process.store.tags.set(
            TagName(RUN, "best"),
            CheckpointName(RUN, 1),
            protected=False,
            etag="",
            write_id=str(uuid.uuid4()),
        )
        calls = []

        def note(call: Call) -> Fault:
            calls.append(call)
            return Fault.NONE

        process.bucket.calls.follow(note)
        await process.collect()

        journal = layout.journal(RUN.namespace)
        assert calls
        assert [] == [call for call in calls if call.place.startswith(journal)]

    asyncio.run(main())


async def _deleted_in(process: Process, *runs: RunName) -> None:
    """Each has a deleted checkpoint that is due."""
    for run in runs:
        await process.store.runs.create(run)
        due = pb.CheckpointRecord(state=slots.DELETED, step=1, upload="1" * 32, epoch=1)
        due.purge_time.FromSeconds(1)
        await process.bucket.write(RunPlaces(run).checkpoint(1), seal(due))


async def _purged(process: Process, *runs: RunName) -> list[bool]:
    process.bucket.calls.follow(no_faults)
    found = [await process.store.catalogue.slot(run, 1) for run in runs]
    return [slot is None or slot[0].state == slots.FREE for slot in found]


def test_a_collection_that_the_storage_fails_is_told_as_postponed() -> None:
    async def main() -> None:
        process = await started()
        await process.save(1)
        process.bucket.calls.follow(
            lambda call: (
                Fault.UNAVAILABLE if call.place == PLACES.checkpoint(1) else Fault.NONE
            )
        )

        for told in (await process.collect(), await process.preview()):
            assert told.is_unavailable
            assert PLACES.checkpoint(1) in told.postponed

    asyncio.run(main())


def test_a_run_that_cannot_be_read_keeps_no_other_from_collection() -> None:
    async def main() -> None:
        process = await started()
        runs = [RunName(name, "run") for name in "abcde"]
        await _deleted_in(process, *runs)
        bad = {RunPlaces(runs[at]).checkpoint(1) for at in (0, 1, 3)}
        process.bucket.calls.follow(
            lambda call: Fault.UNAVAILABLE if call.place in bad else Fault.NONE
        )

        await _pass(process.store, Lease(process.store, length=timedelta(hours=1)))

        assert [False, False, True, False, True] == await _purged(process, *runs)

    asyncio.run(main())


def test_a_pass_is_given_up_where_the_storage_does_not_answer_at_all() -> None:
    async def main() -> None:
        process = await started()
        runs = [RunName(name, "run") for name in "abcde"]
        await _deleted_in(process, *runs)
        asked = []

        def fail(call: Call) -> Fault:
            if not call.place.startswith("data/"):
                return Fault.NONE
            asked.append(call.place.split("/")[1])
            return Fault.UNAVAILABLE

        process.bucket.calls.follow(fail)
        await _pass(process.store, Lease(process.store, length=timedelta(hours=1)))

        assert {"a", "b", "c"} == set(asked)

    asyncio.run(main())


def test_retention_after_a_commit_goes_on_past_a_run_that_fails() -> None:
    async def main() -> None:
        process = await started()
        bad = RunName("tests", "a-bad-one")
        await process.store.runs.create(bad)
        for step in (1, 2):
            await process.save(step)
        found = await read_record(process.bucket, layout.run_record(RUN), pb.RunRecord)
        assert found is not None
        found[0].retention.latest.count = 1
        await process.bucket.write(layout.run_record(RUN), seal(found[0]))
        process.bucket.calls.follow(
            lambda call: (
                Fault.UNAVAILABLE
                if call.place == layout.run_record(bad)
                else Fault.NONE
            )
        )
        process.store.recent.take()

        async with collecting(process.store, timedelta(hours=1)):
            process.store.recent.add(bad)
            process.store.recent.add(RUN)
            async with asyncio.timeout(20):
                while await process.steps() != [2]:  # noqa: ASYNC110 - as watchers do
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_sign_of_life_at_the_last_moment_counts() -> None:
    async def main() -> None:
        process = await started()
        upload = await process.begin(1)
        await process.collect()
        process.clock.turn(DEFAULT_LEASE)
        expiry = process.store.collector._ending._expiry
        snapshot = await process.store.collector._snapshots.look(RUN)
        (expired,) = await expiry.uploads(RUN, snapshot)

        await process.store.uploads.renew(await process._open(upload))

        assert not await expiry.abort(RUN, expired)
        await process.send(upload, {0: 0})

    asyncio.run(main())


def test_a_damaged_file_table_stops_the_collection_of_its_run_alone() -> None:
    async def main() -> None:
        process = await started()
        kept = await process.save(1)
        await process.save(2, (1, 1, 1))
        await process.delete(2)
        (table,) = (p for p in await process.objects(kept) if "/files/" in p)
        await process.bucket.write(table, b"damaged")
        before = await process.bucket.list(f"{PLACES.root}pool/")

        told = await process.collect()

        assert "damaged" in told.postponed
        assert before == await process.bucket.list(f"{PLACES.root}pool/")

    asyncio.run(main())


class FullBucket(FaultyBucket):
    """A bucket in which nothing new fits, unless a reserve was given up."""

    room = 10**9

    async def write(self, place: str, data: bytes, **kwargs: Any) -> Any:
        stored = await self.read(place)
        grows = len(data) - len(stored.data if stored else b"")
        if grows > self.room:
            raise StorageFullError(f"{place}: the storage is full")
        self.room -= max(grows, 1)
        return await super().write(place, data, **kwargs)

    async def delete(self, place: str, **kwargs: Any) -> None:
        stored = await self.read(place)
        await super().delete(place, **kwargs)
        self.room += len(stored.data) if stored else 0


def test_deleting_works_on_a_full_disk() -> None:
    async def main() -> None:
        bucket = await FullBucket.faulty("memory://")
        process = await Process.over(bucket)
        await process.store.reserve.keep()
        assert await bucket.read(layout.RESERVE)
        upload = await process.save(1)
        await process.save(2, (1, 1, 1))
        bucket.room = 0  # type: ignore[attr-defined]  # it is a FullBucket
        reserve = process.store.reserve

        with pytest.raises(StorageFullError):
            await process.save(3)
        await reserve.spent_on(process.delete, 1)
        told = await process.collect()

        assert 1 == told.purged_checkpoints
        assert [] == await process.objects(upload)
        await process.check()
        bucket.room = 2 * RESERVE_BYTES  # type: ignore[attr-defined]
        await process.collect()
        assert await bucket.read(layout.RESERVE)

    asyncio.run(main())


def test_of_several_servers_one_collects_and_another_follows_it() -> None:
    async def main() -> None:
        process = await started()
        other = await process.beside()
        length = timedelta(minutes=20)
        ours = Lease(process.store, length=length)
        theirs = Lease(other.store, length=length)

        assert await ours.take()
        assert not await theirs.take()
        process.clock.turn(length / 2)
        assert await ours.take()
        process.clock.turn(length / 2)
        assert not await theirs.take()  # it was renewed meanwhile
        process.clock.turn(length)
        assert await theirs.take()
        assert not await ours.take()
        await theirs.release()
        assert await ours.take()

    asyncio.run(main())


def test_a_server_collects_by_itself_and_stops_at_once() -> None:
    async def main() -> None:
        process = await started()
        upload = await process.save(1)
        await process.delete(1)
        process.clock.turn(DEFAULT_GRACE)
        await process.collect(grace=timedelta(days=1))
        process.clock.turn(DEFAULT_GRACE)
        async with collecting(process.store, timedelta(milliseconds=20)):
            async with asyncio.timeout(20):
                while await process.objects(upload):  # noqa: ASYNC110 - as watchers do
                    await asyncio.sleep(0.02)
        assert await process.bucket.read(layout.COLLECTOR) is None
        async with collecting(process.store, timedelta(hours=1)):
            pass  # a script that is short

    asyncio.run(main())


# --- through a real client and a real server ------------------------------------


def tree(version: int) -> dict[str, Any]:
    return {
        "frozen": np.arange(1_000_000, dtype=np.float32),
        "step": np.full(1000, version, np.int32),
    }


def files_below(server: ServerProcess, run: store.Run) -> list[Path]:
    root = server.root / RunPlaces(RunName.parse(run.name)).root
    return [path for path in root.rglob("*") if path.is_file()]


def assert_whole(run: store.Run, *steps: int) -> None:
    assert list(steps) == [c.step for c in run.checkpoints()]
    for step in steps:
        found = run.restore(step)
        for key, array in tree(step).items():
            assert array.tobytes() == np.asarray(found[key]).tobytes()


def test_a_client_frees_what_nothing_shares(
    client: store.Client, run: store.Run, server: ServerProcess
) -> None:
    for step in range(4):
        run.save(step, tree(step)).result()
    size = sum(path.stat().st_size for path in files_below(server, run))
    for step in (0, 1, 2):
        run.delete(step, purge_delay=NOW)

    (told,) = client.preview_collection(run.name, grace=NOW)
    assert (3, 0) == (told.purged_checkpoint_count, told.deleted_object_count)
    assert size <= sum(path.stat().st_size for path in files_below(server, run))
    (done,) = client.collect(run.name, grace=NOW)

    assert (run.name, 3) == (done.run, done.purged_checkpoint_count)
    assert told.garbage_object_count == done.deleted_object_count > 6
    assert "" == done.postponed
    assert_whole(run, 3)
    left = sum(path.stat().st_size for path in files_below(server, run))
    assert left < size - 2 * 4000
    run.save(4, tree(4)).result()
    assert_whole(run, 4, 3)


def test_a_client_collects_all_runs_of_a_namespace(client: store.Client) -> None:
    for name in ("gcns/a", "gcns/b"):
        client.run(name).save(0, tree(0)).result()

    assert ["gcns/a", "gcns/b"] == [one.run for one in client.collect("gcns")]
    assert {"gcns/a", "gcns/b"} <= {one.run for one in client.preview_collection()}


def test_a_run_or_a_grace_that_there_is_not_is_refused(client: store.Client) -> None:
    with pytest.raises(store.NotFoundError, match="nobody/nothing"):
        list(client.collect("nobody/nothing"))
    with pytest.raises(store.InvalidRequestError, match="grace"):
        list(client.collect(grace=timedelta(seconds=-1)))
    with pytest.raises(store.InvalidRequestError, match="namespace"):
        client.collect("No Namespace")


def test_retention_is_applied_soon_after_a_commit(
    run: store.Run,
) -> None:
    run.retain(store.KeepLatest(1))
    for step in range(3):
        run.save(step, tree(step)).result()

    deadline = datetime.now(UTC) + timedelta(seconds=30)
    while len(list(run.checkpoints())) > 1:
        assert datetime.now(UTC) < deadline
    assert_whole(run, 2)


def test_an_embedded_store_keeps_a_reserve(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()):
        assert RESERVE_BYTES == (tmp_path / layout.RESERVE).stat().st_size


def test_a_server_does_all_that_by_itself(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--gc-interval", "1s")
    with store.connect(server.address) as client:
        run = client.run("tests/alone")
        run.save(0, tree(0)).result()
        run.save(1, tree(1)).result()
        run.delete(0, purge_delay=NOW)
        deadline = datetime.now(UTC) + timedelta(seconds=30)
        while run.usage().deleted_checkpoint_count:
            assert datetime.now(UTC) < deadline
        assert_whole(run, 1)
    assert 0 == server.stop()
    assert not (server.root / layout.COLLECTOR).exists()


def test_an_interval_below_zero_is_refused(
    start_server: Callable[..., ServerProcess],
) -> None:
    with pytest.raises(EndedError):
        start_server("--gc-interval", "-1s")
