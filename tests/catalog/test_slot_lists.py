"""The newest checkpoints of a long run: found by few requests, and never others."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.catalog import catalog, numbered
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.numbered import NumberedObjects
from storesvc.errors import CheckpointNotFoundError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, RunName
from storesvc.format.seal import seal
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.paged_bucket import PagedBucket

RUN = RunName("long", "run")
PLACES = RunPaths(RUN)
UPLOAD = "0123456789abcdef" * 2
COMMITTED = pb.CheckpointRecord.STATE_COMMITTED
DELETED = pb.CheckpointRecord.STATE_DELETED
STRIDE = 250


async def put(
    bucket: PagedBucket,
    steps: Iterable[int],
    state: "pb.CheckpointRecord.State.ValueType" = COMMITTED,
) -> None:
    for step in steps:
        record = pb.CheckpointRecord(state=state, step=step, upload=UPLOAD, epoch=1)
        place = PLACES.checkpoint(step)
        await bucket.write(place, seal(record, place=place))


async def long_run(count: int) -> PagedBucket:
    """Returns a bucket with a run of some checkpoints."""
    bucket = await PagedBucket.open("memory://")
    place = layout.run_record(RUN)
    record = pb.RunRecord(uid=UPLOAD, labels={"a": "run that was set up"})
    await bucket.write(place, seal(record, place=place))
    await put(bucket, range(0, count * STRIDE, STRIDE))
    return bucket


async def newest(reader: Catalog) -> int:
    return (await reader.checkpoint(CheckpointName(RUN, LATEST))).step


async def list_all(reader: Catalog, sizes: Iterable[int]) -> list[int]:
    """Lists all checkpoints, as the pages of a client."""
    steps, before = list[int](), None
    for size in sizes:
        page = await reader.checkpoints(RUN, before=before, limit=size + 1)
        steps += [record.step for record in page[:size]]
        before = steps[-1]
        if len(page) <= size:
            break
    return steps


async def test_the_latest_step_is_found_by_one_list_of_a_few_names() -> None:
    bucket = await long_run(2500)
    reader = Catalog(bucket)
    assert 2499 * STRIDE == await newest(reader)
    bucket.clear()

    assert 2499 * STRIDE == await newest(reader)
    assert (1, 1) == (bucket.lists, bucket.names)


@pytest.mark.parametrize("more", [1, 40, 3000])
async def test_a_step_of_another_server_is_found_however_many_came_in_between(
    more: int,
) -> None:
    bucket = await long_run(1500)
    reader = Catalog(bucket)
    await newest(reader)
    last = (1500 + more) * STRIDE
    await put(bucket, range(1500 * STRIDE, last + 1, STRIDE))
    bucket.clear()

    assert last == await newest(reader)
    assert bucket.lists <= (1 if more < 1000 else 8)


@pytest.mark.parametrize("is_deleted", [True, False])
@pytest.mark.parametrize("gone", [1, 100])
async def test_the_checkpoint_before_those_that_are_gone_is_the_newest(
    gone: int, is_deleted: bool
) -> None:
    bucket = await long_run(2500)
    reader = Catalog(bucket)
    await newest(reader)
    lost = range((2500 - gone) * STRIDE, 2500 * STRIDE, STRIDE)
    if is_deleted:
        await put(bucket, lost, DELETED)
    else:  # as a person may, or a bucket that was restored
        for step in lost:
            await bucket.delete(PLACES.checkpoint(step))
    bucket.clear()

    assert (2499 - gone) * STRIDE == await newest(reader)
    assert bucket.lists <= 6
    assert (2499 - gone) * STRIDE == await newest(reader)


async def test_a_run_without_any_checkpoint_left_has_no_latest() -> None:
    bucket = await long_run(30)
    reader = Catalog(bucket)
    await newest(reader)
    await bucket.delete_below(PLACES.checkpoints)

    with pytest.raises(CheckpointNotFoundError):
        await newest(reader)


@pytest.mark.slow
async def test_a_new_process_finds_the_latest_step_without_a_list_of_all() -> None:
    bucket = await long_run(12_000)
    bucket.clear()

    assert 11_999 * STRIDE == await newest(Catalog(bucket))
    assert bucket.lists <= 10


@pytest.mark.parametrize("is_known", [True, False])
async def test_pages_continue_where_the_last_one_ended(is_known: bool) -> None:
    bucket = await long_run(3000)
    reader = Catalog(bucket)
    if is_known:
        await newest(reader)
    bucket.clear()

    assert [*range(2999 * STRIDE, -1, -STRIDE)] == await list_all(
        reader, [100, 990, 990, 990]
    )
    assert bucket.lists <= (4 if is_known else 8)


async def test_the_first_page_does_not_list_the_rest() -> None:
    bucket = await long_run(3000)
    reader = Catalog(bucket)
    await newest(reader)
    bucket.clear()

    page = await reader.checkpoints(RUN, before=None, limit=10)

    assert [*range(2999 * STRIDE, 2989 * STRIDE, -STRIDE)] == [c.step for c in page]
    assert 1 == bucket.lists
    assert bucket.names <= 20


steps_of_runs = st.lists(
    st.one_of(st.integers(0, 60), st.integers(0, 10**6), st.integers(0, 2**63 - 1)),
    max_size=40,
)


@given(steps_of_runs, steps_of_runs, steps_of_runs, st.integers(1, 9))
def test_lists_are_those_of_all_slots_whatever_was_seen_before(
    before: list[int], after: list[int], hidden: list[int], size: int
) -> None:
    async def main() -> None:
        bucket = await long_run(0)
        await put(bucket, before)
        await put(bucket, hidden[::2], DELETED)
        await bucket.write(f"{PLACES.checkpoints}foreign", b"")
        reader = Catalog(bucket)
        await reader.checkpoint_rows(RUN, before=None, limit=size)
        for step in before[::2]:
            await bucket.delete(PLACES.checkpoint(step))
        await put(bucket, after)
        await put(bucket, hidden[1::2], DELETED)
        expected = {*before} - {*hidden[::2]} - {*before[::2]}
        expected = (expected | {*after}) - {*hidden[1::2]}
        for one in (reader, Catalog(bucket)):
            if expected:
                assert max(expected) == await newest(one)
                assert sorted(expected)[::-1] == await list_all(one, [size] * 99)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered, "PAGE", 4)
        patch.setattr(catalog, "PAGE", 4)
        asyncio.run(main())


@given(st.sets(st.integers(0, 400) | st.integers(0, 10**20 - 1)), st.integers(-1, 400))
def test_the_end_of_a_list_is_complete(numbers: set[int], after: int) -> None:
    async def main() -> None:
        bucket = await PagedBucket.open("memory://")
        for number in numbers:
            await bucket.write(layout.announcement("n", number), b"")
        objects = NumberedObjects(
            bucket, layout.journal("n"), lambda number: layout.announcement("n", number)
        )

        end = await objects.list_end(after=after)

        wanted = sorted(n for n in numbers if n > after)
        assert bool(wanted) == bool(end.numbers)
        assert [n for n in wanted if n >= end.first] == end.numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered, "PAGE", 4)
        asyncio.run(main())
