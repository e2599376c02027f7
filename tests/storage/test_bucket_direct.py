"""A direct client reads and writes data files itself, with few extra bytes."""

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.format.grids import whole
from storesvc.storage import hedging
from storesvc.storage.hedging import Limits
from storesvc.storage.requests import HedgedSender, await_future
from storesvc.storage.throttle import Window
from storesvc_client import _session
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._restore import sources
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._save import direct as data_files
from storesvc_client._storage.bucket import BucketRoot
from tests.conftest import gcs_root
from tests.fake_gcs import ALWAYS, Delay, FakeGcs, Logged, Status
from tests.storage.freed_calls import assert_calls_freed
from tests.support.examples import sampled
from tests.support.gcs_calls import BUCKET
from tests.support.server_process import ServerProcess

MIB = 1 << 20

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def served(
    gcs: FakeGcs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, str]]:
    """A server over a bucket, and its root."""
    directory, root = tmp_path_factory.mktemp("server"), gcs_root()
    server = ServerProcess(directory, directory, uri=root)
    server.start()
    gcs.clear()
    yield server, root
    server.kill()


@pytest.fixture
def direct(
    served: tuple[ServerProcess, str], gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[store.Client]:
    """A direct client of the server, without hedging, so that the count of its requests
    does not depend on the speed of the machine."""
    monkeypatch.setattr(hedging, "READS", Limits(floor_seconds=600))
    gcs.clear()
    server, root = served
    with store.connect(server.address, direct=f"{root}?concurrency=64") as client:
        yield client
    gcs.clear()


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random(shape, np.float32)


def mesh(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), tuple("ab"[: len(sizes)]))


def of_data(gcs: FakeGcs, method: str) -> list[Logged]:
    """Returns the requests for data files."""
    asked = [one for one in gcs.log if one.method == method]
    return [one for one in asked if re.search("pool(%2F|/)", one.target)]


def staged(gcs: FakeGcs) -> list[Logged]:
    """Returns the requests for staging tables."""
    return [one for one in gcs.log if re.search("staging(%2F|/)", one.target)]


def read_bytes(gcs: FakeGcs) -> int:
    """Returns the bytes that were read from data files."""
    return sum(one.sent_bytes for one in of_data(gcs, "GET"))


@pytest.mark.slow
def test_direct_data_bypasses_the_server(
    direct: store.Client, served: tuple[ServerProcess, str], gcs: FakeGcs
) -> None:
    tree, run = {"x": drawn(2000, 1000), "small": drawn(3)}, direct.run("tests/direct")

    report = run.save(1, tree).report()
    sent = gcs.sent_bytes
    found = run.restore(1)

    assert tree["x"].tobytes() == found["x"].tobytes()
    assert tree["small"].tobytes() == found["small"].tobytes()
    assert report.total_bytes <= gcs.stored_bytes <= 1.02 * report.total_bytes
    assert report.total_bytes <= gcs.sent_bytes - sent < 1.05 * report.total_bytes
    assert run.verify(1).ok
    log = served[0].log
    assert "ReadChunks tests/direct" not in log


LAYOUTS: dict[str, Callable[[], NamedSharding]] = {
    "as saved": lambda: NamedSharding(mesh(8), PartitionSpec("a")),
    "tp-4 x dp-2": lambda: NamedSharding(mesh(2, 4), PartitionSpec(None, "b")),
    "one device": lambda: NamedSharding(mesh(1), PartitionSpec()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", sampled(LAYOUTS.values(), every=3), ids=list(LAYOUTS)
)
def test_a_restore_reads_little_more_than_it_returns(
    direct: store.Client, gcs: FakeGcs, layout: Callable[[], NamedSharding]
) -> None:
    tree = {"x": drawn(2048, 2048), "y": drawn(8 * 2100, 640), "z": drawn(512, 64)}
    spread = NamedSharding(mesh(8), PartitionSpec("a"))
    run = direct.run("tests/layouts")
    step = list(LAYOUTS.values()).index(layout)
    run.save(step, {k: jax.device_put(v, spread) for k, v in tree.items()}).result()
    target = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout())
        for key, leaf in tree.items()
    }
    gcs.clear()

    back = run.restore(step, like=target)

    assert all(tree[k].tobytes() == np.asarray(back[k]).tobytes() for k in tree)
    needed = sum(leaf.nbytes for leaf in tree.values())
    assert needed < read_bytes(gcs) < 1.05 * needed


