"""Saves in the background: what blocks, waits and is refused, and what they hold."""

import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.failpoints import Failpoint, arm_points
from storesvc.format.chunks import Sums
from storesvc.save import batches
from storesvc_client._api.run import get_parts
from storesvc_client._chunks.memory import BATCH_BYTES, MIN_BUDGET_BYTES, StagingPool
from storesvc_client._chunks.slabs import FilledSlab, Slab
from storesvc_client._pytree.save_plan import Planner, TreeSource
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._save.chunk_streams import ResendWindow
from storesvc_client._save.saver import PendingSave
from storesvc_client._save.snapshot import SlabQueue, WantedSlabs
from storesvc_client._save.upload import Upload
from tests.support.examples import sampled
from tests.support.server_process import ServerProcess
from tests.support.sessions import send_through_server
from tests.support.small_disk import small_disk

MIB = 1 << 20

_names = itertools.count()

TREE: dict[str, Any] = {"x": np.arange(3_000_000, dtype=np.float32), "y": np.ones(7)}


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[store.Run]:
    """A run of a store inside the process, whose files the client writes by itself."""
    with store.connect(tmp_path.as_uri()) as client:
        yield client.run("tests/background")


@pytest.fixture(params=["direct", "streamed"])
def either(
    request: pytest.FixtureRequest, server: ServerProcess
) -> Iterator[store.Run]:
    """A run of a client that writes data files by itself, or sends their bytes."""
    direct = server.root.as_uri() if request.param == "direct" else None
    with store.connect(
        server.address, direct=direct, staging_bytes=MIN_BUDGET_BYTES
    ) as client:
        run = client.run(f"tests/background-{next(_names)}")
        yield run
        run.wait()
        assert client._session.staging._used_bytes == 0


def slow_commits(seconds: float) -> Any:
    """While it lasts, each commit takes so long."""
    return arm_points(f"{Failpoint.COMMIT_BEFORE_RECORD}=delay:{seconds}")


# --- saves that block their caller ------------------------------------------------


@pytest.mark.parametrize(
    "snapshot", sampled(["auto", "host", "device", "none"], every=2)
)
def test_donated_and_overwritten_arrays_are_saved_as_they_were(
    either: store.Run, snapshot: Any
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    array = jax.device_put(jnp.arange(2**22, dtype=jnp.float32), sharding)
    host = np.arange(2**20)
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)

    save = either.save(1, {"array": array, "host": host}, snapshot=snapshot)
    for _ in range(4):
        array = bump(array)
    host[:] = -1
    save.result()

    found = either.restore(1)
    assert np.array_equal(np.arange(2**22, dtype=np.float32), found["array"])
    assert np.array_equal(np.arange(2**20), found["host"])


