"""Scale: calls of the bucket do not grow with the store, nor memory with past reads."""

import asyncio
import gc
import tracemalloc
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any, TypeAlias

import numpy as np
import pytest
from google.protobuf.message import Message

import storesvc_client as store
from storesvc.concurrency import ByteCache
from storesvc.format import layout, trees
from storesvc.format.layout import RunPaths
from storesvc.format.names import LATEST, CheckpointName, RunName, UploadName
from storesvc.format.seal import seal
from storesvc.format.trees import Leaf, Tree, pack_leaves, unpack_leaves
from storesvc.format.wire import Frame
from storesvc.save.uploads import NewUpload
from storesvc.store import Store
from storesvc_client._chunks.memory import collector_paused
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2
from tests.support.contract import frame, received, sums, tree_of
from tests.support.faulty_bucket import Call, Fault, FaultyBucket
from tests.support.server_process import ServerProcess

STEPS, RUNS = 10_000, 1_000
PAGE = 100 + 1
"""Rows that a call requests of the catalog, one more to detect a further page."""
LARGE, SMALL = RunName("scale", "large"), RunName("scale", "small")
MANY = [RunName("many", f"run-{number:04d}") for number in range(RUNS)]
UPLOAD = "0123456789abcdef" * 2

Task: TypeAlias = Callable[[Store], Awaitable[Any]]


Row = tuple[str, bytes]
"""A place, and its sealed record."""


def slot(
    run: RunName,
    step: int,
    state: "pb.CheckpointRecord.State.ValueType" = pb.CheckpointRecord.STATE_COMMITTED,
) -> Row:
    record = pb.CheckpointRecord(state=state, step=step, upload=UPLOAD, epoch=1)
    return row(RunPaths(run).checkpoint(step), record)


def row(place: str, record: Message) -> Row:
    return place, seal(record, place=place)


def objects(large: range) -> Iterator[Row]:
    """Yields the objects of a run of many checkpoints and many runs of one."""
    for name in [LARGE, SMALL, *MANY]:
        yield row(layout.run_record(name), pb.RunRecord(uid=UPLOAD))
        steps = {LARGE: large, SMALL: range(3)}.get(name, range(7, 8))
        for step in steps:
            yield slot(name, step)


def traces() -> Iterator[Row]:
    """Yields other records that a long-lived run accumulates."""
    tag = pb.TagRecord(step=5000, upload=UPLOAD)
    yield row(RunPaths(LARGE).tag("best"), tag)
    for number in range(1, STEPS + 1):
        place = layout.announcement("scale", number)
        yield row(place, pb.Announcement(step=number))
    for number in range(STEPS):
        ended = pb.UploadRecord(step=number, epoch=1, writer_count=1)
        yield row(RunPaths(LARGE).upload(f"{number:032x}"), ended)


@pytest.fixture(scope="module")
def bucket() -> FaultyBucket:
    """A bucket with these objects."""

    async def filled() -> FaultyBucket:
        made = await FaultyBucket.faulty("memory://")
        for place, data in [*objects(range(STEPS)), *traces()]:
            await made.write(place, data)
        return made

    return asyncio.run(filled())


def calls_of(bucket: FaultyBucket, task: Task) -> dict[str, int]:
    """Returns how often a task calls each method of the bucket."""
    calls: Counter[str] = Counter()

    def counted(call: Call) -> Fault:
        calls[call.operation] += 1
        return Fault.NONE

    async def main() -> None:
        opened = await Store.open(bucket.reopened(counted))
        calls.clear()
        await task(opened)

    asyncio.run(main())
    return dict(calls)


def checkpoint(which: Any) -> Task:
    return lambda s: s.catalog.checkpoint(CheckpointName(LARGE, which))


def checkpoints(before: int | None) -> Task:
    return lambda s: s.catalog.checkpoints(LARGE, before=before, limit=PAGE)


def runs(after: RunName | None) -> Task:
    return lambda s: s.catalog.runs(None, after=after, limit=PAGE)


