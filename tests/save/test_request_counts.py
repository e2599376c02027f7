"""How many requests a save to a bucket makes, and for how many of them it waits.

The numbers are exact, so that a change that adds a request has to say why.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog import slots
from storesvc.format.chunks import Sums
from storesvc.format.names import LATEST, CheckpointName, HoldName, RunName
from storesvc.save.uploads import OpenUpload
from storesvc.storage import hedging
from storesvc.storage.hedging import Limits
from storesvc.store import Store
from storesvc_proto.v1 import tree_pb2
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs, Logged
from tests.save.uploads_in_process import begin, finish
from tests.support.collecting_process import end_of, started
from tests.support.contract import placed_table, stored, sums
from tests.support.faulty_bucket import Calls, FaultyBucket, no_faults
from tests.support.thread_server import ThreadServer

T = TypeVar("T")

RUN = RunName("tests", "counts")
STEP = 7

OF_A_SAVE = {
    # The slot: when the upload begins, whether the step is free; at the commit, whether
    # the upload still owns it.
    "read slot": 2,
    # An earlier try of this begin may have written it.
    "read upload": 1,
    # Once more after the empty slot, which a collection may have emptied after it had
    # raised the epoch floor in the run.
    "read run": 2,
    # The base: the list shows that its slot is as this server has written it.
    "list slots": 1,
    # Begin: the record before the leaf table and the slot.
    "write upload": 1,
    "write leaf table": 1,
    # The reservation, and the commit.
    "write slot": 2,
    # Chunks. No lease, which the begin has renewed.
    "write data file": 1,
    "write staging table": 1,
    # Commit, in which the only writer finishes: no process needs a receipt.
    "write manifest": 1,
    "write file table": 1,
    # What other readers of the format need.
    "write nodes": 1,
    "write key space": 1,
    # The one before it shows that no number is missing.
    "write announcement": 1,
    "read announcement": 1,
    # What the checkpoint needs no more; `storectl serve` replies before.
    "list staging tables": 1,
    "delete staging table": 1,
    "list parts": 1,
    "delete leaf table": 1,
}
"""Requests of a save to a run that has a checkpoint, in which all chunks are new and
fill one data file."""

OF_A_DIRECT_SAVE = {
    **OF_A_SAVE,
    # The server checks that the object of the client is whole.
    "read data file": 1,
}
# The call that commits has the last chunks, so that no table of them is written.
del OF_A_DIRECT_SAVE["write staging table"], OF_A_DIRECT_SAVE["delete staging table"]

OF_A_SMALL_SAVE = {
    "read slot": 1,
    # An earlier try of this call may have written it.
    "read upload": 1,
    # Once more after the empty slot.
    "read run": 2,
    "write upload": 1,
    # The chunks and the nodes.
    "write data file": 1,
    "write manifest": 1,
    "write file table": 1,
    "write key space": 1,
    "write announcement": 1,
    "read announcement": 1,
    # The commit: nothing reserves the slot before, and nothing is left to delete.
    "write slot": 1,
}
"""Requests of a save in one call to a run that has a checkpoint."""

_PLACES = {
    r"runs/[^/]+/[^/]+\.binpb": "run",
    r"journal/[^/]+/\d+\.binpb": "announcement",
    rf"data/.*/checkpoints/0*{STEP}\.binpb": "slot",
    r"data/.*/checkpoints/\d+\.binpb": "slot of the base",
    r"data/.*/checkpoints/": "slots",
    r"data/.*/recent\.binpb": "hint",
    r"data/.*/uploads/\w+\.binpb": "upload",
    r"data/.*/uploads/\w+/tree-\w+\.binpb": "leaf table",
    r"data/.*/uploads/\w+/writers/\d+\.binpb": "receipt",
    r"data/.*/uploads/\w+/": "parts",
    r"data/.*/staging/\w+/": "staging tables",
    r"data/.*/staging/\w+/\d+/\w+\.binpb": "staging table",
    r"data/.*/pool/\w+/\w+": "data file",
    r"data/.*/manifests/[^/]+\.binpb": "manifest",
    r"data/.*/files/[^/]+\.binpb": "file table",
    r"data/.*/trees/[^/]+/manifest\.ocdbt": "key space",
}


def kind_of(entry: Logged, root: str) -> str:
    """Returns what a request does, in two words or a few more."""
    target = unquote(entry.target)
    how = {"GET": "read", "DELETE": "delete"}.get(entry.method, "write")
    if (prefix := re.search(r"[?&]prefix=([^&]*)", target)) is not None:
        how, place = "list", prefix[1]
    elif (name := re.search(r"[?&]name=([^&]*)", target)) is not None:
        place = name[1]
    else:
        place = target.partition("?")[0]
    place = place.partition(root)[2].lstrip("/")
    found = [what for path, what in _PLACES.items() if re.fullmatch(path, place)]
    assert found, f"{entry.method} {target}"
    return f"{how} {found[0]}"


@pytest.fixture
def served(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, ThreadServer]]:
    """The root of a fresh store in a bucket, and its server, which repeats no request
    because an answer is late."""
    monkeypatch.setattr(hedging, "READS", Limits(floor_seconds=600))
    gcs.clear()
    root = gcs_root()
    with ThreadServer(root) as server:
        yield root, server
    gcs.clear()


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("is_direct", "expected"), [(False, OF_A_SAVE), (True, OF_A_DIRECT_SAVE)]
)
def test_a_save_makes_these_requests(
    served: tuple[str, ThreadServer],
    gcs: FakeGcs,
    *,
    is_direct: bool,
    expected: dict[str, int],
) -> None:
    root, server = served
    direct = f"{root}?concurrency=64" if is_direct else None
    with store.connect(server.address, direct=direct) as client:
        run = client.run(str(RUN))
        run.save(STEP - 1, {"x": np.zeros(1 << 18, np.float32)}).result()
        gcs.clear()

        run.save(STEP, {"x": np.ones(1 << 18, np.float32)}).result()

        found = Counter(kind_of(one, root.rpartition("/bucket/")[2]) for one in gcs.log)
    # The nodes of a key space are a data file, too.
    found["write data file"] -= expected["write nodes"]
    found["write nodes"] = expected["write nodes"]
    assert expected == dict(found)


@pytest.mark.emulated
def test_a_small_save_makes_these_requests(
    served: tuple[str, ThreadServer], gcs: FakeGcs
) -> None:
    root, server = served
    with store.connect(server.address) as client:
        run = client.run(str(RUN))
        run.save(STEP - 1, {"x": np.zeros(1000, np.float32)}).result()
        gcs.clear()

        run.save(STEP, {"x": np.ones(1000, np.float32)}).result()

        found = Counter(kind_of(one, root.rpartition("/bucket/")[2]) for one in gcs.log)
    assert OF_A_SMALL_SAVE == dict(found)


class CallsInSteps(Calls):
    """Calls of a bucket that wait for the end of a step, in which all of them are
    answered together, as by a bucket that takes equally long for each."""

    def __init__(self) -> None:
        super().__init__(no_faults)
        self._waiting: list[asyncio.Future[None]] = []
        self._under_way = 0

    async def make(
        self, operation: str, path: str, call: Coroutine[Any, Any, T], **how: bool
    ) -> T:
        if operation in ("adopt", "settle"):  # no request on a bucket
            return await super().make(operation, path, call, **how)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            call.close()
            raise
        self._under_way += 1
        try:
            return await super().make(operation, path, call, **how)
        finally:
            self._under_way -= 1

    async def steps_of(self, work: Coroutine[Any, Any, T]) -> tuple[int, T]:
        """Does some work; returns the number of steps for which it waited, and its
        result."""
        task, steps = asyncio.create_task(work), 0
        while not await self._has_ended(task):
            steps += 1
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                if not turn.done():  # cancelled
                    turn.set_result(None)
        return steps, await task

    async def _has_ended(self, task: asyncio.Task[Any]) -> bool:
        """Waits until a task has ended or waits for the next step."""
        while True:
            # All that can go on without an answer does so in some turns.
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return True
            if self._waiting and not self._under_way:
                return False
            await asyncio.sleep(0.001)  # for the threads of the storage


_TURNS = 200

CHUNKS = (0, 1, 2)


async def report(opened: Store, upload: OpenUpload) -> None:
    """Opens the upload, and reports the object of its chunks, as a direct client
    does."""
    upload = await opened.uploads.open_recent(upload.name, upload.record.epoch)
    table = placed_table(*((file_of(upload), n, n) for n in CHUNKS))

    async def parts() -> AsyncIterator[tree_pb2.ChunkTable]:
        yield table

    async for _ in opened.receiver.write(upload, 0, parts()):
        pass


async def find(opened: Store, upload: OpenUpload) -> list[int]:
    """Opens the upload, and returns which of its chunks are stored already."""

    async def parts() -> AsyncIterator[Sums]:
        yield sums(*CHUNKS)

    upload = await opened.uploads.open_recent(upload.name, upload.record.epoch)
    found = opened.receipts.find(upload, 0, parts())
    return [chunk async for some in found for chunk in some.tolist()]


def file_of(upload: OpenUpload) -> str:
    return f"{upload.name.upload}/{'a' * 32}"


async def put(bucket: FaultyBucket, upload: OpenUpload) -> None:
    """Writes the object of the chunks."""
    place = upload.places.data_file(file_of(upload))
    await bucket.write_new(place, [b"".join(map(stored, CHUNKS))])


async def steps_of_a_save(
    *, reuses: bool = False, ends_in_commit: bool = False
) -> dict[str, int]:
    """Returns the steps of each call of a save to a run that has a checkpoint, of which
    it `reuses` all chunks or none."""
    bucket = await FaultyBucket.faulty("memory://")
    opened = await Store.open(bucket)
    first = await begin(opened, RUN, 1)
    await put(bucket, first)
    await report(opened, first)
    await finish(opened, first, sums(*CHUNKS))
    await opened.commits.commit(first.name, first.record.epoch)

    bucket.calls = calls = CallsInSteps()
    opened.commits.discards.defer()  # as `storectl serve` does over a bucket
    found = {}
    beginning = begin(opened, RUN, 2, base=CheckpointName(RUN, LATEST))
    found["begin"], upload = await calls.steps_of(beginning)
    if reuses:
        found["find"], stored = await calls.steps_of(find(opened, upload))
        assert list(CHUNKS) == stored
    else:
        found["object"], _ = await calls.steps_of(put(bucket, upload))
    end = None
    if ends_in_commit:
        end = end_of(file_of(upload), (0, 0, 0))
        end = replace(end, placed=tree_pb2.ChunkTable()) if reuses else end
    else:
        if not reuses:
            found["chunks"], _ = await calls.steps_of(report(opened, upload))
        finishing = finish(opened, upload, sums(*CHUNKS))
        found["finish"], _ = await calls.steps_of(finishing)
    committing = opened.commits.commit(upload.name, upload.record.epoch, end)
    found["commit"], record = await calls.steps_of(committing)
    assert slots.COMMITTED == record.state
    found["discard"], _ = await calls.steps_of(opened.commits.discards.drain(60))
    return found


async def steps_of_a_small_save(*, before: int) -> int:
    """Returns the steps of a save in one call, by a process that has made some saves of
    the run before; another process has made one."""
    first = await started()
    await first.create(1)
    process = await first.beside()
    for step in range(before):
        await process.create(2 + step)
    process.bucket.calls = calls = CallsInSteps()
    steps, _ = await calls.steps_of(process.create(9))
    await first.check()
    return steps


@pytest.mark.parametrize("before", [0, 1])
def test_a_small_save_waits_for_five_requests(before: int) -> None:
    # 1. Read the slot, the record and the run; of the first save of a process, list the
    # journal. 2. Write the record, and read the run again. 3. Write all objects that
    # the slot names. 4. Write the announcement, and read the one before it. 5. Write
    # the slot.
    assert 5 == asyncio.run(steps_of_a_small_save(before=before))


def test_a_save_of_one_writer_waits_for_seven_requests() -> None:
    # As below, but the only writer finishes in the call that commits: 1. Read the slot
    # and the end of the object, and write all objects that the record names. 2. Write
    # the announcement, and read the one before it. 3. Write the slot.
    expected = {"begin": 3, "object": 1, "commit": 3, "discard": 1}

    assert expected == asyncio.run(steps_of_a_save(ends_in_commit=True))


def test_a_save_of_one_writer_that_reuses_all_waits_for_these_requests() -> None:
    expected = {"begin": 3, "find": 3, "commit": 5, "discard": 1}

    found = asyncio.run(steps_of_a_save(reuses=True, ends_in_commit=True))
    assert expected == found


def test_a_save_waits_for_these_requests() -> None:
    expected = {
        # 1. Read the slot, the record, the run and the slot of the base, and list the
        # slots after that. 2. Write the record, and read the run again. 3. Write the
        # leaf table and the slot.
        "begin": 3,
        "object": 1,
        # Read the end of the object, and write the staging table.
        "chunks": 1,
        # 1. Read the slot, and write the receipt.
        "finish": 1,
        # 1. Read the slot and the receipt. 2. Write all objects that the record names.
        # 3. Write the announcement, and read the one before it. 4. Write the slot.
        "commit": 4,
        # After the reply: two folders, each with one call of the bucket.
        "discard": 1,
    }

    assert expected == asyncio.run(steps_of_a_save())


def test_a_save_that_reuses_all_waits_for_these_requests() -> None:
    expected = {
        "begin": 3,
        # 1. Read the slots, and list the staging tables. 2. Read the manifest of the
        # base. 3. Read the ends of its data files, which is done once in a save.
        "find": 3,
        # 1. Read the slot, and list the staging tables. 2. Read the slot of the base.
        # 3. Write the receipt.
        "finish": 3,
        # 1. Read the slot and the receipt. 2. Read the slot of the base. 3. Write all
        # objects that the record names. 4. Write the announcement, and read the one
        # before it. 5. Write the slot.
        "commit": 5,
        "discard": 1,
    }

    assert expected == asyncio.run(steps_of_a_save(reuses=True))


async def steps_of_a_hold(*, by_uid: bool) -> int:
    """Returns the steps of the creation of a hold."""
    process = await started()
    upload = await process.create(1)
    process.bucket.calls = calls = CallsInSteps()
    creating = process.store.holds.create(
        HoldName(upload.run, "a" * 32),
        CheckpointName(upload.run, 1),
        owner="",
        ttl=timedelta(minutes=1),
        uid=upload.upload if by_uid else "",
    )
    return (await calls.steps_of(creating))[0]


def test_a_hold_of_a_read_waits_for_its_write_and_the_slot() -> None:
    assert 2 == asyncio.run(steps_of_a_hold(by_uid=True))
    # 1. Read the hold. 2. Read the slot.
    assert 4 == asyncio.run(steps_of_a_hold(by_uid=False))


@pytest.mark.emulated
def test_an_embedded_store_reads_no_data_file_and_writes_few_staging_tables(
    gcs: FakeGcs,
) -> None:
    gcs.clear()
    root = gcs_root()
    with store.connect(root) as client:
        run = client.run(str(RUN))
        run.save(STEP - 1, {}).result()
        gcs.clear()
        tree = {f"x{n}": np.ones(3 << 20, np.float32) for n in range(8)}
        run.save(STEP, tree, base=None).result()
        found = Counter(kind_of(one, root.rpartition("/bucket/")[2]) for one in gcs.log)
    gcs.clear()

    assert found["write data file"] > 4
    assert 0 == found["read data file"]
    assert found["write staging table"] <= 2  # the second, on a slow machine