def test_a_closed_client_keeps_no_thread_of_its_saves(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/threads")
        run.save(1, TREE, snapshot="device")
        run.save(2, TREE, if_busy="queue")
        assert _savers()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _savers():
        time.sleep(0.01)
    assert [] == _savers()


def _savers() -> list[str]:
    names = ("storesvc-save-threads", "storesvc-copy-threads", "storesvc-place")
    return [t.name for t in threading.enumerate() if t.name.startswith(names)]


@pytest.mark.slow
def test_a_save_returns_before_it_is_committed(embedded: store.Run) -> None:
    with slow_commits(1):
        began = time.monotonic()
        save = embedded.save(1, TREE)
        returned = time.monotonic() - began
        assert not save.done()
        assert 1 == save.result().step
        assert time.monotonic() - began > 1
    assert returned < 1


@pytest.mark.slow
def test_a_save_without_a_copy_has_ended_when_it_returns(embedded: store.Run) -> None:
    with slow_commits(0.5):
        began = time.monotonic()
        save = embedded.save(1, TREE, snapshot="none")
        assert time.monotonic() - began > 0.5
        assert save.done()
    failed = embedded.save(1, {"x": 0}, snapshot="none")
    assert failed.done()
    with pytest.raises(store.AlreadyExistsError):
        failed.result()
    assert 1 == save.result().step


@pytest.mark.slow
def test_a_save_without_a_copy_blocks_no_other_call_of_the_run(
    embedded: store.Run,
) -> None:
    with slow_commits(1), ThreadPoolExecutor(1) as pool:
        first = pool.submit(embedded.save, 1, TREE, snapshot="none")
        while not get_parts(embedded).saver._under_way:
            time.sleep(0.01)
        with pytest.raises(store.ConflictError, match="step 1 is still in progress"):
            embedded.save(2, TREE, if_busy="refuse")
        assert not first.done()
        assert first.result().done()


@pytest.mark.slow
def test_a_save_without_a_copy_saves_what_lies_as_it_may(either: store.Run) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rows = np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)

    def placed(*axes: str | None) -> Any:
        return jax.device_put(rows, NamedSharding(mesh, PartitionSpec(*axes)))

    tree = {
        "rows": placed("a"),
        "columns": placed(None, "b"),
        "both": placed("a", "b"),
        "everywhere": placed(),
        "joined": jax.device_put(
            rows[:64], NamedSharding(mesh, PartitionSpec(("a", "b")))
        ),
        "padded": np.arange(2003 * 3001, dtype=np.uint32).reshape(2003, 3001),
        "large": np.arange(20 * MIB, dtype=np.uint32).reshape(20, 1024, 1024),
        "fortran": np.asfortranarray(rows),
        "strided": rows[::2, 1::3],
        "swapped": rows.astype(">f4"),
        "empty": np.ones((0, 3)),
        "key": jax.random.key(7),
        "number": 3,
        "small": [np.full(n, n, np.int16) for n in range(300)],
    }

    either.save(1, tree, snapshot="none").result()
    again = either.save(2, {**tree, "number": 4}, snapshot="none").report()

    assert again.sent_bytes < 1 * MIB
    assert either.verify(1).ok
    for step, number in ((1, 3), (2, 4)):
        found = either.restore(step)
        assert found.pop("number") == number
        assert jax.random.key_data(tree["key"]).tolist() == (
            jax.random.key_data(found.pop("key")).tolist()
        )
        small = zip(tree["small"], found.pop("small"), strict=True)
        assert all(np.array_equal(a, b) for a, b in small)
        assert all(np.array_equal(tree[key], found[key]) for key in found)