def live_uploads(of: Sequence[RunName]) -> Task:
    return lambda s: s.upload_statuses.list_live(of, after=None, limit=PAGE)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        pytest.param(
            lambda s: s.catalog.run(LARGE), {"list": 1, "read": 2}, id="a run"
        ),
        pytest.param(checkpoint(LATEST), {"list": 1, "read": 1}, id="latest"),
        pytest.param(checkpoint(9_000), {"read": 1}, id="a step"),
        pytest.param(checkpoint("best"), {"read": 2}, id="a tag"),
        pytest.param(checkpoints(None), {"list": 1, "read": PAGE}, id="first page"),
        pytest.param(checkpoints(5_000), {"list": 1, "read": PAGE}, id="middle page"),
        pytest.param(checkpoints(60), {"list": 1, "read": 60}, id="last page"),
        pytest.param(
            runs(None), {"list": 1 + PAGE, "read": 2 * PAGE}, id="first page of runs"
        ),
        pytest.param(
            runs(MANY[899]),
            {"list": 1 + PAGE, "read": 2 * PAGE},
            id="last page of runs",
        ),
        pytest.param(live_uploads([LARGE]), {"list": 1}, id="live uploads"),
        pytest.param(
            live_uploads(MANY), {"list": len(MANY)}, id="live uploads of many runs"
        ),
        pytest.param(
            lambda s: s.journal.following("scale", STEPS, limit=1000),
            {"read": 2},
            id="a poll of a watch",
        ),
    ],
)
def test_a_call_makes_as_many_calls_of_the_bucket_as_its_page_has_rows(
    bucket: FaultyBucket, task: Task, expected: dict[str, int]
) -> None:
    assert expected == calls_of(bucket, task)


def save(run: RunName, step: int) -> Task:
    """Saves one more checkpoint."""

    async def task(opened: Store) -> None:
        table = b"".join(pack_leaves(tree_of()))
        name = UploadName(run, uuid.uuid4().hex)
        new = NewUpload(
            step=step,
            writer_count=1,
            labels={},
            metrics={},
            lease=timedelta(minutes=1),
            base=CheckpointName(run, LATEST) if step > STEPS else None,
            body=b"",
        )
        record, _ = await opened.uploads.begin(name, new, table)
        upload = await opened.uploads.open(name, record.epoch)

        async def frames() -> AsyncIterator[Frame]:
            yield received(frame(0, 1, 2))

        async for _ in opened.receiver.write(upload, 0, frames()):
            pass
        staged = opened.receipts.staged(name, 0, chunk_count=3)
        await opened.receipts.finish(upload, 0, sums(0, 1, 2), staged)
        await opened.commits.commit(name, record.epoch)

    return task


def test_one_more_save_costs_the_same_in_a_large_run(bucket: FaultyBucket) -> None:
    for run in (SMALL, LARGE):  # the base of the one that is counted
        calls_of(bucket, save(run, STEPS))

    small, large = (calls_of(bucket, save(run, 2 * STEPS)) for run in (SMALL, LARGE))

    assert small == large


def test_the_latest_step_skips_uncommitted_slots_with_few_calls(
    bucket: FaultyBucket,
) -> None:
    name = RunName("scale", "deleted")

    async def fill() -> None:
        await bucket.write(*row(layout.run_record(name), pb.RunRecord(uid=UPLOAD)))
        await bucket.write(*slot(name, 0))
        for step in range(1, 101):
            await bucket.write(*slot(name, step, pb.CheckpointRecord.STATE_DELETED))

    asyncio.run(fill())
    latest = CheckpointName(name, LATEST)

    # twice, to ensure that none of them became the newest in between
    assert {"list": 2, "read": 201} == calls_of(
        bucket, lambda s: s.catalog.checkpoint(latest)
    )


