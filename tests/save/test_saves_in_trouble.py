"""Saves in trouble: nothing hangs, nothing leaks, nothing is sent for nothing."""

import asyncio
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.rpc import streams
from storesvc.save import reuse
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._chunks.memory import StagingPool
from storesvc_client._rpc import retry
from storesvc_client._save.chunk_streams import ResendWindow
from tests.support.contract import tree_of
from tests.support.server_process import ServerProcess
from tests.support.sessions import send_through_server

MIB = 1 << 20


@pytest.fixture(params=["direct", "streamed"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[store.Client]:
    """A client of an embedded store, that writes files by itself or not."""
    with store.connect(f"file://{tmp_path}/store", staging_bytes=128 * MIB) as client:
        if request.param == "streamed":
            send_through_server(client)
        yield client


def block_pool(folder: Path) -> Path:
    """Puts a file in the place of the pool of the only run, and returns it: nothing can
    be written below it."""
    pool = next((folder / "store").rglob("pool"))
    pool.rename(pool.with_name("kept"))
    pool.write_bytes(b"")
    return pool


def test_a_save_that_fails_gives_all_its_staging_back(
    local: store.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.2)
    run = local.run("tests/leak")
    run.save(1, {"x": np.zeros(4)}).result()
    block_pool(tmp_path)
    state = {"x": np.arange(24 * MIB, dtype=np.float32)}
    with pytest.raises(store.StoreError):
        run.save(2, state, base=None).result()
    assert 0 == local._session.staging._used_bytes


_INTERRUPTED = """
import os, signal, sys
import storesvc_client as store
from storesvc_client._save.saver import PendingSave

address, server = sys.argv[1:]
waits = PendingSave.wait

def wait(save):
    PendingSave.wait = waits
    signal.raise_signal(signal.SIGINT)

PendingSave.wait = wait
client = store.connect(address)
os.kill(int(server), signal.SIGSTOP)
client.run("tests/stopped").save(1, {"x": 1})
client.close()
"""


@pytest.mark.slow
def test_ctrl_c_gives_a_save_up_that_is_waited_for_and_says_so_once(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, server.address, str(server.pid)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    said = (
        "the save of tests/stopped@1 was abandoned; a save of the same step "
        "resumes it\n"
    )
    assert ended.stderr.endswith(f"\nKeyboardInterrupt\n{said}")
    assert 1 == ended.stderr.count("Traceback")


@pytest.mark.slow
def test_saves_that_fail_do_not_stop_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.2)
    client = store.connect(f"file://{tmp_path}/store", staging_bytes=128 * MIB)
    run = client.run("tests/leak")
    run.save(1, {"x": np.zeros(4)}).result()
    pool = block_pool(tmp_path)
    state = {"x": np.arange(30 * MIB, dtype=np.float32)}
    for _ in range(2):
        with pytest.raises(store.StoreError):
            run.save(2, state, base=None).result()
    pool.unlink()
    pool.with_name("kept").rename(pool)

    with client:
        run.save(3, state, base=None).result()


@pytest.mark.slow
def test_a_save_whose_memory_comes_late_is_not_rejected_as_stalled(
    local: store.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.2)
    staging = local._session.staging
    held = staging.take(128 * MIB, cancelled=lambda: False, waiting=lambda: None)
    assert held is not None  # by a slow save of another run
    threading.Timer(4, lambda: staging.give_back(held)).start()
    run = local.run("tests/stall")
    state = {"x": np.arange(1 << 20, dtype=np.float32)}
    assert 1 == run.save(1, state).result().step


@pytest.mark.parametrize(
    "state",
    [
        {"x": np.arange(5_000_011, dtype=np.float32)},
        {"x": np.arange(5_000_000, dtype=np.float32)},
    ],
    ids=["padded", "whole"],
)
def test_a_save_of_the_same_tree_sends_nothing(
    local: store.Client, state: dict[str, Any]
) -> None:
    run = local.run("tests/same")
    run.save(1, state).result()
    sent = [run.save(step, state).report().sent_bytes for step in (2, 3)]
    assert [0, 0] == sent


def test_what_a_broken_stream_takes_late_is_not_lost() -> None:
    taken, go_on = threading.Event(), threading.Event()
    left = ["late"]

    def take() -> str | None:
        if left:
            found = left.pop()
            taken.set()
            go_on.wait()  # it makes the sums
            return found
        return None

    things = ResendWindow(take, len, lambda _: None)
    broken = iter(things.stream())
    late = threading.Thread(target=lambda: next(broken))
    late.start()
    taken.wait()
    assert [] == list(things.stream())  # the stream that follows
    threading.Timer(0.3, go_on.set).start()
    assert not things.is_done
    late.join()


def test_what_is_taken_late_is_given_back_too() -> None:
    taken, go_on = threading.Event(), threading.Event()
    given_back: list[str] = []

    def take() -> str | None:
        taken.set()
        go_on.wait()
        return "late"

    things = ResendWindow(take, len, given_back.append)
    broken = iter(things.stream())
    late = threading.Thread(target=lambda: next(broken, None))
    late.start()
    taken.wait()
    things.drop()
    go_on.set()
    late.join()
    assert ["late"] == given_back


def resident() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def take_filled(staging: StagingPool, size: int) -> Any:
    """Returns a buffer whose pages are in memory."""
    buffer = staging.take(size, cancelled=lambda: False, waiting=lambda: None)
    assert buffer is not None
    buffer[:] = 1
    return buffer


@pytest.mark.slow
def test_buffers_of_many_sizes_stay_within_the_budget() -> None:
    staging = StagingPool(256 * MIB)

    def fill(size: int) -> None:
        count = 256 * MIB // size
        buffers = [take_filled(staging, size) for _ in range(count)]
        order = np.random.default_rng(0).permutation(len(buffers))
        for at in order:
            staging.give_back(buffers[at])

    before = resident()
    fill(4 * MIB)
    held = [take_filled(staging, 16 * MIB) for _ in range(12)]  # of another tree
    assert 12 == len(held)
    assert resident() - before <= (256 + 32) * MIB


def test_a_storage_that_fails_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 10_000)
    with store.connect(f"file://{tmp_path}/store") as client:
        run = client.run("tests/reported")
        run.save(1, {"x": np.zeros(4)}).result()
        block_pool(tmp_path)
        with pytest.raises(store.UnavailableError, match="the storage failed"):
            run.save(2, {"x": np.zeros(1 << 18)}, base=None).result()


def test_a_write_that_is_cancelled_as_its_file_is_made_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = os.open

    def slow(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if str(path).endswith("file") and flags & os.O_CREAT:
            begun.set()
            go_on.wait()
        return real(path, flags, *arguments, **more)

    async def cancelled() -> None:
        bucket = await TensorStoreBucket.open(tmp_path.as_uri())
        monkeypatch.setattr(os, "open", slow)
        task = asyncio.create_task(bucket.create("pool/u/file"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)

    asyncio.run(cancelled())
    links = list(Path("/proc/self/fd").iterdir())
    opened = [str(link.readlink()) for link in links if link.is_symlink()]
    assert [] == [name for name in opened if "pool/u/file" in name]


def test_of_a_chunk_that_was_stored_often_each_version_is_found_up_to_a_bound() -> None:
    tree = tree_of(3)
    rows = [(n % 2, n % 40, (n % 40).to_bytes(16, "big")) for n in range(400)]
    rows.sort(key=lambda row: row[0])
    places = ChunkLocations.of_rows([("f", 1004 * n, 1004) for n in range(400)])

    found = reuse._sources(tree, Sums.of_rows(rows), places)

    assert reuse.MAX_VERSIONS == len(found)
    few = [row for row in rows if row[1] < 6]
    found = reuse._sources(tree, Sums.of_rows(few), places.take(np.arange(len(few))))
    assert 3 == len(found)
    for row in few:
        (claims,) = [
            c
            for c in reuse.find_claims(tree, Sums.of_rows([row]), found)
            if len(c.rows)
        ]
        assert row[0] == claims.source.sums.ordinal[claims.found[0]]