def test_a_selective_restore_reads_only_what_it_returns(
    direct: store.Client, gcs: FakeGcs
) -> None:
    tree = {f"{n:03}": drawn(512, 512, seed=n) for n in range(20)}
    run = direct.run("tests/selected")
    run.save(0, tree).result()
    gcs.clear()

    back = run.restore(0, select=["003", "004", "017"])

    assert ["003", "004", "017"] == sorted(back)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in back)
    assert 3 * MIB < read_bytes(gcs) < 1.05 * 3 * MIB


def test_many_small_leaves_take_few_requests(
    direct: store.Client, gcs: FakeGcs
) -> None:
    tree = {f"{n:04}": np.full(n % 50, n) for n in range(3000)}
    run = direct.run("tests/small")
    run.save(0, tree).result()
    gcs.clear()

    back = run.restore(0)

    assert all(np.array_equal(tree[key], back[key]) for key in tree)
    assert len(of_data(gcs, "GET")) < 20


@pytest.mark.slow
def test_a_save_writes_objects_of_about_equal_size(
    direct: store.Client, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "OBJECT_BYTES", 6 * MIB)
    tree = {f"{n}": drawn(1024, 1024, seed=n) for n in range(16)}  # a slab each
    run = direct.run("tests/objects")

    run.save(0, tree).result()

    sizes = [one.stored_bytes for one in of_data(gcs, "PUT")]
    assert 8 <= len(sizes) <= 16
    assert max(sizes) < 9 * MIB
    back = run.restore(0)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


