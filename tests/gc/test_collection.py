"""Collection: what has no more use goes, and nothing else."""

import itertools
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storesvc.catalog import slots
from storesvc.catalog.records import read_record
from storesvc.catalog.rollbacks import RESERVE_BYTES
from storesvc.errors import StorageFullError
from storesvc.format import layout
from storesvc.format.names import CheckpointName, HoldName, TagName
from storesvc.gc.collector import DEFAULT_GRACE, Progress
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import (
    NOW,
    PLACES,
    RUN,
    Hands,
    Process,
    history,
    started,
)
from tests.support.faulty_bucket import (
    Call,
    DiedError,
    FaultyBucket,
    dies_before,
    record_calls,
    unavailable_at,
)


async def test_a_purged_checkpoint_leaves_only_what_others_share() -> None:
    process = await started()
    first = await process.save(1, (0, 0, 0))
    await process.save(2, (0, 1, 0), base=1)
    third = await process.save(3, (2, 2, 2), base=2)
    before = await process.objects(first)
    await process.delete(1)
    await process.delete(3)

    reported = await process.collect()

    assert 2 == reported.purged_checkpoints
    assert reported.garbage_objects == reported.deleted_objects > 0
    assert "" == reported.postponed
    assert [] == await process.objects(third)
    left = await process.objects(first)
    assert 0 < len(left) < len(before)
    assert all(place.startswith(PLACES.pool) for place in left)
    assert [2] == await process.steps()
    await process.check()

    await process.delete(2)
    await process.collect()
    assert [] == await process.objects(first)


async def test_a_pass_over_what_is_all_needed_changes_nothing() -> None:
    process = await started()
    await process.save(1)
    await process.save(2, (1, 0, 0), base=1)
    await process.begin(3, base=2)
    await process.collect()  # a save may leave a node that it wrote twice
    before = await process.bucket.list(PLACES.root)

    reported = await process.collect()

    assert Progress(run=RUN, is_done=True) == reported
    assert before == await process.bucket.list(PLACES.root)


async def test_what_a_purge_left_stays_for_readers_until_the_grace_is_over() -> None:
    process = await started()
    upload = await process.save(1)
    before = await process.objects(upload)
    await process.delete(1)

    reported = await process.collect(grace=DEFAULT_GRACE)

    assert (1, 0) == (reported.purged_checkpoints, reported.deleted_objects)
    assert "1 upload ended less than 1:00:00 ago" == reported.postponed
    assert before == await process.objects(upload)
    process.clock.turn(DEFAULT_GRACE)
    assert "" == (await process.collect(grace=DEFAULT_GRACE)).postponed
    assert [] == await process.objects(upload)


async def test_shared_files_stay_for_readers_of_the_last_that_shared_them() -> None:
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


async def test_an_upload_that_nothing_is_heard_of_is_aborted_and_goes() -> None:
    process = await started()
    await process.save(1)
    upload = await process.begin(2, base=1)
    await process.send(upload, {0: 2})

    assert 0 == (await process.collect()).aborted_uploads
    process.clock.turn(DEFAULT_LEASE)
    reported = await process.collect()

    assert 1 == reported.aborted_uploads
    assert [] == await process.objects(upload)
    slot = await process.store.catalog.slot(RUN, 2)
    assert slot is not None
    assert slots.FREE == slot[0].state
    await process.check()
    await process.save(2, (1, 2, 1))
    await process.check()


async def test_an_upload_that_is_heard_of_lives_on_whatever_the_clocks_say() -> None:
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


async def test_a_renewal_tells_no_more_than_it_has_written() -> None:
    """Few of many renewals are written; an upload is safe from the last one on."""
    process = await started()
    upload = await process.begin(1)
    opened = await process._open(upload)
    for _ in range(20):
        until = await process.store.uploads.renew(opened)
        await process.collect()
        process.clock.turn(DEFAULT_LEASE / 7)
    process.clock.turn(until - process.clock.now() - timedelta(seconds=1))
    assert 0 == (await process.collect()).aborted_uploads
    process.clock.turn(timedelta(seconds=2))
    assert 1 == (await process.collect()).aborted_uploads


async def test_clocks_a_day_off_neither_kill_nor_keep_an_upload() -> None:
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


async def test_what_a_superseded_upload_stored_stays_while_it_may_be_claimed() -> None:
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


async def test_a_base_is_not_purged_while_an_upload_lives_that_may_claim_it() -> None:
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


async def test_a_begin_that_was_cut_off_can_no_longer_reserve_its_step() -> None:
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


async def test_the_record_of_an_upload_answers_for_a_day() -> None:
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


