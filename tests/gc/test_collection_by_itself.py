"""A server collects by itself: one of several, and on past what fails."""

import asyncio
from datetime import timedelta

import pytest

from storesvc.catalog import slots
from storesvc.catalog.records import read_record
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal
from storesvc.gc.collector import DEFAULT_GRACE
from storesvc.server.gc_scheduler import Lease, _collect_all, collecting
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import RUN, Process, started
from tests.support.faulty_bucket import Call, Fault, no_faults, unavailable_at


async def _deleted_in(process: Process, *runs: RunName) -> None:
    """Each has a deleted checkpoint that is due."""
    for run in runs:
        await process.store.runs.create(run)
        due = pb.CheckpointRecord(state=slots.DELETED, step=1, upload="1" * 32, epoch=1)
        due.purge_time.FromSeconds(1)
        place = RunPaths(run).checkpoint(1)
        await process.bucket.write(place, seal(due, place=place))


async def _purged(process: Process, *runs: RunName) -> list[bool]:
    process.bucket.calls.follow(no_faults)
    found = [await process.store.catalog.slot(run, 1) for run in runs]
    return [slot is None or slot[0].state == slots.FREE for slot in found]


async def test_a_run_that_cannot_be_read_keeps_no_other_from_collection() -> None:
    process = await started()
    runs = [RunName(name, "run") for name in "abcde"]
    await _deleted_in(process, *runs)
    bad = {RunPaths(runs[at]).checkpoint(1) for at in (0, 1, 3)}
    process.bucket.calls.follow(unavailable_at(*bad))

    await _collect_all(process.store, Lease(process.store, length=timedelta(hours=1)))

    assert [False, False, True, False, True] == await _purged(process, *runs)


async def test_a_pass_is_given_up_where_the_storage_does_not_answer_at_all() -> None:
    process = await started()
    runs = [RunName(name, "run") for name in "abcde"]
    await _deleted_in(process, *runs)
    asked = []

    def fail(call: Call) -> Fault:
        if not call.path.startswith("data/"):
            return Fault.NONE
        asked.append(call.path.split("/")[1])
        return Fault.UNAVAILABLE

    process.bucket.calls.follow(fail)
    await _collect_all(process.store, Lease(process.store, length=timedelta(hours=1)))

    assert {"a", "b", "c"} == set(asked)


@pytest.mark.slow
async def test_retention_after_a_commit_goes_on_past_a_run_that_fails() -> None:
    process = await started()
    bad = RunName("tests", "a-bad-one")
    await process.store.runs.create(bad)
    for step in (1, 2):
        await process.save(step)
    place = layout.run_record(RUN)
    found = await read_record(process.bucket, place, pb.RunRecord)
    assert found is not None
    found[0].retention.latest.count = 1
    await process.bucket.write(place, seal(found[0], place=place))
    process.bucket.calls.follow(unavailable_at(layout.run_record(bad)))
    process.store.recent_commits.remove(RUN)

    async with collecting(process.store, timedelta(hours=1)):
        process.store.recent_commits.add(bad)
        process.store.recent_commits.add(RUN)
        async with asyncio.timeout(20):
            while await process.steps() != [2]:  # noqa: ASYNC110 - as watchers do
                await asyncio.sleep(0.02)


async def test_of_several_servers_one_collects_and_another_follows_it() -> None:
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
    assert not await theirs.take()  # it was renewed in the meantime
    process.clock.turn(length)
    assert await theirs.take()
    assert not await ours.take()
    await theirs.release()
    assert await ours.take()


async def test_a_server_collects_by_itself_and_stops_at_once() -> None:
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