def test_objects_of_large_and_small_parts_hold_what_was_saved(
    direct: store.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large parts are sent from the memory of the caller, small ones are copied."""
    monkeypatch.setattr(data_files, "OBJECT_BYTES", MIB)
    rows = np.random.default_rng(0).integers(1, 90_000, 60).tolist()
    tree = {f"{n:02}": drawn(size, seed=n) for n, size in enumerate(rows)}
    tree["columns"] = jax.device_put(
        drawn(512, 512), NamedSharding(mesh(8), PartitionSpec(None, "a"))
    )
    run = direct.run("tests/parts")

    run.save(0, tree, snapshot="none").result()

    back = run.restore(0)
    assert all(
        np.asarray(tree[key]).tobytes() == np.asarray(back[key]).tobytes()
        for key in tree
    )
    assert run.verify(0).ok


def test_a_server_does_not_read_the_staging_tables_that_it_wrote(
    direct: store.Client, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "OBJECT_BYTES", MIB)
    monkeypatch.setattr(data_files, "TABLE_SECONDS", 0.0)  # or the commit has them all
    monkeypatch.setattr(data_files, "FILE_THREADS", 1)
    run = direct.run("tests/staged")
    gcs.clear()
    # the last data files come late, or the commit may bring the chunks of all
    gcs.fault("PUT .*pool", Delay(2.0), times=ALWAYS, after=2)

    run.save(0, {f"{n}": drawn(1 << 19, seed=n) for n in range(8)}).result()
    # the server deletes them after it has answered
    end = time.monotonic() + 60
    while {"POST", "GET", "DELETE"} != {one.method for one in staged(gcs)}:
        assert time.monotonic() < end, staged(gcs)
        time.sleep(0.01)

    reads = [one for one in staged(gcs) if "alt=media" in one.target]
    assert [] == reads


@pytest.mark.slow
def test_a_resumed_save_does_not_rewrite_stored_chunks(
    direct: store.Client, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "OBJECT_BYTES", MIB)
    monkeypatch.setattr(data_files, "OBJECT_THREADS", 2)
    monkeypatch.setattr(data_files, "TABLE_SECONDS", 0.0)  # it breaks much sooner
    tree = {f"{n}": drawn(1024, 1024, seed=n) for n in range(16)}
    run = direct.run("tests/broken")
    gcs.fault("PUT .*pool", Status(403), times=ALWAYS, after=8)

    with pytest.raises(store.PreconditionError, match="denies this to our credentials"):
        run.save(0, tree).result()
    gcs.clear()
    report = run.save(0, tree).report()

    # of the eight, some may not have been reported of when it broke
    assert report.sent_bytes <= report.total_bytes * 14 // 16
    back = run.restore(0)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


@pytest.mark.slow
def test_bytes_in_flight_are_bounded(
    direct: store.Client, gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BUCKET_READ_BYTES", 12 * MIB)
    tree = {f"{n}": drawn(1024, 1024, seed=n) for n in range(16)}
    run = direct.run("tests/bounded")
    run.save(0, tree).result()
    opened, arrays = run.open(0), dict[int, Any]()
    source: Any = get_reader(opened).open_source()

    def keep(buffers: Iterable[Buffer]) -> None:
        arrays.update({each.row: each.arrays[0] for each in buffers})

    rows = [(row, [whole(leaf.shape)]) for row, leaf in enumerate(tree.values())]
    assembly = Assembly(get_reader(opened).manifest, rows, name="x", place=keep)
    gcs.clear()
    gcs.fault("GET .*pool", Delay(0.05), times=ALWAYS)
    source.read(assembly.missing, assembly)

    assert 16 == len(arrays)
    assert 1 < gcs.most_pending <= 3


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", ["host", "none"])
def test_the_objects_of_a_save_in_flight_are_bounded(
    direct: store.Client,
    gcs: FakeGcs,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Literal["none", "host"],
) -> None:
    monkeypatch.setattr(data_files, "OBJECT_BYTES", 4 * MIB)
    monkeypatch.setattr(data_files, "OBJECT_THREADS", 2)
    tree = {f"{n}": drawn(1024, 1024, seed=n) for n in range(12)}  # an object each
    run = direct.run(f"tests/in-flight-{snapshot}")
    gcs.clear()
    gcs.fault("PUT .*pool", Delay(0.1), times=ALWAYS)

    run.save(0, tree, snapshot=snapshot).result()

    assert 12 <= len(of_data(gcs, "PUT"))
    # Two objects, and what the server writes at the same time; without a limit, 12.
    assert 1 < gcs.most_pending <= 5
    back = run.restore(0)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


@pytest.mark.slow
def test_a_restore_reads_while_its_hold_is_created(
    direct: store.Client, gcs: FakeGcs
) -> None:
    run = direct.run("tests/held")
    run.save(0, {"x": drawn(100)}).result()
    gcs.clear()
    gcs.fault("POST /upload.*/holds/", Delay(0.5), times=ALWAYS)

    run.restore(0)

    answered = [f"{one.method} {one.target}" for one in gcs.log]
    (read,) = [at for at, line in enumerate(answered) if "pool%2F" in line]
    (held,) = [
        at
        for at, line in enumerate(answered)
        if "POST" in line and "%2Fholds%2F" in line
    ]
    assert read < held


def test_buffers_are_freed_at_once(direct: store.Client) -> None:
    """They must not wait for Python's garbage collector, which restores pause."""
    run = direct.run("tests/freed")
    with assert_calls_freed():
        run.save(0, {"x": drawn(3 * MIB), "y": drawn(3)}).result()
        run.restore(0)


async def test_a_hedged_call_is_freed_though_both_its_requests_are_answered() -> None:
    requests: list[ts.Promise[bytes]] = []
    both = asyncio.Event()

    async def ask() -> bytes:
        new: tuple[ts.Promise[bytes], ts.Future[bytes]] = ts.Promise.new()
        requests.append(new[0])
        if len(requests) == 2:
            both.set()
        return await await_future(new[1])

    hedged_at_once = Limits(floor_seconds=0.0, unknown_seconds=0.0)
    sender = HedgedSender(hedged_at_once, "read", Window(8))
    with assert_calls_freed():
        answering = asyncio.ensure_future(sender.answer(ask, size_bytes=0, name="read"))
        await both.wait()
        for request in requests:
            request.set_result(b"read")
        assert await answering == b"read"
        del answering
        await asyncio.sleep(0.1)  # the other request ends


@pytest.mark.parametrize("snapshot", ["none", "host"])
def test_a_save_needs_no_memory_for_its_objects(
    direct: store.Client,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Literal["none", "host"],
) -> None:
    """They refer to the memory of the caller, or to the staging memory."""
    largest: list[int] = []
    write = BucketRoot.write

    def copied(self: BucketRoot, path: str, data: Any, **options: Any) -> None:
        largest.append(max(len(p) for p in data if isinstance(p, bytearray)))
        write(self, path, data, **options)

    monkeypatch.setattr(BucketRoot, "write", copied)
    tree = {f"{n}": drawn(1024, 1024, seed=n) for n in range(8)}

    direct.run(f"tests/referred-{snapshot}").save(0, tree, snapshot=snapshot).result()

    assert largest
    assert max(largest) < 1024  # checksums


@pytest.mark.slow
def test_a_save_ends_although_its_objects_may_hold_all_of_its_staging_memory(
    served: tuple[ServerProcess, str], gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session, "MIN_BUDGET_BYTES", MIB)
    monkeypatch.setattr(data_files, "object_bytes", lambda *sizes: sum(sizes))
    tree = {f"{n:02}": drawn(1024, 1024, seed=n) for n in range(16)}
    server, root = served
    with store.connect(server.address, direct=root, staging_bytes=20 * MIB) as client:
        run = client.run("tests/starved")
        gcs.clear()

        run.save(0, tree, snapshot="host").result()

        assert 3 < len(of_data(gcs, "PUT")) <= 16
        back = run.restore(0)
    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)


