"""The newest checkpoints of a long run: found by few requests, and never others."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from storesvc.catalog import catalog, numbered
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.numbered import NumberedObjects, list_ids
from storesvc.errors import CheckpointNotFoundError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, MAX_STEP, CheckpointName, RunName
from storesvc.format.seal import seal
from storesvc.storage.bucket import Generation
from storesvc.storage.kvstore import OpenedStorage
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.examples import examples
from tests.support.paged_bucket import PagedBucket

RUN = RunName("long", "run")
PLACES = RunPaths(RUN)
UPLOAD = "0123456789abcdef" * 2
COMMITTED = pb.CheckpointRecord.STATE_COMMITTED
DELETED = pb.CheckpointRecord.STATE_DELETED
UPLOADING = pb.CheckpointRecord.STATE_UPLOADING
FREE = pb.CheckpointRecord.STATE_FREE
State: TypeAlias = "pb.CheckpointRecord.State.ValueType"
STRIDE = 250


def make_slot(step: int, state: State = COMMITTED) -> pb.CheckpointRecord:
    return pb.CheckpointRecord(state=state, step=step, upload=UPLOAD, epoch=1)


async def put(
    bucket: PagedBucket, steps: Iterable[int], state: State = COMMITTED
) -> None:
    for step in steps:
        record = make_slot(step, state)
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

    for _ in range(70):  # as a service that runs for a month is asked
        with pytest.raises(CheckpointNotFoundError):
            await newest(reader)


async def test_a_foreign_object_with_a_number_that_no_step_has_is_ignored() -> None:
    bucket = await long_run(30)
    await bucket.write(f"{PLACES.checkpoints}{MAX_STEP + 1:020d}.binpb", b"")

    assert 29 * STRIDE == await newest(Catalog(bucket))


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


@given(st.sets(st.integers(0, 400) | st.integers(0, MAX_STEP)), st.integers(-1, 400))
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


async def commit(bucket: PagedBucket, process: Catalog, step: int) -> None:
    """Commits a step as a process that then writes the hint, as after each commit."""
    record = make_slot(step)
    place = PLACES.checkpoint(step)
    process.note_commit(
        RUN, record, await bucket.write(place, seal(record, place=place))
    )
    await process.write_hint(RUN)


@pytest.mark.parametrize(
    "count", [3, 2500, pytest.param(10_000, marks=pytest.mark.slow)]
)
async def test_a_new_process_finds_the_latest_step_by_two_requests(count: int) -> None:
    bucket = await long_run(count)
    await commit(bucket, Catalog(bucket), count * STRIDE)
    bucket.clear()

    found = await Catalog(bucket).checkpoint(CheckpointName(RUN, LATEST))

    assert make_slot(count * STRIDE) == found
    assert (1, 1, 1) == (bucket.reads, bucket.lists, bucket.names)


async def test_a_process_reads_no_record_that_it_has_seen() -> None:
    bucket = await long_run(40)
    reader = Catalog(bucket)
    await newest(reader)
    bucket.clear()

    first = await reader.checkpoint(CheckpointName(RUN, LATEST))
    first.labels["changed"] = "by a caller"

    assert (0, 1) == (bucket.reads, bucket.lists)
    assert not (await reader.checkpoint(CheckpointName(RUN, LATEST))).labels


@pytest.mark.parametrize("later", [1, 64, 3000])
async def test_a_stale_hint_costs_one_read_more(later: int) -> None:
    bucket = await long_run(1500)
    await commit(bucket, Catalog(bucket), 1500 * STRIDE)
    await put(bucket, (n * STRIDE for n in range(1501, 1501 + later)))
    bucket.clear()

    assert (1500 + later) * STRIDE == await newest(Catalog(bucket))
    assert 2 == bucket.reads
    assert bucket.lists == 1 or later > 1000


async def test_a_changed_checkpoint_is_read_again() -> None:
    bucket = await long_run(1500)
    await commit(bucket, Catalog(bucket), 1500 * STRIDE)
    await put(bucket, [1500 * STRIDE], DELETED)
    assert 1499 * STRIDE == await newest(Catalog(bucket))

    changed = make_slot(1500 * STRIDE)
    changed.labels["a"] = "b"
    place = PLACES.checkpoint(1500 * STRIDE)
    await bucket.write(place, seal(changed, place=place))
    found = await Catalog(bucket).checkpoint(CheckpointName(RUN, LATEST))
    assert changed == found


async def test_a_hint_of_a_step_that_is_gone_hides_nothing() -> None:
    bucket = await long_run(1500)
    await commit(bucket, Catalog(bucket), 9000 * STRIDE)
    await bucket.delete(PLACES.checkpoint(9000 * STRIDE))
    bucket.clear()

    assert 1499 * STRIDE == await newest(Catalog(bucket))
    assert bucket.lists <= 9


@pytest.mark.parametrize("data", [b"", b"damaged", b"\0" * 99])
async def test_a_damaged_hint_is_as_none(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = await long_run(1500)
    process = Catalog(bucket)
    await commit(bucket, process, 1500 * STRIDE)
    await bucket.write(PLACES.recent, data)

    assert 1500 * STRIDE == await newest(Catalog(bucket))
    assert PLACES.recent in caplog.text
    await commit(bucket, process, 1501 * STRIDE)
    caplog.clear()
    assert 1501 * STRIDE == await newest(Catalog(bucket))
    assert not caplog.text


async def test_an_earlier_step_does_not_replace_the_hint() -> None:
    bucket = await long_run(1500)
    process = Catalog(bucket)
    await commit(bucket, process, 1600 * STRIDE)
    await commit(bucket, process, 1550 * STRIDE)
    bucket.clear()

    assert 1600 * STRIDE == await newest(Catalog(bucket))
    assert (1, 1) == (bucket.reads, bucket.lists)


async def test_a_new_process_lists_3000_steps_by_four_lists() -> None:
    bucket = await long_run(2998)
    writer = Catalog(bucket)
    await newest(writer)
    await commit(bucket, writer, 2998 * STRIDE)
    bucket.clear()

    assert [*range(2998 * STRIDE, -1, -STRIDE)] == await list_all(
        Catalog(bucket), [100, 990, 990, 990]
    )
    assert bucket.lists <= 4
    assert bucket.reads <= 3000 + 10


async def test_no_hint_is_written_where_one_list_has_all_names() -> None:
    bucket = await TensorStoreBucket.open("memory://")
    process = Catalog(bucket)
    process.note_commit(RUN, make_slot(1), Generation(b"any"))

    await process.write_hint(RUN)

    assert [] == await bucket.list("")


writers = st.sampled_from([0, 1])
steps = st.integers(0, 40) | st.integers(0, 2**63 - 1)
states = st.sampled_from([COMMITTED, DELETED, UPLOADING, FREE])


class HintedRun(RuleBasedStateMachine):
    """Two processes commit; people and collections change slots; hints come late."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = asyncio.run(long_run(0))
        self.writers = [Catalog(self.bucket) for _ in range(2)]
        self.slots: dict[int, pb.CheckpointRecord] = {}
        self.count = 0

    @rule(writer=writers, step=steps)
    def save(self, writer: int, step: int) -> None:
        """A process commits a step that is absent or free."""
        if step not in self.slots or self.slots[step].state == FREE:
            written = self._write(step, COMMITTED)
            self.writers[writer].note_commit(RUN, self.slots[step], written)

    @rule(step=steps, state=states)
    def change(self, step: int, state: State) -> None:
        """A slot is reserved, changed, deleted or freed."""
        if state == UPLOADING or step in self.slots:
            self._write(step, state)

    @rule(step=steps)
    def remove(self, step: int) -> None:
        """A collection deletes a slot, or an old copy of the bucket has none."""
        self.slots.pop(step, None)
        asyncio.run(self.bucket.delete(PLACES.checkpoint(step)))

    @rule(writer=writers)
    def write_hint(self, writer: int) -> None:
        """A process writes what it knows, however long ago that was."""
        asyncio.run(self.writers[writer].write_hint(RUN))

    @rule(writer=writers)
    def restart(self, writer: int) -> None:
        """A process ends, perhaps before it has written the hint."""
        self.writers[writer] = Catalog(self.bucket)

    @rule(writer=writers)
    def look(self, writer: int) -> None:
        """A process that knows the run reads the newest checkpoint."""
        self._check(self.writers[writer], 1)

    @rule(size=st.integers(1, 9))
    def look_anew(self, size: int) -> None:
        """A new process reads the newest checkpoints."""
        self._check(Catalog(self.bucket), size)

    def _write(self, step: int, state: State) -> Generation:
        self.count += 1
        record = self.slots[step] = make_slot(step, state)
        record.labels["write"] = str(self.count)
        place = PLACES.checkpoint(step)
        return asyncio.run(self.bucket.write(place, seal(record, place=place)))

    def _check(self, reader: Catalog, size: int) -> None:
        newest = sorted(self.slots, reverse=True)
        expected = [self.slots[s] for s in newest if self.slots[s].state == COMMITTED]
        read = reader.checkpoints(RUN, before=None, limit=size)
        assert expected[:size] == asyncio.run(read)


