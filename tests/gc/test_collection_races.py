"""Collection during saves, restores, other collections, and its own death."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from storesvc.errors import UploadNotFoundError
from storesvc.save.uploads import DEFAULT_LEASE
from tests.support.collecting_process import (
    CHUNKS,
    PLACES,
    RUN,
    Process,
    history,
    started,
)
from tests.support.faulty_bucket import FaultyBucket, dies_before


@pytest.mark.slow
async def test_a_pass_that_dies_before_any_change_is_gone_on_with() -> None:
    async def prepared() -> Process:
        process = await started()
        await history(process)
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
        has_died = await process.dies_in_collection()
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


def _kind(place: str) -> str:
    return place.removeprefix(PLACES.root).partition("/")[0]


async def test_a_second_collector_beside_the_first_does_no_harm() -> None:
    process = await started()
    await history(process)
    other = await process.beside()
    for one in (process, other):
        await one.collect(grace=timedelta(days=1))
    process.clock.turn(DEFAULT_LEASE)

    reported = await asyncio.gather(*(p.collect() for p in (process, other) * 2))

    assert all(p.is_done for p in reported)
    await process.check()
    assert 0 == (await process.collect()).garbage_objects


@pytest.mark.slow
async def test_saves_and_restores_go_on_beside_collectors() -> None:
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
        await process.check(with_deleted=False)
        if step > 1:
            await process.delete(step - 2)
    is_over = True
    await collecting_often
    await process.check()

    await process.collect()
    await process.check()
    assert [24, 23] == await process.steps()


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

    async def read(self, path: str) -> Any:
        await self._happen("read", path)
        return await super().read(path)

    async def list(self, prefix: str, **kwargs: Any) -> Any:
        await self._happen("list", prefix)
        return await super().list(prefix, **kwargs)

    async def write(self, path: str, data: bytes, **kwargs: Any) -> Any:
        await self._happen("write", path)
        return await super().write(path, data, **kwargs)


async def hooked() -> tuple[Process, HookedBucket, Process]:
    """A process whose collector something comes before, and one that brings it."""
    bucket = await HookedBucket.faulty("memory://")
    assert isinstance(bucket, HookedBucket)
    process = await Process.over(bucket)
    return process, bucket, await process.beside()


async def test_an_upload_that_begins_during_a_pass_is_left_alone() -> None:
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


async def test_slots_that_change_while_they_are_read_are_read_again() -> None:
    process, bucket, other = await hooked()
    await process.save(2)

    async def move() -> None:
        await other.save(1, (0, 0, 1), base=2)
        await other.delete(2)
        await other.store.lifecycle.purge(RUN, 2, etag="")

    # when the slot of step 1 was found absent, and that of step 2 is next
    bucket.before("read", PLACES.checkpoint(2), move)
    await process.collect()

    assert [1] == await process.steps()
    await process.check()


async def test_what_is_committed_before_a_purge_keeps_what_it_shares() -> None:
    process, bucket, other = await hooked()
    await process.save(2)
    upload = await other.begin(1, base=2)
    await other.finish(upload, (0, 0, 0))
    await process.delete(2)

    async def commit() -> None:
        await other.commit(upload, (0, 0, 0))

    # the pass has seen the upload alive by now, and looks at what uses its base
    bucket.before("list", PLACES.uploads, commit)
    reported = await process.collect()

    assert 1 == reported.purged_checkpoints
    await process.check()


async def test_a_run_is_collected_though_saves_begin_whenever_it_is_read() -> None:
    process, bucket, other = await hooked()
    first = await process.save(1)
    await process.save(9, (1, 1, 1))
    await process.delete(1)
    steps = itertools.count(10)

    async def begin() -> None:
        await other.begin(next(steps))
        bucket.before("read", PLACES.checkpoint(9), begin)

    bucket.before("read", PLACES.checkpoint(9), begin)
    reported = await process.collect()

    assert (1, "") == (reported.purged_checkpoints, reported.postponed)
    assert [] == await process.objects(first)
    assert next(steps) > 11
    await process.check()


async def test_what_is_due_ends_in_a_run_that_never_holds_still() -> None:
    process, bucket, other = await hooked()
    first = await process.save(1)
    await process.save(9)
    await process.delete(1)

    async def take_over() -> None:
        await other.begin(5)
        bucket.before("read", PLACES.checkpoint(9), take_over)

    bucket.before("read", PLACES.checkpoint(9), take_over)
    reported = await process.collect()

    assert 1 == reported.purged_checkpoints
    assert "taken over" in reported.postponed
    assert await process.objects(first)


async def test_a_sign_of_life_at_the_last_moment_counts() -> None:
    process = await started()
    upload = await process.begin(1)
    await process.collect()
    process.clock.turn(DEFAULT_LEASE)
    expiry = process.store.collector._expiry._leases
    state = await process.store.collector._reader.read_once(RUN)
    (expired,) = await expiry.uploads(RUN, state)

    await process.store.uploads.renew(await process._open(upload))

    assert not await expiry.abort(RUN, expired)
    await process.send(upload, {0: 0})


async def test_a_save_whose_slot_is_collected_while_it_begins_starts_again() -> None:
    process, bucket, other = await hooked()
    aborted = await other.begin(2)

    async def collect() -> None:  # between the record of the save, and its slot
        await other.store.uploads.abort(aborted)
        await other.collect()

    bucket.before("write", PLACES.checkpoint(2), collect)
    with pytest.raises(UploadNotFoundError):
        await process.begin(2)
    await process.save(2)
    await other.collect()
    await other.check()


async def test_what_another_collector_deletes_meanwhile_is_no_damage() -> None:
    process, bucket, other = await hooked()
    ended = await other.save(1)
    await other.save(2)
    await other.delete(1)
    await other.store.lifecycle.purge(RUN, 1, etag="")
    (table,) = [
        place
        for place in await other.bucket.list(PLACES.root)
        if place.startswith(f"{PLACES.root}files/{ended.upload}")
    ]

    async def collect() -> None:
        assert (await other.collect()).deleted_objects

    bucket.before("read", table, collect)
    reported = await process.collect(grace=timedelta(hours=1))
    assert "missing" not in reported.postponed
    assert await other.bucket.read(table) is None
    await other.check()
