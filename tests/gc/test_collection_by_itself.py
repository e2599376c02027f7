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
from storesvc.gc.collector import DEFAULT_GRACE, RETRY_PERIOD
from storesvc.gc.due_runs import REST, DueRuns
from storesvc.server.gc_scheduler import Lease, _collect_all, collecting
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import PLACES, RUN, Process, started
from tests.support.faulty_bucket import Call, Fault, no_faults, unavailable_at


async def _pass_over(process: Process, due_runs: DueRuns | None = None) -> None:
    due_runs = due_runs or DueRuns(process.store.journal, clock=process.clock)
    lease = Lease(process.store, length=timedelta(hours=1))
    await _collect_all(process.store, lease, due_runs)


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

    await _pass_over(process)

    assert [False, False, True, False, True] == await _purged(process, *runs)


async def test_a_pass_is_given_up_where_the_storage_does_not_answer_at_all() -> None:
    process = await started()
    runs = [RunName(name, "run") for name in "abcdefghijkl"]
    await _deleted_in(process, *runs)
    asked = set()

    def fail(call: Call) -> Fault:
        if not call.path.startswith("data/"):
            return Fault.NONE
        asked.add(call.path.split("/")[1])
        return Fault.UNAVAILABLE

    process.bucket.calls.follow(fail)
    await _pass_over(process)

    assert {"a", "b", "c"} <= asked
    assert len(asked) < 12  # some at a time


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


async def _paths_of_a_pass(process: Process, due_runs: DueRuns) -> list[str]:
    """Makes a pass, and returns the paths of its requests for runs."""
    asked: list[str] = []

    def note(call: Call) -> Fault:
        if call.path.startswith(("data/", "runs/tests/", "journal/")):
            asked.append(call.path)
        return Fault.NONE

    process.bucket.calls.follow(note)
    await _pass_over(process, due_runs)
    process.bucket.calls.follow(no_faults)
    return asked


async def _at_rest() -> tuple[Process, DueRuns]:
    process = await started()
    await process.save(1)
    await process.save(2)
    process.clock.turn(2 * RETRY_PERIOD)
    due_runs = DueRuns(process.store.journal, clock=process.clock)
    while await _looked_at(process, due_runs):
        process.clock.turn(timedelta(minutes=10))
    return process, due_runs


async def test_a_run_that_did_not_change_takes_no_request() -> None:
    process, due_runs = await _at_rest()

    asked = await _paths_of_a_pass(process, due_runs)

    assert [] == [path for path in asked if not path.startswith("journal/")]
    assert len(asked) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["save", "create", "delete", "tag", "rest", "note", "trim"]
)
async def test_a_run_is_looked_at_after_a_change(change: str) -> None:
    process, due_runs = await _at_rest()
    other = await process.beside()
    match change:
        case "save":
            await other.save(3)
        case "create":
            await other.create(3)
        case "delete":
            await other.delete(1, purge_delay=timedelta(days=1))
        case "tag":
            await other.tag(1)
        case "rest":
            process.clock.turn(REST)
        case "note":
            due_runs.note(RUN)
        case "trim":
            await other.tag(1)
            process.clock.turn(timedelta(days=30))
            await other.tag(2)
            await other.store.journal.trim(RUN.namespace, keep=1)

    asked = await _paths_of_a_pass(process, due_runs)

    assert any(path.startswith("data/") for path in asked)


@pytest.mark.slow
async def test_a_deleted_checkpoint_is_purged_when_its_time_has_come() -> None:
    process, due_runs = await _at_rest()
    manifests = f"{PLACES.root}manifests/"
    assert 2 == len(await process.bucket.list(manifests))
    await (await process.beside()).delete(1, purge_delay=timedelta(hours=1))
    for _ in range(3):
        await _pass_over(process, due_runs)
    assert [] == await _looked_at(process, due_runs)

    process.clock.turn(timedelta(hours=1))
    await _pass_over(process, due_runs)
    for _ in range(5):  # until all is deleted, each pass looks
        process.clock.turn(DEFAULT_GRACE)
        await _pass_over(process, due_runs)

    assert 1 == len(await process.bucket.list(manifests))
    assert [] == await _looked_at(process, due_runs)


async def _looked_at(process: Process, due_runs: DueRuns) -> list[str]:
    asked = await _paths_of_a_pass(process, due_runs)
    return [path for path in asked if path.startswith("data/")]


@pytest.mark.slow
async def test_an_upload_that_is_not_finished_is_looked_at_by_each_pass() -> None:
    process, due_runs = await _at_rest()
    await process.begin(9)
    due_runs.note(RUN)
    for _ in range(3):
        assert await _looked_at(process, due_runs)
