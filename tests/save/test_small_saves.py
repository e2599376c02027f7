"""A small save, which is made in one call: over a socket, and without one inside the
process; in files, and in a bucket; with a collection, a death or a lost reply between
any two of its writes."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import storesvc_client as store
from storesvc import failpoints
from storesvc.errors import CheckpointExistsError, StoreError
from storesvc.failpoints import Action, Failpoint, Fault
from storesvc.format.names import UploadName
from storesvc.format.trees import pack_leaves
from storesvc.save.uploads import DEFAULT_LEASE
from storesvc.watch.events import Outcome
from storesvc.watch.watcher import ChangeCache
from storesvc_proto.v1 import tree_pb2
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support.collecting_process import PLACES, Process, started
from tests.support.contract import CHUNK, Writer, refused, stored, tree_of
from tests.support.faulty_bucket import (
    Calls,
    DiedError,
    FaultyBucket,
    dies_before,
    no_faults,
)
from tests.support.old_server import old_server
from tests.support.recorded_calls import record_calls, rpcs_in
from tests.support.server_process import ServerProcess
from tests.support.thread_server import ThreadServer

T = TypeVar("T")

RUN = "tests/small"
MIB = 1 << 20


@pytest.fixture(params=["files", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The root of a fresh store."""
    if request.param == "files":
        yield f"{tmp_path.as_uri()}/store"
        return
    gcs: FakeGcs = request.getfixturevalue("gcs")
    gcs.clear()
    yield gcs_root()
    gcs.clear()


@pytest.fixture(params=["in process", "socket"])
def client(request: pytest.FixtureRequest, root: str) -> Iterator[store.Client]:
    """A client of that store."""
    if request.param == "in process":
        with store.connect(root) as client:
            yield client
        return
    with ThreadServer(root) as server, store.connect(server.address) as client:
        yield client