def test_a_save_without_a_copy_that_is_interrupted_commits_nothing(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when all has been taken from the tree, and some of it is still
    being read."""
    tree = {f"x{n}": np.full(2 * MIB, n, np.uint32) for n in range(5)}
    is_reading, reading_ends = threading.Event(), threading.Event()
    stored, wait = FilledSlab.stored, PendingSave.wait

    def slow(self: FilledSlab, *args: Any) -> Any:
        is_reading.set()
        reading_ends.wait(60)
        return stored(self, *args)

    def interrupted(self: PendingSave) -> None:
        if not self._observed:
            assert is_reading.wait(60)
            raise KeyboardInterrupt
        reading_ends.set()
        wait(self)

    with monkeypatch.context() as patched:
        patched.setattr(FilledSlab, "stored", slow)
        patched.setattr(PendingSave, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            either.save(1, tree, snapshot="none")

    pending = get_parts(either).saver._under_way[0]
    assert pending.is_done
    with pytest.raises(CancelledError):
        pending.result()
    either.wait()
    assert [] == list(either.uploads.list())
    either.save(1, tree, snapshot="none").result()


@pytest.mark.slow
def test_a_save_waits_for_the_one_before_unless_it_is_queued(
    embedded: store.Run,
) -> None:
    with slow_commits(0.5):
        first = embedded.save(1, TREE)
        second = embedded.save(2, TREE, if_busy="queue")
        assert not first.done()
        third = embedded.save(3, TREE, if_busy="queue")
        assert [False, False] == [second.done(), third.done()]
        fourth = embedded.save(4, TREE)
        assert [True] * 3 == [first.done(), second.done(), third.done()]
    fourth.result()
    assert [4, 3, 2, 1] == [found.step for found in embedded.checkpoints()]


@pytest.mark.slow
def test_a_save_is_refused_while_another_is_under_way_where_that_is_asked(
    embedded: store.Run,
) -> None:
    with slow_commits(0.5):
        embedded.save(1, TREE)
        with pytest.raises(store.ConflictError, match="step 1 is still in progress"):
            embedded.save(2, TREE, if_busy="refuse")
        embedded.wait()
    embedded.save(2, TREE, if_busy="refuse").result()


@pytest.mark.parametrize("queued", [False, True])
def test_the_error_of_a_save_is_raised_by_the_next_call_and_by_its_handle(
    embedded: store.Run, *, queued: bool
) -> None:
    embedded.save(1, TREE).result()
    failed = embedded.save(1, TREE)
    if queued:
        failed.done() or embedded.save(2, TREE, if_busy="queue")
        with pytest.raises(store.AlreadyExistsError):
            embedded.wait()
    else:
        with pytest.raises(store.AlreadyExistsError):
            embedded.save(2, TREE)
    with pytest.raises(store.AlreadyExistsError):
        failed.result()
    embedded.save(3, TREE).result()


@pytest.mark.parametrize(
    ("name", "value"), [("snapshot", "disk"), ("if_busy", "no"), ("if_busy", False)]
)
def test_a_wrong_choice_is_rejected_with_the_right_ones(
    embedded: store.Run, name: str, value: Any
) -> None:
    choices: dict[str, Any] = {name: value}
    with pytest.raises(store.InvalidRequestError, match=f"{name}=: expected one of '"):
        embedded.save(1, TREE, **choices)


# --- the memory that saves take ---------------------------------------------------


@pytest.mark.slow
def test_a_tree_larger_than_the_staging_is_saved_through_it(either: store.Run) -> None:
    tree = {f"x{n}": np.full(10 * MIB, n, np.uint32) for n in range(8)}
    held: list[int] = []
    ended = threading.Event()
    staging = either._session.staging

    def watch() -> None:
        while not ended.is_set():
            held.append(staging.held_bytes)
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for step in range(2):
            either.save(step, tree, base=None).result()
        ended.set()
        watching.result()

    assert MIN_BUDGET_BYTES // 2 < max(held) <= MIN_BUDGET_BYTES
    if either._session.data_root is None:
        # The server took whole batches: for less it would have waited for seconds.
        total = sum(leaf.nbytes for leaf in tree.values())
        files = get_reader(either.open(1)).manifest.places.files
        assert len(files) == -(-total // BATCH_BYTES)
    found = either.restore(1)
    assert all(np.array_equal(tree[key], found[key]) for key in tree)


@pytest.mark.slow
def test_a_save_without_a_copy_takes_no_memory_for_what_lies_as_it_is_stored(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    tree = {f"x{n}": np.full(10 * MIB, n, np.uint32) for n in range(4)}
    tree |= {"y": jax.device_put(np.arange(8 * MIB), sharding)}
    tree |= {f"middling/{n}": np.full(MIB, n, np.uint8) for n in range(9)}
    taken: list[int] = []
    take = StagingPool.take

    def counted(self: StagingPool, size: int, **how: Any) -> Any:
        taken.append(size)
        return take(self, size, **how)

    monkeypatch.setattr(StagingPool, "take", counted)
    either.save(1, tree, snapshot="none").result()
    assert [] == taken
    either.save(2, {"odd": np.ones((2003, 3001))}, snapshot="none").result()
    assert taken
    assert 0 == either._session.staging.held_bytes
    found = either.restore(1)
    assert all(np.array_equal(tree[key], found[key]) for key in tree)


@pytest.mark.slow
def test_what_a_save_without_a_copy_must_copy_goes_through_little_memory(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.zeros((10, MIB), np.uint32)
    tree = {f"x{n}": np.asfortranarray(rows + n) for n in range(8)}
    held: list[int] = []
    take = StagingPool.take

    def watched(self: StagingPool, size: int, **how: Any) -> Any:
        found = take(self, size, **how)
        held.append(self.held_bytes)
        return found

    monkeypatch.setattr(StagingPool, "take", watched)
    either.save(1, tree, snapshot="none").result()

    assert 0 < max(held) <= MIN_BUDGET_BYTES < 8 * rows.nbytes
    found = either.restore(1)
    assert all(np.array_equal(tree[key], found[key]) for key in tree)


def test_less_staging_than_any_save_needs_is_rejected(server: ServerProcess) -> None:
    with pytest.raises(store.InvalidRequestError, match="staging_bytes=: expected a"):
        store.connect(server.address, staging_bytes=MIN_BUDGET_BYTES - 1)


@pytest.mark.parametrize("option", ["staging_bytes", "restore_pool_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "1 GiB", None, True])
def test_what_is_no_number_of_bytes_is_rejected(option: str, value: object) -> None:
    options: Any = {option: value}
    with pytest.raises(store.InvalidRequestError, match=f"connect: {option}=: .* got "):
        store.connect("memory://", **options)


def take(
    staging: StagingPool, size: int, given_up: Callable[[], bool] = lambda: False
) -> Any:
    return staging.take(size, cancelled=given_up, waiting=lambda: None)


def test_staging_gives_memory_out_again_and_makes_room_for_other_sizes() -> None:
    staging = StagingPool(10 * MIB)
    first = take(staging, 4 * MIB)
    second = take(staging, 4 * MIB)
    assert first is not None
    assert second is not None
    staging.give_back(first)
    assert first is take(staging, 4 * MIB)
    staging.give_back(first)
    staging.give_back(second)

    assert 8 * MIB == staging.held_bytes
    larger = take(staging, 9 * MIB)
    assert larger is not None
    assert 9 * MIB == staging.held_bytes
    staging.give_back(larger)
    staging.clear()
    assert 0 == staging.held_bytes


def test_who_waits_for_staging_goes_on_when_some_comes_back_or_gives_up() -> None:
    staging = StagingPool(MIB)
    taken = take(staging, MIB)
    assert taken is not None
    given_up = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(take, staging, MIB)
        hasty = pool.submit(take, staging, MIB, given_up.is_set)
        time.sleep(0.05)
        assert [False, False] == [patient.done(), hasty.done()]
        given_up.set()
        staging.wake()
        assert hasty.result(5) is None
        staging.give_back(taken)
        assert taken is patient.result(5)


# --- what fails -------------------------------------------------------------------


def test_a_snapshot_that_fails_leaves_no_upload_behind(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = TreeSource.copy, itertools.count()

    def fails(self: TreeSource, ordinal: int, into: Any) -> None:
        if next(calls) == 2:
            raise MemoryError("as if")
        copy(self, ordinal, into)

    tree = {f"x{n}": np.full(2 * MIB, n, np.uint32) for n in range(5)}
    with monkeypatch.context() as patched:
        patched.setattr(TreeSource, "copy", fails)
        with pytest.raises(MemoryError, match="as if"):
            either.save(1, tree)
    saved = either.save(1, tree).report()
    assert [] == list(either.uploads.list())
    assert saved.total_bytes == saved.sent_bytes


@pytest.mark.slow
def test_a_save_that_is_rejected_does_not_wait_for_memory(either: store.Run) -> None:
    tree = {f"x{n}": np.full(10 * MIB, n, np.uint32) for n in range(8)}
    either.save(1, {"x": 1}).result()

    save = either.save(1, tree)  # more than the staging holds

    with pytest.raises(store.AlreadyExistsError):
        save.result()
    # and gives all of it back
    either.save(2, tree).result()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk")
def test_a_disk_that_is_full_for_direct_writes_says_so_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", size_bytes=64 * MIB) as root,
        store.connect((root / "store").as_uri()) as client,
    ):
        run = client.run("tests/full")
        large = {f"x{n}": np.full(MIB, n, np.uint64) for n in range(16)}
        with pytest.raises(store.LimitError, match="storage is full") as caught:
            run.save(1, large).result()
        assert "STORAGE_FULL" == caught.value.reason
        run.save(2, {"x": np.arange(9)}).result()
        assert [2] == [found.step for found in run.checkpoints()]


# --- what did not change ----------------------------------------------------------


def count_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the ordinals of the chunks that are copied from now on."""
    copied: list[int] = []
    copy = TreeSource.copy

    def counted(self: TreeSource, ordinal: int, into: Any) -> None:
        copied.append(ordinal)
        copy(self, ordinal, into)

    monkeypatch.setattr(TreeSource, "copy", counted)
    return copied


def test_what_did_not_change_is_neither_copied_nor_sent(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"x{n}": np.full(2 * MIB, n, np.uint32) for n in range(6)}
    either.save(1, tree).result()
    copied = count_copies(monkeypatch)
    changed = {**tree, "x3": np.full(2 * MIB, 99, np.uint32)}
    report = either.save(2, changed).report()

    assert [3] == copied
    assert 8 * MIB + 4 == report.sent_bytes
    assert np.array_equal(changed["x3"], either.restore(2)["x3"])
    assert np.array_equal(tree["x2"], either.restore(2)["x2"])


def test_what_lies_otherwise_is_not_copied_where_it_did_not_change(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",))

    def placed(*axes: str | None) -> dict[str, Any]:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        rows = {f"x{n}": np.full((2048, 1024), n, np.int32) for n in range(4)}
        return {key: jax.device_put(row, sharding) for key, row in rows.items()}

    either.save(1, placed("a")).result()
    copied = count_copies(monkeypatch)
    report = either.save(2, placed("a", None)).report()

    assert 0 == report.sent_bytes
    assert [] == copied
    assert either.verify(2).ok


@pytest.mark.slow
def test_only_what_has_no_digest_before_it_is_copied_is_asked_about(
    either: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree: dict[str, Any] = {f"x{n}": np.full(2 * MIB, n, np.uint32) for n in range(20)}
    tree["odd"] = np.arange(2003 * 3001, dtype=np.uint32).reshape(2003, 3001)
    either.save(1, tree).result()
    padded = either.open(1).leaves["odd"].chunk_count
    asked: list[int] = []
    found = Upload._found

    def counted(self: Upload, ref: Any, sums: Sums, timeout: Any = None) -> set[int]:
        asked.append(len(sums))
        return found(self, ref, sums, timeout)

    monkeypatch.setattr(Upload, "_found", counted)
    changed = {key: leaf + 1 for key, leaf in tree.items()}
    changed["odd"] = tree["odd"]
    report = either.save(2, changed).report()

    assert padded > 1
    assert padded == sum(asked)
    assert 20 * (8 * MIB + 4) == report.sent_bytes
    assert np.array_equal(tree["odd"], either.restore(2)["odd"])


def test_what_did_not_change_is_copied_after_all_where_the_store_lost_it(
    either: store.Run, server: ServerProcess
) -> None:
    tree = {f"x{n}": np.full(2 * MIB, n, np.uint32) for n in range(3)}
    either.save(1, tree).result()
    for file in (server.root / "data" / either.name / "pool").rglob("*"):
        if file.is_file():
            file.unlink()

    report = either.save(2, tree).report()

    assert report.total_bytes == report.sent_bytes
    assert either.verify(2).ok
    assert np.array_equal(tree["x2"], either.restore(2)["x2"])


def test_a_tree_of_the_same_form_is_planned_once() -> None:
    planner = Planner()
    first, values = planner.plan(TREE, b"")
    again, changed = planner.plan({"x": TREE["x"] + 1, "y": TREE["y"]}, b"")
    assert first is again
    assert TREE["x"] is values[0]
    assert changed[0][0] == 1
    for other in ({"x": TREE["x"]}, {**TREE, "y": np.ones(8)}, {**TREE, "y": 1.0}):
        assert first is not planner.plan(other, b"")[0]
    assert first is not planner.plan(TREE, b"else")[0]


def test_keys_that_are_equal_and_not_the_same_are_planned_each() -> None:
    planner, x = Planner(), np.ones(3)
    for key, name in ((True, "True"), (1, "1"), (1.0, "1.0"), (1, "1")):
        assert (name,) == planner.plan({key: x}, b"")[0].keys
    assert planner.plan({1: x}, b"")[0] is planner.plan({1: x + 1}, b"")[0]


@pytest.mark.slow
def test_threads_that_copy_one_leaf_copy_the_right_shards() -> None:
    """When several threads list the shards of an array for the first time, jax may
    list some shards twice and miss others."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
    rows = [np.arange(64, dtype=np.int32) + n for n in range(1500)]
    tree = [jax.device_put(row, sharding) for row in rows]
    plan, values = Planner().plan(tree, b"")
    source, wrong = TreeSource(plan, values), []
    ordinals = {leaf.key: n for n, leaf in enumerate(plan.tree.leaves)}

    def copy() -> None:
        into = np.zeros(64 * 4, np.uint8)
        for n, row in enumerate(rows):
            source.copy(ordinals[str(n)], into)
            if not np.array_equal(into.view(np.int32), row):
                wrong.append(n)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=copy) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [] == wrong


def test_an_array_of_which_jax_lists_not_all_shards_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
    array = jax.device_put(np.arange(64, dtype=np.int32), sharding)
    # as it is where another thread is at it; see above
    listed = [array.addressable_data(n) for n in range(3)]
    monkeypatch.setattr(type(array), "addressable_data", lambda _, n: listed[n])
    plan, values = Planner().plan({"x": array}, b"")

    with pytest.raises(
        store.UnavailableError,
        match=r"leaf 'x': expected shards on 8 devices, got 3 .*save a copy of",
    ):
        TreeSource(plan, values).copy(0, np.zeros(64 * 4, np.uint8))


def test_what_lies_on_other_devices_is_copied_as_what_lies_on_the_host() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
    rows = jax.device_put(jnp.arange(2**21, dtype=jnp.bfloat16), sharding)
    keys = jax.device_put(jax.random.split(jax.random.key(3), 16), sharding)
    tree = {**TREE, "rows": rows, "keys": keys, "n": 3, "many": [rows[:9]] * 40}
    plan, values = Planner().plan(tree, b"")
    near, far = (
        TreeSource(plan, values),
        TreeSource(dataclasses.replace(plan, is_remote=True), values),
    )

    for ordinal in [*range(plan.tree.chunk_count), 0]:
        size = int(plan.tree.stored_lengths[ordinal]) - 4
        copies = [np.zeros(size, np.uint8) for _ in range(2)]
        near.copy(ordinal, copies[0])
        far.copy(ordinal, copies[1])
        assert copies[0].tobytes() == copies[1].tobytes()
        read = [source.in_order(ordinal) for source in (near, far)]
        if None not in read:
            assert all((np.concatenate(r or []) == copies[0]).all() for r in read)
        assert read.count(None) in (0, 2)


def test_values_that_cannot_be_stored_are_rejected_in_a_known_form_too() -> None:
    planner = Planner()
    planner.plan({"n": 1, "x": jnp.ones(3)}, b"")
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(store.UnsupportedLeafError, match="'n': expected Unicode"):
        planner.plan({"n": "\ud800", "x": jnp.ones(3)}, b"")
    with pytest.raises(
        store.UnsupportedLeafError, match="'x': expected a live array, got a deleted"
    ):
        planner.plan({"n": 1, "x": deleted}, b"")


# --- streams that break -----------------------------------------------------------


def things(*counts: int) -> tuple[ResendWindow[list[int]], list[list[int]]]:
    coming = iter([[0] * count for count in counts])
    done: list[list[int]] = []
    take: Callable[[], list[int] | None] = lambda: next(coming, None)  # noqa: E731
    return ResendWindow(take, len, done.append), done


def test_what_is_not_acknowledged_is_sent_again() -> None:
    sent, done = things(2, 3, 1)
    first = sent.stream()
    taken = list(itertools.islice(first, 2))
    first.acknowledge(2)
    first.acknowledge(2)
    assert [taken[0]] == done

    second = sent.stream()
    again = list(second)
    assert [3, 1] == list(map(len, again))
    assert not sent.is_done
    second.acknowledge(4)
    assert sent.is_done
    assert [2, 3, 1] == list(map(len, done))


def test_what_a_broken_stream_takes_late_is_sent_by_one_after_the_next() -> None:
    """The thread that feeds a broken stream may be waiting for it."""
    sent, done = things(1, 2, 1)
    late = iter(sent.stream())
    next(late)
    second = sent.stream()
    going = iter(second)
    next(going)  # the first again
    assert 2 == len(next(late))  # lost with its stream
    assert 1 == len(next(going))
    assert [] == list(going)
    second.acknowledge(2)  # the first and the third

    assert not sent.is_done
    third = sent.stream()
    assert [2] == list(map(len, third))
    third.acknowledge(2)
    assert sent.is_done
    assert [1, 1, 2] == list(map(len, done))


# --- batches that are waited for ---------------------------------------------------


@pytest.fixture
def starving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[store.Client]:
    """A client of little memory, of a service that waits for whole batches; it sends
    chunks as over a socket."""
    monkeypatch.setattr(batches, "BATCH_SECONDS", 3600.0)
    with store.connect(tmp_path.as_uri(), staging_bytes=MIN_BUDGET_BYTES) as client:
        send_through_server(client)
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("part", [2, 16])
def test_memory_that_holds_more_than_is_sent_is_acknowledged_all_the_same(
    starving: store.Client, part: int
) -> None:
    """Of slabs of small chunks, of which a few are new."""
    run, size = starving.run("tests/starving"), 256 << 10
    tree = {f"x{n:04}": np.full(size, n % 251, np.uint8) for n in range(1024)}
    run.save(1, tree).result(timeout=120)
    for key in list(tree)[::part]:
        tree[key] = tree[key] + 1

    run.save(2, tree).result(timeout=120)

    found = run.restore(2)
    assert all(np.array_equal(tree[key], found[key]) for key in tree)


@pytest.mark.parametrize("others", [1, 3])
def test_a_stream_that_is_waited_for_hears_of_it_though_others_have_sent_nothing(
    others: int,
) -> None:
    """Of those who ask for the next slab one waits for it, the others for that one."""
    for _ in range(4):
        slab_queue, slab = SlabQueue(StagingPool(MIB), is_open=True), Slab(0, (MIB,))
        wanted = WantedSlabs(slab_queue, lambda _: None)
        sharing, *idle = [
            ResendWindow(wanted.taker(), lambda _: 1, lambda _: None, lambda _: MIB)
            for _ in range(1 + others)
        ]
        feed = iter(sharing.stream())
        all_memory = FilledSlab(slab, [0], slab_queue.memory(slab.size))
        slab_queue.put(all_memory)
        assert all_memory is next(feed)

        with ThreadPoolExecutor(2 + others) as pool:
            asking = [pool.submit(each.wait) for each in idle]
            ending = pool.submit(list, feed)
            snapshot = pool.submit(slab_queue.memory, slab.size)
            try:
                assert [] == ending.result(timeout=60)
            finally:
                slab_queue.give_back(all_memory)
                assert snapshot.result() is not None
                slab_queue.end()
                wait(asking)


@pytest.mark.slow
def test_runs_that_share_memory_are_acknowledged_all_the_same(
    starving: store.Client,
) -> None:
    tree = {f"x{n}": np.full(8 * MIB, n, np.uint8) for n in range(12)}
    runs = [starving.run(f"tests/starving-{n}") for n in range(4)]

    with ThreadPoolExecutor(len(runs)) as pool:
        for saving in [pool.submit(run.save, 1, tree) for run in runs]:
            saving.result(timeout=120).result(timeout=120)

    assert all(run.verify(1).ok for run in runs)