TestHintedRun = HintedRun.TestCase
TestHintedRun.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, print_blob=True
)


ids = st.from_regex(r"[ab]((?:[ab_-]|\.(?=[ab])){0,4}[ab])?", fullmatch=True)


@given(st.sets(ids, max_size=30), st.sets(ids), ids | st.just(""), st.integers(1, 9))
def test_pages_of_ids_are_in_order_and_complete(
    there: set[str], foreign: set[str], after: str, size: int
) -> None:
    async def main() -> None:
        bucket = await PagedBucket.open("memory://")
        for run in there:
            await bucket.write(layout.run_record(RunName("n", run)), b"")
        for name in foreign:
            await bucket.write(f"{layout.RUNS}n/{name}", b"")
        pages = list_ids(
            bucket, f"{layout.RUNS}n/", layout.parse_run_record, after=after
        )

        found = [page async for page in pages]

        expected = sorted(run for run in there if run > after)
        assert [RunName("n", run) for run in expected] == [*chain(*found)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered, "PAGE", size)
        asyncio.run(main())


class PrefixBucket(PagedBucket):
    """Counts the lists by prefix."""

    def __init__(self, opened: OpenedStorage) -> None:
        super().__init__(opened)
        self.listed = Counter[str]()

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        self.listed[prefix] += 1
        return await super().list(prefix, after=after, limit=limit)


async def test_a_page_of_runs_or_tags_does_not_list_those_before() -> None:
    bucket = await PrefixBucket.open("memory://")
    names = [RunName("n", f"run-{number:04d}") for number in range(2500)]
    tags, tagged = RunPaths(names[0]), pb.TagRecord(step=1, upload=UPLOAD)
    for name in names:
        run = pb.RunRecord(uid=UPLOAD, labels={"a": "run that was set up"})
        place, tag = layout.run_record(name), tags.tag(name.run)
        await bucket.write(place, seal(run, place=place))
        await bucket.write(tag, seal(tagged, place=tag))
    opened = await Store.open(bucket)
    for last in (0, 99, 2000, 2450):
        bucket.listed.clear()
        page = names[last + 1 : last + 101]

        runs = await opened.catalog.runs("n", after=names[last], limit=100)
        found = await opened.tags.list(names[0], after=names[last].run, limit=100)

        assert page == [name for name, _ in runs]
        assert page == [RunName("n", tag.tag) for tag, _ in found]
        assert (1, 1) == (bucket.listed[f"{layout.RUNS}n/"], bucket.listed[tags.tags])
