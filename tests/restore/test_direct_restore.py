"""A direct restore reads data files itself, without extra copies or extra bytes."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from benchmarks.speed.meters import measured, memory_mib, settle
from storesvc.format.chunks import Read
from storesvc.format.grids import whole
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.data_file_reads import BufferBudget
from storesvc_client._restore.open_tree import get_reader
from tests.support.examples import sampled
from tests.support.server_process import ServerProcess

MIB = 1 << 20


@pytest.fixture
def direct(server: ServerProcess) -> Iterator[store.Client]:
    """A client of a server that reads the store's files directly."""
    with store.connect(server.address, direct=server.root.as_uri()) as connected:
        yield connected


def mesh(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), tuple("ab"[: len(sizes)]))


def drawn(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape, np.float32)


def like(tree: Any, sharding: Sharding) -> Any:
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for key, leaf in tree.items()
    }


def read_bytes() -> int:
    """Returns the bytes that this process has read from files so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise LookupError("rchar")


def data_files(root: Path) -> list[Path]:
    files = [path for path in root.glob("data/*/*/pool/**/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size)


@pytest.mark.slow
def test_a_direct_restore_reads_files_and_not_the_server(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server()
    tree = {"x": drawn(1000, 100), "small": drawn(3)}
    with store.connect(server.address) as client:
        client.run("tests/run").save(0, tree).result()
        copy = tmp_path / "copy"
        shutil.copytree(server.root, copy)
        for path in data_files(server.root):
            os.truncate(path, 0)

        with pytest.raises(store.DataLossError):
            client.run("tests/run").restore(0)
    with store.connect(server.address, direct=copy.as_uri()) as client:
        back = client.run("tests/run").restore(0)
        assert tree["x"].tobytes() == back["x"].tobytes()
        assert tree["small"].tobytes() == back["small"].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_cpu_devices_use_the_memory_that_was_read_into(
    direct: store.Client, run: store.Run, dtype: Any
) -> None:
    values = drawn(4096, 1024).astype(dtype)
    run.save(0, {"x": jax.device_put(values, NamedSharding(mesh(8), P("a")))}).result()
    target = like({"x": values}, NamedSharding(mesh(8), P("a")))

    back = direct.run(run.name).restore(0, like=target)["x"]

    at = [shard.data.unsafe_buffer_pointer() for shard in back.addressable_shards]
    # adjacent addresses show reads in place: copies would have any addresses
    assert [at[0] + n * values.nbytes // 8 for n in range(8)] == at
    assert 0 == at[0] % (2 * MIB)
    assert values.tobytes() == np.asarray(back).tobytes()


def test_replicas_share_the_memory_that_was_read_into(
    direct: store.Client, run: store.Run
) -> None:
    values = drawn(1024, 1024)
    run.save(0, {"x": values}).result()
    target = like({"x": values}, NamedSharding(mesh(8), P()))

    back = direct.run(run.name).restore(0, like=target)["x"]

    shards = [shard.data.unsafe_buffer_pointer() for shard in back.addressable_shards]
    assert 1 == len(set(shards))


RESHARDED = {
    "tp-4 x dp-2": lambda: NamedSharding(mesh(2, 4), P(None, "b")),
    "one device": lambda: SingleDeviceSharding(jax.devices()[0]),
    "fsdp-4": lambda: NamedSharding(mesh(4), P("a")),
}


ODD = {str(n): drawn(150 + n, 111) for n in range(40)}
"""Leaves of 65 to 84 kB, each one chunk; few have a multiple of 64 bytes."""


def test_large_chunks_begin_at_cache_lines_of_data_files(direct: store.Client) -> None:
    run = direct.run("ns/aligned")
    run.save(1, {"small": np.arange(3), **ODD}).result()
    opened = run.open(1)
    places = get_reader(opened).manifest.places
    large = places.length >= 64 << 10
    assert 40 == large.sum()
    assert not (places.offset[large] % 64).any()
    restored = opened.restore()
    assert all(np.array_equal(restored[key], ODD[key]) for key in ODD)


def test_chunks_at_any_offset_of_a_data_file_are_restored(
    server: ServerProcess, direct: store.Client
) -> None:
    """As a server writes them, back to back."""
    with store.connect(server.address) as streaming:
        streaming.run("ns/streamed").save(1, ODD).result()
    opened = direct.run("ns/streamed").open(1)
    offsets = get_reader(opened).manifest.places.offset
    assert 10 < len(np.unique(offsets % 64))
    restored = opened.restore()
    assert all(np.array_equal(restored[key], ODD[key]) for key in ODD)
    report = opened.report
    assert report
    assert report.timings["copy"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", sampled(RESHARDED.values(), every=3), ids=list(RESHARDED)
)
def test_a_resharding_restore_reads_little_more_than_it_returns(
    direct: store.Client, run: store.Run, target: Callable[[], Sharding]
) -> None:
    tree = {"x": drawn(2048, 2048), "y": drawn(8 * 2100, 640), "z": drawn(512, 64)}
    spread = NamedSharding(mesh(8), P("a"))
    run.save(0, {k: jax.device_put(v, spread) for k, v in tree.items()}).result()
    own = direct.run(run.name)

    before = read_bytes()
    back = own.restore(0, like=like(tree, target()))
    read = read_bytes() - before

    needed = sum(leaf.nbytes for leaf in tree.values())
    assert needed < read < 1.2 * needed
    assert all(tree[k].tobytes() == np.asarray(back[k]).tobytes() for k in tree)


def test_a_selective_restore_reads_only_what_it_returns(
    direct: store.Client, run: store.Run
) -> None:
    tree = {f"{n:03}": drawn(512, 512) for n in range(20)}
    run.save(0, tree).result()
    own = direct.run(run.name)

    before = read_bytes()
    back = own.restore(0, select=["003", "004", "017"])
    read = read_bytes() - before

    assert ["003", "004", "017"] == sorted(back)
    assert 3 * MIB < read < 3.2 * MIB


@pytest.mark.slow
def test_half_of_many_small_leaves_take_few_reads(
    direct: store.Client, run: store.Run
) -> None:
    tree = {f"{n:04}": np.full(n % 50, n) for n in range(3000)}
    run.save(0, tree).result()
    opened = direct.run(run.name).open(0)
    rows = [(row, [whole(leaf.shape)]) for row, leaf in enumerate(tree.values())][::2]
    arrays: dict[int, Any] = {}

    def keep(buffers: Iterable[Buffer]) -> None:
        arrays.update({each.row: each.arrays[0] for each in buffers})

    assembly = Assembly(get_reader(opened).manifest, rows, name="x", place=keep)
    source: Any = get_reader(opened).open_source()
    assert 20 > len(source._plan_reads(assembly.missing, assembly))
    source.read(assembly.missing, assembly)

    assert [] == assembly.missing
    for row, leaf in enumerate(tree.values()):
        if row % 2 == 0:
            assert np.array_equal(leaf, arrays[row])


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [1, 9, 24])
def test_buffers_that_are_not_handed_over_fit_the_budget(
    direct: store.Client, run: store.Run, limit_mib: int
) -> None:
    tree = {f"{n}": drawn(1024, 1024 + 64 * n) for n in range(8)}
    run.save(0, tree).result()
    opened = direct.run(run.name).open(0)
    held: list[int] = []

    def place(buffers: Iterable[Buffer]) -> None:
        time.sleep(0.01)  # as an accelerator takes it
        held.extend(buffer.group.size_bytes for buffer in buffers)

    rows = [(row, [whole(leaf.shape)]) for row, leaf in enumerate(tree.values())]
    assembly = Assembly(get_reader(opened).manifest, rows, name="x", place=place)
    source: Any = get_reader(opened).open_source()
    source.budget = BufferBudget(limit_mib * MIB)
    source.read(assembly.missing, assembly)

    assert sum(leaf.nbytes for leaf in tree.values()) == sum(held)
    # a buffer larger than the budget is read alone
    assert source.budget.peak_bytes <= max(limit_mib * MIB, *held)


def test_a_leaf_larger_than_the_budget_is_read_concurrently(
    direct: store.Client, run: store.Run
) -> None:
    run.save(0, {"x": drawn(8192, 1024)}).result()
    opened = direct.run(run.name).open(0)
    assembly = Assembly(
        get_reader(opened).manifest, [(0, [whole((8192, 1024))])], name="x", place=print
    )
    source: Any = get_reader(opened).open_source()
    reads = source._plan_reads(assembly.missing, assembly)
    together = threading.Barrier(2)

    def take(read: Read) -> int:
        together.wait(timeout=30)  # for another one
        return 0

    BufferBudget(MIB).perform(reads, take, assembly, threads=2, check=lambda: None)

    assert 2 == len(reads)


@pytest.mark.slow
@pytest.mark.parametrize("pool_bytes", [0, 1 << 30])
def test_restores_release_memory_files_and_threads(
    server: ServerProcess, run: store.Run, pool_bytes: int
) -> None:
    tree = {f"{n}": drawn(1024, 1024) for n in range(24)}
    run.save(0, tree).result()
    target = like(tree, NamedSharding(mesh(8), P("a")))
    files = len(list(Path("/proc/self/fd").iterdir()))

    def connected() -> store.Client:
        return store.connect(
            server.address, direct=server.root.as_uri(), restore_pool_bytes=pool_bytes
        )

    def repeat(client: store.Client, times: int) -> None:
        for _ in range(times):
            client.run(run.name).restore(0, like=target)

    with connected() as client:
        repeat(client, 2)  # imports and compiles
    settle()  # jax lets go of memory that it shared at the next collection
    rest = memory_mib([os.getpid()])
    with connected() as client:
        repeat(client, 3)
        settle()
        with measured() as cost:
            repeat(client, 1)
        if pool_bytes:  # most of it was there; the kernel may have taken some
            assert cost.extra_mib < 48
        else:
            assert 96 - 8 < cost.extra_mib < 96 + 64
        with measured() as cost:
            repeat(client, 8)

        # jax may let go of one while the next one reads
        assert cost.extra_mib < 2 * 96 + 32
    for _ in range(50):  # the newest jax lets go of the last one later
        settle()
        if (left := memory_mib([os.getpid()])) < rest + 48:
            break
        time.sleep(0.1)
    assert left < rest + 48
    assert files >= len(list(Path("/proc/self/fd").iterdir()))
    assert not [t for t in threading.enumerate() if "storesvc-direct" in t.name]


@pytest.mark.slow
def test_a_failed_read_cancels_the_others_and_releases_all(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address, direct=server.root.as_uri()) as client:
        run = client.run("tests/damage")
        run.save(0, {f"{n}": drawn(1024, 1024) for n in range(24)}).result()
        data_files(server.root)[-1].unlink()
        files = len(list(Path("/proc/self/fd").iterdir()))

        with pytest.raises(store.DataLossError, match=r"leaf '.*data file .* missing"):
            run.restore(0)

        # its threads read nothing any more; who failed does not wait for their ends
        for each in threading.enumerate():
            if "storesvc-direct" in each.name:
                each.join(30)
                assert not each.is_alive()
        # sockets of earlier tests may have been closed by now
        assert files >= len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_an_interrupted_restore_ends_at_once_and_leaves_no_thread(
    direct: store.Client, run: store.Run
) -> None:
    run.save(0, {f"{n}": drawn(512, 512) for n in range(64)}).result()
    opened = direct.run(run.name).open(0)
    placed: list[int] = []
    once = iter([signal.SIGINT])
    interrupted = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def place(buffers: Iterable[Buffer]) -> None:
        for number in once:
            signal.pthread_kill(main, number)  # as Ctrl-C does
        assert interrupted.wait(60)  # on a busy machine, all would be placed by then
        placed.extend(buffer.row for buffer in buffers)
        time.sleep(0.1)

    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            get_reader(opened).read_regions(
                [(row, [whole((512, 512))]) for row in range(64)], place
            )
    finally:
        signal.signal(signal.SIGINT, usual)

    ended = len(placed)
    time.sleep(0.2)
    assert 64 > ended == len(placed)
    assert not [t for t in threading.enumerate() if "storesvc-direct" in t.name]


def test_the_root_of_another_store_is_rejected(
    server: ServerProcess, tmp_path: Path
) -> None:
    with store.connect(tmp_path.as_uri()) as other:
        found = other.info().store_uid
    with store.connect(server.address) as client:
        expected = client.info().store_uid

    with pytest.raises(
        store.InvalidRequestError,
        match=f"direct: expected the root of store {expected}.*got .*{found}",
    ):
        store.connect(server.address, direct=tmp_path.as_uri())


def test_a_root_without_a_store_is_rejected(
    server: ServerProcess, tmp_path: Path
) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"cannot read .*No such file"):
        store.connect(server.address, direct=(tmp_path / "none").as_uri())
    (tmp_path / "store.binpb").write_bytes(b"else")
    with pytest.raises(store.InvalidRequestError, match="expected the record of store"):
        store.connect(server.address, direct=tmp_path.as_uri())


@pytest.mark.parametrize(
    "direct", ["memory://", "/ckpts", "file://host/x", "gs://b", "", 5]
)
def test_an_invalid_direct_root_is_rejected(server: ServerProcess, direct: Any) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"direct: .*expected "):
        store.connect(server.address, direct=direct)