@pytest.mark.parametrize(
    ("save_bytes", "own_bytes", "expected"),
    [
        (64 * MIB, 64 * MIB, 8 * MIB),
        (4 << 30, 4 << 30, 64 * MIB),
        (1 << 40, 1 << 30, 128 * MIB),  # 1,024 processes
        (1 << 40, 128 * MIB, 16 * MIB),
        (1 << 40, 1 << 40, 128 * MIB),
    ],
)
def test_objects_grow_with_the_save(
    save_bytes: int, own_bytes: int, expected: int
) -> None:
    assert expected == data_files.object_bytes(save_bytes, own_bytes, 4 << 30)


def test_objects_that_are_assembled_have_half_of_the_staging_memory() -> None:
    budget = 1 << 30
    size = data_files.object_bytes(1 << 40, 1 << 40, budget)
    assert size * data_files.FILE_THREADS <= budget // 2


def test_the_slowest_data_file_is_logged(direct: store.Client) -> None:
    run = direct.run("tests/slowest")
    run.save(0, {"x": drawn(100)}).result()
    opened = run.open(0)

    opened.restore()

    assert opened.report is not None
    (file,) = get_reader(opened).manifest.places.files
    assert file == opened.report.slowest
    assert 0 < opened.report.slowest_seconds <= opened.report.seconds


def test_the_root_of_another_store_is_rejected(
    served: tuple[ServerProcess, str], root: str
) -> None:
    with store.connect(root) as other:
        found = other.info().store_uid

    with pytest.raises(
        store.InvalidRequestError,
        match=f"direct: expected the root of store .*got .*{found} at {root}; give",
    ):
        store.connect(served[0].address, direct=root)


@pytest.mark.parametrize("bucket", [BUCKET, "nowhere"])
def test_a_root_without_a_store_is_rejected(
    served: tuple[ServerProcess, str], bucket: str
) -> None:
    with pytest.raises(
        store.InvalidRequestError,
        match=f"expected the root .*, found no gs://{bucket}/empty/store.binpb; give",
    ):
        store.connect(served[0].address, direct=f"gs://{bucket}/empty")


def test_a_bucket_that_denies_all_access_is_reported(
    served: tuple[ServerProcess, str], gcs: FakeGcs
) -> None:
    gcs.deny(BUCKET)
    try:
        with pytest.raises(
            store.PreconditionError,
            match=rf"direct: expected .*{served[1]}/store.binpb: .*credentials",
        ):
            store.connect(served[0].address, direct=served[1])
    finally:
        gcs.allow(BUCKET)


def test_the_full_stop_of_a_bucket_error_is_removed(
    served: tuple[ServerProcess, str], gcs: FakeGcs
) -> None:
    gcs.fault("GET /.*store", Status(400, message="The bucket is odd."), times=ALWAYS)
    with pytest.raises(
        store.UnavailableError, match=r"is odd, or connect without direct=$"
    ):
        store.connect(served[0].address, direct=served[1])
    gcs.clear()


def test_missing_packages_of_a_bucket_are_an_error_that_names_the_extra(
    served: tuple[ServerProcess, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(store.InvalidRequestError, match=r"direct: .*storesvc\[server"):
        store.connect(served[0].address, direct=served[1])


def test_unknown_options_of_a_bucket_are_rejected(
    served: tuple[ServerProcess, str],
) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"direct: .*concurrency=1 to"):
        store.connect(served[0].address, direct=f"{served[1]}?concurrency=0")