@pytest.mark.slow
def test_many_checkpoints_and_runs_are_listed_in_order(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    # each a read of the server: fewer than in memory, and as long in digits
    steps = range(0, STEPS, 5)
    created = row(layout.STORE, pb.StoreRecord(uid=str(uuid.uuid4())))
    for place, data in [created, *objects(steps)]:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(data)
    with store.connect(start_server(root=root).address) as client:
        run = client.run(str(LARGE))

        assert list(steps)[::-1] == [c.step for c in run.checkpoints()]
        assert list(map(str, MANY)) == [r.name for r in client.runs("many")]
        assert steps[-1] == run.latest().step


@pytest.mark.slow
def test_a_tree_of_many_leaves_round_trips(run: store.Run) -> None:
    # More than 4 MiB as one message: the leaf table, the receipt and the manifest.
    long = "a layer of a long name, as models with many modules have them, " * 3
    tree = {f"{long}{i:05d}": np.full(2, i, np.int32) for i in range(20_000)}
    run.save(0, tree).result()
    changed = tree | {f"{long}{7:05d}": np.zeros(2, np.int32)}
    report = run.save(1, changed).report()

    leaves = run.open(1).leaves
    restored = run.restore(1)

    assert 2 * 4 + 4 == report.sent_bytes
    assert sorted(tree) == list(leaves)
    assert all(np.array_equal(changed[key], restored[key]) for key in tree)


class Loads:
    """Counts loads of texts, each of which waits for ``go``."""

    def __init__(self) -> None:
        self.cache: ByteCache[str, str] = ByteCache(10, size_of=len)
        self.count = 0
        self.go = asyncio.Event()

    async def get(self, text: str) -> str:
        """Gets a text by itself."""
        return await self.cache.get(text, lambda: self._load(text))

    async def _load(self, text: str) -> str:
        self.count += 1
        await self.go.wait()
        if not text:
            raise LookupError("nothing")
        return text


@pytest.fixture
def loads() -> Loads:
    return Loads()


async def test_concurrent_requests_share_one_load(loads: Loads) -> None:
    waiting = [asyncio.create_task(loads.get("text")) for _ in range(9)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the caller that started the load
    await asyncio.sleep(0)
    loads.go.set()

    assert ["text"] * 8 == await asyncio.gather(*waiting[1:])
    assert "text" == await loads.get("text")
    assert 1 == loads.count


async def test_the_cache_stays_within_its_bound(loads: Loads) -> None:
    loads.go.set()
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        await loads.get(text)

        assert loads.cache.size_bytes <= 10

    assert ["aaaa", "cccc"] == [t for t in ("aaaa", "bbbb", "cccc") if t in loads.cache]
    assert 3 == loads.count
    await loads.get("bbbb")
    assert 4 == loads.count


async def test_a_value_larger_than_the_bound_is_returned_and_not_cached(
    loads: Loads,
) -> None:
    loads.go.set()
    await loads.get("aaaa")

    assert "b" * 11 == await loads.get("b" * 11)
    assert "b" * 11 not in loads.cache
    assert "aaaa" in loads.cache


async def test_a_failed_load_raises_for_all_waiters_and_is_not_cached(
    loads: Loads,
) -> None:
    waiting = [asyncio.create_task(loads.get("")) for _ in range(3)]
    await asyncio.sleep(0)
    loads.go.set()

    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert [LookupError] * 3 == [type(error) for error in failed]
    with pytest.raises(LookupError):
        await loads.get("")
    assert 2 == loads.count


async def test_concurrent_requests_read_a_manifest_once() -> None:
    calls: list[Call] = []

    def recorded(call: Call) -> Fault:
        calls.append(call)
        return Fault.NONE

    made = await FaultyBucket.faulty("memory://")
    opened = await Store.open(made)
    await save(LARGE, 1)(opened)
    record = await opened.catalog.checkpoint(CheckpointName(LARGE, 1))
    made.calls.follow(recorded)
    manifests = [opened.catalog.manifest(LARGE, record) for _ in range(8)]

    assert 1 == len(set(map(id, await asyncio.gather(*manifests))))
    await opened.catalog.manifest(LARGE, record)

    assert ["read"] == [call.operation for call in calls]


@pytest.mark.parametrize("rank", [0, 1, 8])
def test_the_memory_estimate_of_a_tree_is_an_upper_bound(rank: int) -> None:
    form = Leaf(
        key="",
        path_kinds="kkk",
        kind=tree_pb2.LEAF_KIND_HOST_ARRAY,
        dtype="uint8",
        shape=(),
        chunk_shape=(),
    )
    shapes = [(0, *(260 + i % 40,) * rank)[:rank] for i in range(2_000)]
    rows = [
        replace(form, key=f"é/{i:05d}/kernel", shape=shape, chunk_shape=(1,) * rank)
        for i, shape in enumerate(shapes)
    ]
    table = tree_pb2.LeafTable.FromString(b"".join(pack_leaves(Tree(tuple(rows)))))
    unpack_leaves(table)  # fills the caches that all trees share
    trees._grid.cache_clear()

    tracemalloc.start()
    tree = unpack_leaves(table)
    assert tree.by_key
    assert tree.lengths.all().size == tree.chunk_count
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken <= tree.memory_bytes <= 2 * taken


def test_a_pause_restores_the_state_of_python_gc() -> None:
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()

    with pytest.raises(LookupError), collector_paused():
        raise LookupError
    assert gc.isenabled()

    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_overlapping_pauses_last_until_the_last_one_ends() -> None:
    begun, go = Barrier(2), Event()

    def work() -> None:
        with collector_paused():
            begun.wait()
            go.wait()

    thread = Thread(target=work)
    thread.start()
    with collector_paused():
        begun.wait()
    assert not gc.isenabled()
    go.set()
    thread.join()
    assert gc.isenabled()