async def test_a_free_slot_is_emptied_last_and_its_epoch_never_comes_again() -> None:
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


async def test_holds_that_are_over_and_deleted_tags_go() -> None:
    process = await started()
    await process.save(1)
    hold, held = HoldName(RUN, "a" * 32), CheckpointName(RUN, 1)
    ttl = timedelta(minutes=1)
    await process.store.holds.create(hold, held, owner="eval", ttl=ttl)
    await process.tag(1)
    write_id = str(uuid.uuid4())
    await process.store.tags.delete(TagName(RUN, "best"), etag="", write_id=write_id)
    await process.collect()
    assert await process.bucket.list(PLACES.holds)
    assert await process.bucket.list(PLACES.tags)

    process.clock.turn(timedelta(days=8))
    await process.save(2)
    await process.store.collector.trim([RUN.namespace])
    reported = await process.collect()

    assert "" == reported.postponed
    assert [] == await process.bucket.list(PLACES.holds)
    assert [] == await process.bucket.list(PLACES.tags)


async def test_a_preview_tells_what_is_done_then_and_changes_nothing() -> None:
    for turn in (timedelta(0), DEFAULT_LEASE):
        for grace in (NOW, DEFAULT_GRACE):
            process = await started()
            await history(process)
            await process.collect(grace=timedelta(days=1))
            process.clock.turn(turn)
            writes = process.bucket.calls.changes

            reported = await process.preview(grace=grace)

            assert writes == process.bucket.calls.changes
            assert 0 == reported.deleted_objects
            done = await process.collect(grace=grace)
            assert done.garbage_objects == done.deleted_objects
            assert (
                reported.aborted_uploads,
                reported.purged_checkpoints,
                reported.garbage_objects,
                reported.postponed,
            ) == (
                done.aborted_uploads,
                done.purged_checkpoints,
                done.garbage_objects,
                done.postponed,
            )


@pytest.mark.slow
async def test_what_no_list_shows_goes_with_the_last_of_its_upload(
    tmp_path: Path,
) -> None:
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
        has_died = await process.dies_in_collection()
        await (await process.beside()).collect()

        assert [] == [p for p in root.rglob("*") if p.is_file()]
        assert {root} == {p.parent for p in root.rglob("*")}
        if not has_died:
            break


async def test_the_journal_is_not_listed_for_tags_that_are_there() -> None:
    process = await started()
    await process.save(1)
    await process.tag(1)
    calls: list[Call] = []
    process.bucket.calls.follow(record_calls(calls))
    await process.collect()

    journal = layout.journal(RUN.namespace)
    assert calls
    assert [] == [call for call in calls if call.path.startswith(journal)]


async def test_a_collection_that_the_storage_fails_is_reported_as_postponed() -> None:
    process = await started()
    await process.save(1)
    process.bucket.calls.follow(unavailable_at(PLACES.checkpoint(1)))

    for reported in (await process.collect(), await process.preview()):
        assert reported.is_unavailable
        assert PLACES.checkpoint(1) in reported.postponed


async def test_a_damaged_file_table_stops_the_collection_of_its_run_alone() -> None:
    process = await started()
    kept = await process.save(1)
    await process.save(2, (1, 1, 1))
    await process.delete(2)
    (table,) = (p for p in await process.objects(kept) if "/files/" in p)
    await process.bucket.write(table, b"damaged")
    before = await process.bucket.list(f"{PLACES.root}pool/")

    reported = await process.collect()

    assert "damaged" in reported.postponed
    assert before == await process.bucket.list(f"{PLACES.root}pool/")


class FullBucket(FaultyBucket):
    """A bucket in which nothing new fits, unless a reserve was released."""

    room = 10**9

    async def write(self, path: str, data: bytes, **kwargs: Any) -> Any:
        stored = await self.read(path)
        grows = len(data) - len(stored.data if stored else b"")
        if grows > self.room:
            raise StorageFullError(f"{path}: the storage is full")
        self.room -= max(grows, 1)
        return await super().write(path, data, **kwargs)

    async def delete(self, path: str, **kwargs: Any) -> None:
        stored = await self.read(path)
        await super().delete(path, **kwargs)
        self.room += len(stored.data) if stored else 0


async def test_deleting_works_on_a_full_disk() -> None:
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
    reported = await process.collect()

    assert 1 == reported.purged_checkpoints
    assert [] == await process.objects(upload)
    await process.check()
    bucket.room = 2 * RESERVE_BYTES  # type: ignore[attr-defined]
    await process.collect()
    assert await bucket.read(layout.RESERVE)
