"""A store in a bucket works like a store on disk, and survives network errors."""

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.storage import hedging, requests
from storesvc.storage.hedging import Limits
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._rpc import retry
from tests.conftest import GIVEN_BUCKET, gcs_root
from tests.fake_gcs import ALWAYS, Delay, FakeGcs, Lost, Reset, Stall, Status, Truncate
from tests.support.command_line import document, refusal
from tests.support.examples import sampled, soaked
from tests.support.server_process import EndedError, ServerProcess

MIB = 1 << 20


@pytest.fixture
def root(
    bucket_storage: None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """Root of a fresh store, without hedging, as the tests count bytes."""
    monkeypatch.setattr(hedging, "READS", Limits(floor_seconds=600))
    if GIVEN_BUCKET:
        yield gcs_root()
        return
    emulator: FakeGcs = request.getfixturevalue("gcs")
    emulator.clear()
    yield gcs_root()
    emulator.clear()


@pytest.fixture(
    params=["embedded", pytest.param("served", marks=pytest.mark.slow), "direct"]
)
def client(
    request: pytest.FixtureRequest, root: str, tmp_path: Path
) -> Iterator[store.Client]:
    """A client of the store."""
    if request.param == "embedded":
        with store.connect(root) as connected:
            yield connected
        return
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    direct = root if request.param == "direct" else None
    with store.connect(server.address, direct=direct) as connected:
        yield connected
    server.kill()


def sharded(rows: int = 1024) -> dict[str, Any]:
    """Returns a tree over all devices, of some 9 MiB."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    values = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024)
    return {
        "both": jax.device_put(values, NamedSharding(mesh, PartitionSpec("a", "b"))),
        "all": jax.device_put(values[:64], NamedSharding(mesh, PartitionSpec())),
        "host": np.arange(rows * 1024, dtype=np.int32),
        "step": 7,
    }


def assert_equal(tree: dict[str, Any], found: dict[str, Any]) -> None:
    assert tree.keys() == found.keys()
    for key, leaf in tree.items():
        assert np.array_equal(leaf, found[key])


@pytest.mark.emulated
def test_a_tree_round_trips_and_is_written_once(
    client: store.Client, gcs: FakeGcs
) -> None:
    tree, run = sharded(), client.run("tests/gcs")

    report = run.save(1, tree).report()
    stored = gcs.stored_bytes
    found = run.restore(1, like=tree)

    assert_equal(tree, found)
    assert tree["both"].sharding == found["both"].sharding
    assert report.total_bytes <= stored <= 1.02 * report.total_bytes
    assert gcs.sent_bytes < 1.05 * report.total_bytes
    assert run.verify(1).ok


@pytest.mark.emulated
def test_unchanged_chunks_are_not_written_again(
    client: store.Client, gcs: FakeGcs
) -> None:
    tree, run = sharded(), client.run("tests/gcs")
    run.save(1, tree).result()
    before = gcs.stored_bytes

    run.save(2, {**tree, "step": 8}).result()

    assert gcs.stored_bytes - before < 64 << 10
    assert_equal({**tree, "step": 8}, run.restore(2, like=tree))


@pytest.mark.slow
def test_a_client_in_the_process_and_a_server_share_a_store(
    root: str, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    tree = sharded(128)
    with store.connect(server.address) as served, store.connect(root) as embedded:
        served.run("tests/gcs").save(1, tree).result()
        assert_equal(tree, embedded.run("tests/gcs").restore("latest", like=tree))
        embedded.run("tests/gcs").save(2, tree).result()
        assert 2 == served.run("tests/gcs").latest().step
    server.kill()


def test_a_purged_checkpoint_is_removed_from_the_bucket(
    client: store.Client, root: str
) -> None:
    run = client.run("tests/gcs")
    for step in (1, 2):
        run.save(step, sharded(128), base=None).result()
    objects = places(root)

    run.delete(1, purge_delay=timedelta(0))
    run.purge(1)
    for _ in client.collect(grace=timedelta(0)):
        pass

    assert run.verify(2).ok
    left = places(root)
    assert len(left) < len(objects)
    pools = [place for place in objects if "/pool/" in place]
    assert 2 * len([place for place in left if "/pool/" in place]) == len(pools)


def places(root: str) -> list[str]:
    """Returns the names of the objects below a root."""

    async def listed() -> list[str]:
        return await (await TensorStoreBucket.open(root)).list("")

    return asyncio.run(listed())


def test_a_flipped_bit_in_an_object_is_reported(
    client: store.Client, root: str
) -> None:
    run = client.run("tests/gcs")
    run.save(1, sharded(128)).result()

    async def flip() -> None:
        bucket = await TensorStoreBucket.open(root)
        pool = [place for place in await bucket.list("") if "/pool/" in place]
        files = {place: await bucket.read(place) for place in pool}
        sizes = {place: len(file.data) for place, file in files.items() if file}
        largest = max(sizes, key=lambda place: sizes[place])
        file = files[largest]
        assert file is not None
        data = bytearray(file.data)
        data[0] ^= 1  # of a chunk; there are unused bytes between two
        await bucket.write(largest, bytes(data))

    asyncio.run(flip())

    with pytest.raises(store.DataLossError):
        run.restore(1)


@pytest.mark.emulated
@pytest.mark.parametrize(
    "action", soaked([Status(503), Status(429), Lost(), Reset()], every=2)
)
def test_a_save_outlasts_transient_errors(
    client: store.Client, gcs: FakeGcs, action: Any
) -> None:
    run, tree = client.run("tests/gcs"), sharded(128)
    for after in range(0, 12, 3):
        gcs.fault("POST /upload", action, after=after)
        gcs.fault("GET /storage", action, after=after)

    run.save(1, tree).result()
    run.save(2, tree).result()

    assert [2, 1] == [found.step for found in run.checkpoints()]
    assert run.verify(1).ok


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize(
    "action", sampled([Status(503), Reset(), Truncate(100)], every=3)
)
def test_a_restore_outlasts_transient_errors(
    client: store.Client, gcs: FakeGcs, action: Any
) -> None:
    run, tree = client.run("tests/gcs"), sharded()
    run.save(1, tree).result()
    for after in range(0, 12, 3):
        gcs.fault("GET /", action, after=after)

    assert_equal(tree, run.restore(1, like=tree))


@pytest.mark.slow
@pytest.mark.emulated
def test_a_commit_that_a_bucket_does_not_answer_is_hedged(
    client: store.Client, gcs: FakeGcs
) -> None:
    run, tree = client.run("tests/gcs"), sharded()
    # the first one reserves the step
    gcs.fault("POST /upload.*/checkpoints/", Stall(), after=1)

    run.save(1, tree).result(timeout=requests.ANSWER_SECONDS / 2)

    assert_equal(tree, run.restore(1, like=tree))


@pytest.mark.slow
@pytest.mark.emulated
def test_a_restore_does_not_wait_for_a_hold_that_is_not_answered(
    client: store.Client, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    run, tree = client.run("tests/gcs"), sharded()
    run.save(1, tree).result()
    gcs.fault("POST /upload.*/holds/", Stall(), times=ALWAYS)

    began = time.monotonic()
    assert_equal(tree, run.restore(1, like=tree))

    assert time.monotonic() - began < requests.ANSWER_SECONDS / 2
    assert "tests/gcs@1: no response about its hold" in caplog.text


@pytest.mark.emulated
@pytest.mark.parametrize("after", soaked([3, 0, 6], every=3))
def test_a_restore_ends_at_its_deadline_wherever_the_bucket_stops_answering(
    client: store.Client, gcs: FakeGcs, after: int
) -> None:
    run, tree = client.run("tests/gcs"), sharded()
    run.save(1, tree).result()
    gcs.fault("", Stall(), times=ALWAYS, after=after)

    began = time.monotonic()
    with suppress(store.UnavailableError):  # it may have received everything by then
        run.restore(1, like=tree, deadline=timedelta(seconds=1))

    assert time.monotonic() - began < 20
    gcs.clear()


@pytest.mark.slow
@pytest.mark.emulated
def test_an_outage_is_an_error_that_names_the_bucket(
    gcs: FakeGcs, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SEND_SECONDS", 0.0)
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.0)
    with store.connect(root) as client:
        run = client.run("tests/gcs")
        run.save(1, {"x": 1}).result()
        gcs.fault("GET /", Status(503), times=ALWAYS)

        with pytest.raises(store.UnavailableError, match=f"{root}/.*storage failed"):
            run.checkpoint(1)

        # one of each call, unless another one was rejected just before
        refused = [asked for asked in gcs.log if asked.status == 503]
        assert 1 <= len(refused) <= retry.LEAST_ATTEMPTS
        gcs.clear()
        monkeypatch.undo()
        assert 1 == run.latest().step


@pytest.mark.slow
@pytest.mark.emulated
def test_a_call_that_waits_for_a_storage_fails_with_that_reason(
    gcs: FakeGcs, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.0)
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    with store.connect(server.address, timeout=4) as client:
        gcs.fault("GET /", Stall(), times=ALWAYS)
        with pytest.raises(store.UnavailableError, match="waited for the storage"):
            client.run("tests/gcs").checkpoint(1)
    server.kill()


@pytest.mark.emulated
@pytest.mark.parametrize(
    "arguments",
    [("ls",), ("ls", "a/b"), ("tree", "a/b@1"), ("get", "a/b@1:x"), ("du",), ("gc",)],
)
def test_reading_a_bucket_without_a_store_creates_none(
    gcs: FakeGcs, root: str, arguments: tuple[str, ...]
) -> None:
    said = refusal(f"{root}?concurrency=9", *arguments)

    assert said.startswith(f"{root} holds no store; expected the root of one, which a")
    # other tests' servers may still delete what their commits left
    own = f"{root.partition('//bucket/')[2]}/"
    assert {"GET"} == {
        asked.method for asked in gcs.log if own in unquote(asked.target)
    }


def test_a_store_in_a_bucket_needs_no_server(root: str) -> None:
    with store.connect(root) as client:
        client.run("prod/tiny").save(3, {"w": 1}).result()

    assert ["prod/tiny"] == [run["name"] for run in document(root, "ls")]


def test_missing_packages_of_a_bucket_are_an_error_that_names_the_extra(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(store.InvalidRequestError, match=r"storesvc\[server,gcs\]"):
        store.connect(root)


@pytest.mark.slow
def test_an_invalid_root_of_a_bucket_is_rejected_in_one_sentence(
    root: str, tmp_path: Path
) -> None:
    nowhere = f"gs://storesvc-{uuid.uuid4().hex}/x"
    with pytest.raises(
        store.InvalidRequestError, match=f"{nowhere}: expected an exist"
    ):
        store.connect(nowhere)
    with pytest.raises(store.InvalidRequestError, match="concurrency=1 to"):
        store.connect(f"{root}?concurrency=0")
    server = ServerProcess(tmp_path, tmp_path, uri=nowhere)
    with pytest.raises(EndedError, match="expected an existing bucket"):
        server.start()
    assert "Traceback" not in server.log


@pytest.mark.skipif(not GIVEN_BUCKET, reason="takes a minute: make test-gcs")
def test_the_demo_holds_in_a_bucket(root: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    command = [sys.executable, "-m", "storesvc_client.cli", "demo"]

    demo = subprocess.run(
        [*command, "--store", server.address],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == demo.returncode, demo.stdout + demo.stderr
    server.kill()


def left_of_uploads(root: str) -> list[str]:
    """Returns the objects that only uploads in progress need."""

    async def listed() -> list[str]:
        bucket = await TensorStoreBucket.open(root)
        return [place for place in await bucket.list("") if "/staging/" in place]

    return asyncio.run(listed())


@pytest.mark.emulated
@pytest.mark.slow
def test_nothing_of_an_upload_is_left_when_its_server_has_ended(
    root: str, gcs: FakeGcs, bucket_server: ServerProcess
) -> None:
    gcs.fault("DELETE .*staging", Delay(1.5), times=ALWAYS)
    with store.connect(bucket_server.address) as client:
        client.run("tests/gcs").save(1, sharded(128)).result()
    bucket_server.stop()

    assert [] == left_of_uploads(root)


@pytest.mark.emulated
@pytest.mark.slow
def test_a_save_does_not_wait_for_the_deletion_of_its_staging(
    root: str, gcs: FakeGcs, bucket_server: ServerProcess
) -> None:
    tree = sharded(128)
    with store.connect(bucket_server.address) as client:
        run = client.run("tests/gcs")
        gcs.fault("DELETE .*staging", Stall(), times=ALWAYS)
        run.save(1, tree).result(timeout=requests.ANSWER_SECONDS / 2)
        assert_equal(tree, run.restore(1, like=tree))
        assert left_of_uploads(root)


@pytest.mark.emulated
def test_a_new_process_finds_the_latest_checkpoint_by_two_requests(
    root: str, gcs: FakeGcs
) -> None:
    def look() -> tuple[int, int]:
        """Returns the newest step, and the requests that show it."""
        with store.connect(root) as client:
            run, before = client.run("tests/hints"), len(gcs.log)
            step = run.latest().step
            return step, len(gcs.log) - before

    with store.connect(root) as client:
        run = client.run("tests/hints")
        for step in range(1, 6):
            run.save(step, {"x": np.full(9, step)}).result()
    bucket = asyncio.run(TensorStoreBucket.open(root))
    hint = RunPaths(RunName("tests", "hints")).recent
    assert [hint] == asyncio.run(bucket.list(hint))
    assert (5, 2) == look()

    # A label changes the slot; a deletion and a collection free it; it is saved again.
    with store.connect(root) as client:
        run = client.run("tests/hints")
        run.update(5, labels={"a": "b"})
        assert (5, 3) == look()
        run.delete(5, purge_delay=timedelta())
        list(client.collect("tests/hints", grace=timedelta()))
        assert [hint] == asyncio.run(bucket.list(hint))
        step, _ = look()
        assert 4 == step
        run.save(5, {"x": np.full(9, 50)}).result()
        assert 5 == look()[0]
    assert (5, 2) == look()
    asyncio.run(bucket.delete(hint))
    assert (5, 3) == look()


@pytest.mark.emulated
def test_a_hint_that_cannot_be_written_is_logged_and_fails_nothing(
    root: str, gcs: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    gcs.fault("POST .*recent", Status(403), times=ALWAYS)
    with store.connect(root) as client:
        run = client.run("tests/hints")
        run.retention.set(store.KeepLatest(1))
        for step in (1, 2):
            run.save(step, {"x": np.full(9, step)}).result()
    gcs.clear()

    assert "the hint of the newest checkpoint of tests/hints ended early" in caplog.text
    with store.connect(root) as client:
        assert [2] == list(client.run("tests/hints").steps())