def tree(step: int, size_bytes: int = 300_000) -> dict[str, Any]:
    return {
        "w": np.full(size_bytes // 8 - 2, step, np.float64),
        "step": step,
        "name": f"step {step}",
    }


def same(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    return expected.keys() == found.keys() and all(
        np.array_equal(expected[key], found[key]) for key in expected
    )


def test_a_small_save_is_one_call_and_comes_back(client: store.Client) -> None:
    run = client.run(RUN)
    with record_calls("UploadService") as calls:
        save = run.save(1, tree(1), labels={"a": "b"}, metrics={"loss": 0.5})
        saved = save.result()
        report = save.report()

    assert ["CreateCheckpoint"] == rpcs_in(calls)
    assert same(tree(1), run.restore(1))
    assert ({"a": "b"}, {"loss": 0.5}) == (dict(saved.labels), dict(saved.metrics))
    assert report.total_bytes == report.sent_bytes > 300_000
    assert report.upload == saved.uid
    assert run.verify(1).ok
    (writer,) = run.trace(1).writers
    assert writer.total_bytes == report.total_bytes


def test_items_and_empty_trees_are_small(client: store.Client) -> None:
    run = client.run(RUN)
    with record_calls("UploadService") as calls:
        run.save(1, {}, items={"config": {"a": [1, 2]}}).result()
        run.save(2, {"e": np.zeros((0, 3))}).result()

    assert ["CreateCheckpoint"] * 2 == rpcs_in(calls)
    assert {"a": [1, 2]} == run.items(1)["config"]
    assert (0, 3) == run.restore(2)["e"].shape
    assert run.verify(2).ok


@pytest.mark.parametrize(
    ("more_bytes", "expected"),
    [(0, ["CreateCheckpoint"]), (8, ["BeginUpload", "CommitUpload"])],
)
def test_the_limit_is_a_mebibyte(
    tmp_path: Path, *, more_bytes: int, expected: list[str]
) -> None:
    with (
        store.connect(f"{tmp_path.as_uri()}/store") as client,
        record_calls("UploadService") as calls,
    ):
        leaf = np.zeros((MIB - 4 + more_bytes) // 4, np.float32)
        client.run(RUN).save(1, {"w": leaf}).result()

    shown = "CreateCheckpoint", *expected
    assert expected == [rpc for rpc in rpcs_in(calls) if rpc in shown]


def test_names_that_do_not_fit_into_one_call_are_no_error(client: store.Client) -> None:
    long = {f"{'k' * 400}{n}": np.full(280, n, np.float32) for n in range(900)}
    run = client.run(RUN)
    with record_calls("UploadService") as calls:
        run.save(1, long).result()
        run.save(2, tree(2)).result()

    first, *_, last = rpcs_in(calls)
    assert ("BeginUpload", "CreateCheckpoint") == (first, last)
    assert same(long, run.restore(1))


def test_what_the_last_save_had_is_sent_again(client: store.Client) -> None:
    run = client.run(RUN)
    run.save(1, tree(1)).result()
    with record_calls("UploadService") as calls:
        report = run.save(2, tree(1)).report()
    run.delete(1)
    run.purge(1)

    assert ["CreateCheckpoint"] == rpcs_in(calls)
    assert report.total_bytes == report.sent_bytes
    assert same(tree(1), run.restore(2))


def test_a_base_that_is_named_is_reused(client: store.Client) -> None:
    run = client.run(RUN)
    run.save(1, tree(1)).result()

    report = run.save(2, tree(1), base=1).report()

    assert 0 == report.sent_bytes
    assert same(tree(1), run.restore(2))


def test_saves_are_ordered_and_queue(client: store.Client) -> None:
    run = client.run(RUN)
    large = {"w": np.ones(MIB)}
    saves = [
        run.save(step, large if step % 3 == 0 else tree(step), if_busy="queue")
        for step in range(7)
    ]

    assert list(range(7)) == [save.result().step for save in saves]
    assert same(tree(5), run.restore(5))
    sequences = [run.checkpoint(step).commit_time for step in range(7)]
    assert sorted(sequences) == sequences


def test_a_step_that_exists_is_rejected(client: store.Client) -> None:
    run = client.run(RUN)
    run.save(1, tree(1)).result()

    with pytest.raises(store.AlreadyExistsError, match="write-once"):
        run.save(1, tree(2)).result()
    run.delete(1)
    with pytest.raises(store.AlreadyExistsError, match="was deleted"):
        run.save(1, tree(2)).result()
    run.purge(1)
    run.save(1, tree(2)).result()

    assert same(tree(2), run.restore(1))


def test_a_tree_that_cannot_be_read_fails_in_the_call(client: store.Client) -> None:
    class Broken:
        shape, dtype = (3,), np.dtype(np.float32)

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no values")

    run = client.run(RUN)
    with pytest.raises(Exception, match=r"values|leaf"):
        run.save(1, {"x": Broken()}).result()
    run.save(1, tree(1)).result()

    assert [1] == run.steps()


@pytest.mark.parametrize(
    "transport", ["in process", pytest.param("socket", marks=pytest.mark.slow)]
)
def test_a_reply_that_is_lost_is_no_conflict(tmp_path: Path, transport: str) -> None:
    root = f"{tmp_path.as_uri()}/store"
    lost = Fault(action=Action.DROP_REPLY, delay_seconds=0, time=1)
    failpoints.arm({Failpoint.COMMIT_BEFORE_REPLY: lost})
    try:
        with ThreadServer(root) as server:
            target = root if transport == "in process" else server.address
            with (
                store.connect(target) as client,
                record_calls("UploadService") as calls,
            ):
                saved = client.run(RUN).save(1, tree(1)).result()
                again = client.run(RUN).checkpoint(1)
                assert same(tree(1), client.run(RUN).restore(1))
    finally:
        failpoints.arm({})

    assert ["CreateCheckpoint"] * 2 == rpcs_in(calls)
    assert saved.uid == again.uid


def test_the_request_id_decides_which_save_is_repeated(tmp_path: Path) -> None:
    with ThreadServer(f"{tmp_path.as_uri()}/store") as server:
        writer = Writer(server.address, RUN, 1)
        first = writer.create().checkpoint

        assert first == writer.create().checkpoint
        with refused("REQUEST_ID_REUSED"):
            writer.create(data=b"".join(stored(n, version=1) for n in range(3)))
        with refused("CHECKPOINT_EXISTS"):
            Writer(server.address, RUN, 1).create()


def test_what_a_small_save_cannot_be_is_rejected(tmp_path: Path) -> None:
    with ThreadServer(f"{tmp_path.as_uri()}/store") as server:
        writer = Writer(server.address, RUN, 1)
        base = "namespaces/tests/runs/small/checkpoints/latest"
        for reason, match, changes in (
            ("INVALID_CHUNK", "3012 bytes", {"data": stored(0)}),
            ("INVALID_CHUNK", "checksum", {"data": bytes(3 * (CHUNK + 4))}),
            ("INVALID_FIELD", "no base", {"upload": {"writer_count": 1, "base": base}}),
            ("INVALID_FIELD", "one writer", {"upload": {"writer_count": 2}}),
            ("INVALID_FIELD", "UUID", {"request_id": "1"}),
            ("LIMIT_EXCEEDED", "1310720 bytes", {"data": bytes(2 * MIB)}),
        ):
            with refused(reason, match):
                writer.create(**changes)
        (leaves,) = pack_leaves(tree_of(1001))
        with refused("LIMIT_EXCEEDED", "1001; begin an upload"):
            writer.create(leaves=tree_pb2.LeafTable.FromString(leaves))

        writer.create()


def test_a_server_of_an_earlier_release_gets_the_calls_that_it_knows(
    tmp_path: Path,
) -> None:
    with (
        old_server(f"{tmp_path.as_uri()}/store") as server,
        store.connect(server.address) as client,
        record_calls("UploadService") as calls,
    ):
        run = client.run(RUN)
        changing = tree(1)
        save = run.save(1, changing)
        changing["w"][:] = 7  # the copy is taken
        save.result()
        run.save(2, tree(2)).result()
        assert same(tree(1), run.restore(1))
        assert same(tree(2), run.restore(2))

    found = rpcs_in(calls)
    assert (2, 0) == (found.count("BeginUpload"), found.count("CreateCheckpoint"))


# Between any two writes.


async def absent(_: Process) -> None:
    """The step has no slot."""


async def freed(process: Process) -> None:
    """The step was freed by an abort."""
    await process.store.uploads.abort(await process.begin(2))


async def taken(process: Process) -> None:
    """Another upload holds the step, and has stored a chunk."""
    await process.send(await process.begin(2), {0: 1})


BEFORE = (absent, freed, taken)

Way = Callable[..., Awaitable[UploadName]]
"""How a process saves a step."""

WAYS = (Process.create, Process.end)
"""In one call; and as a larger save that begins, stores a data file, and finishes its
writer in the call that commits."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", BEFORE)
async def test_a_death_before_any_write_leaves_all_or_nothing(
    before: Callable[[Process], Awaitable[None]], way: Way
) -> None:
    for cut in itertools.count():
        process = await started()
        await process.create(1, (1, 0, 0))
        await before(process)
        process.bucket.calls.follow(dies_before(cut))
        upload, has_died = f"{cut:032x}", False
        try:
            await way(process, 2, (0, 1, 0), upload=upload)
        except DiedError:
            has_died = True
        survivor = await process.beside()
        survivor.contents[2] = (0, 1, 0)
        assert await survivor.steps() in ([1], [2, 1])
        await survivor.check()
        if cut % 2:  # the same call once more
            await way(survivor, 2, (0, 1, 0), upload=upload)
        else:  # or a collection, and another one
            await survivor.collect()
            survivor.clock.turn(DEFAULT_LEASE)
            await survivor.collect()
            await survivor.check()
            if await survivor.steps() == [1]:
                await survivor.create(2, (2, 1, 0))
        await survivor.check()
        assert [2, 1] == await survivor.steps()
        await ends_clean(survivor)
        if not has_died:
            break
    assert cut >= 7


async def ends_clean(process: Process) -> None:
    """Asserts that all that is left after a day belongs to a checkpoint."""
    for _ in range(3):
        process.clock.turn(timedelta(days=2))
        await process.collect()
    await process.check()
    left = [
        place
        for place in await process.bucket.list(PLACES.root)
        if PLACES.parse_upload(place)
    ]
    kinds = Counter(place.removeprefix(PLACES.root).partition("/")[0] for place in left)
    # the nodes of a larger save are in a file of their own
    assert kinds.pop("pool") in (2, 3)
    assert {"files": 2, "manifests": 2, "trees": 2} == kinds


class CallsWithGuest(Calls):
    """Calls of a bucket, before one of whose changes another process does something."""

    def __init__(self, number: int, guest: Callable[[], Awaitable[None]]) -> None:
        super().__init__(no_faults)
        self._number, self._guest = number, guest
        self.has_come = False

    async def make(
        self, operation: str, path: str, call: Coroutine[Any, Any, T], **how: Any
    ) -> T:
        if how.get("changes") and self.changes == self._number and not self.has_come:
            self.has_come = True
            await self._guest()
        return await super().make(operation, path, call, **how)


async def collect(other: Process) -> None:
    """Collects at once all that is garbage now."""
    await other.collect()


async def expire(other: Process) -> None:
    """Collects after the lease of the upload is over."""
    await other.collect()
    other.clock.turn(DEFAULT_LEASE)
    await other.collect()


async def save(other: Process) -> None:
    """Saves the same step."""
    with suppress(CheckpointExistsError):
        await other.create(2, (2, 1, 0))


async def reserve(other: Process) -> None:
    """Begins an upload of the same step, and aborts it."""
    with suppress(CheckpointExistsError):
        await other.store.uploads.abort(await other.begin(2))
    await other.collect()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("guest", [collect, expire, save, reserve])
@pytest.mark.parametrize("before", BEFORE)
async def test_whatever_happens_between_two_writes_is_harmless(
    before: Callable[[Process], Awaitable[None]],
    guest: Callable[[Process], Awaitable[None]],
    way: Way,
) -> None:
    for number in itertools.count():
        process = await started()
        await process.create(1, (1, 0, 0))
        await before(process)
        process.contents[2] = (0, 1, 0)  # once the slot is written
        other = await process.beside()

        async def come(other: Process = other) -> None:
            await guest(other)
            await other.check()

        calls = process.bucket.calls = CallsWithGuest(number, come)
        try:
            await way(process, 2, (0, 1, 0))
        except StoreError:
            assert calls.has_come
            assert guest is not collect
            if await other.steps() == [1]:
                await other.create(2, (0, 1, 0))
        assert [2, 1] == await other.steps()
        await other.check()
        await ends_clean(other)
        if not calls.has_come:
            break
    assert number >= 7


async def begin_look(process: Process, number: int) -> Callable[[], Awaitable[Outcome]]:
    """Returns a function that returns the outcome of an announcement, for a watch."""
    store_ = process.store
    changes = ChangeCache(
        "tests", store_.catalog, store_.journal, kept=9, clock=process.clock
    )

    async def look() -> Outcome:
        changes.begin_poll([])
        change = await changes.change(number)
        assert change is not None
        return change.outcome

    return look


async def test_a_watch_waits_for_a_slot_that_is_announced_and_absent() -> None:
    process = await started()
    await process.create(1)
    other = await process.beside()
    look = await begin_look(other, 2)
    seen: list[Outcome] = []

    async def come() -> None:
        seen.append(await look())

    # the slot comes after the record, four objects and the announcement
    process.bucket.calls = CallsWithGuest(6, come)
    await process.create(2)

    assert [Outcome.PENDING] == seen
    assert Outcome.LANDED is await look()


async def test_a_watch_does_not_wait_for_a_save_that_died() -> None:
    process = await started()
    await process.create(1)
    other = await process.beside()
    look = await begin_look(other, 2)
    process.bucket.calls.follow(dies_before(6))
    with pytest.raises(DiedError):
        await process.create(2)

    assert Outcome.PENDING is await look()
    await expire(other)
    other.clock.turn(timedelta(minutes=1))
    assert Outcome.SUPERSEDED is await look()


@pytest.mark.slow
def test_a_client_that_saves_goes_on_at_the_next_server(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "store", tmp_path)
    server.environment["STORESVC_FAILPOINTS"] = "commit.before_reply=kill"
    server.start()
    with store.connect(server.address) as client:
        pending = client.run(RUN).save(1, tree(1))
        server.wait()
        server.environment.clear()
        server.start()
        pending.result()
        assert same(tree(1), client.run(RUN).restore(1))
    server.stop()


async def test_a_small_save_in_files_has_both_views(tmp_path: Path) -> None:
    process = await Process.over(await FaultyBucket.faulty(tmp_path.as_uri()))
    await process.create(1, (0, 1, 2))
    await process.check()
