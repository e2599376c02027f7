"""Links and special files in a store: none is read, written through, or waited for."""

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc.errors import CorruptDataError
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client.cli import main as storectl
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.save.test_direct_chunks import Placer
from tests.support.contract import Writer, frame, stored, sums
from tests.support.examples import sampled
from tests.support.in_process_server import InProcessServer, continued
from tests.support.refusals import rejected
from tests.support.saved_checkpoint import CHUNKS, Saved, node_ranges
from tests.support.server_process import ServerProcess

SECRET = b"secret of the server"


def secret_of(file: Path, server: ServerProcess) -> Path:
    """Returns a file outside the store, of the size of one in it."""
    secret = server.root.parent / f"secret-{file.name}"
    size = file.stat().st_size
    secret.write_bytes((SECRET * (size // len(SECRET) + 1))[:size])
    return secret


def absolute_link(file: Path, server: ServerProcess) -> None:
    secret = secret_of(file, server)
    file.unlink()
    file.symlink_to(secret)


def relative_link(file: Path, server: ServerProcess) -> None:
    secret = secret_of(file, server)
    file.unlink()
    file.symlink_to(os.path.relpath(secret, file.parent))


def dangling_link(file: Path, server: ServerProcess) -> None:
    del server
    file.unlink()
    file.symlink_to("nowhere")


def linked_directory(file: Path, server: ServerProcess) -> None:
    aside = server.root.parent / f"aside-{uuid.uuid4().hex}"
    file.parent.rename(aside)
    file.parent.symlink_to(aside)


def linked_pool(file: Path, server: ServerProcess) -> None:
    aside = server.root.parent / f"aside-{uuid.uuid4().hex}"
    file.parent.parent.rename(aside)
    file.parent.parent.symlink_to(aside)


def fifo(file: Path, server: ServerProcess) -> None:
    del server
    file.unlink()
    os.mkfifo(file)


def directory(file: Path, server: ServerProcess) -> None:
    del server
    file.unlink()
    file.mkdir()


def listening_socket(file: Path, server: ServerProcess) -> None:
    del server
    file.unlink()
    above = os.open(file.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:  # the path is too long for a name
        bound.bind(f"/proc/self/fd/{above}/{file.name}")
    os.close(above)


def device(file: Path, server: ServerProcess) -> None:
    del server
    file.unlink()
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device needs root")


def file_for_directory(file: Path, server: ServerProcess) -> None:
    aside = server.root.parent / f"aside-{uuid.uuid4().hex}"
    file.parent.rename(aside)
    file.parent.write_bytes(b"")


IN_ITS_PLACE = (
    absolute_link,
    relative_link,
    dangling_link,
    fifo,
    directory,
    listening_socket,
    device,
)
ANYWHERE = (*IN_ITS_PLACE, linked_directory, linked_pool, file_for_directory)
Replace = Callable[[Path, ServerProcess], None]


@contextmanager
def corrupt(match: str | None = None) -> Iterator[None]:
    with rejected("CORRUPT_DATA", store.DataLossError, match=match):
        yield


def check_alive(server: ServerProcess | InProcessServer, run: store.Run) -> None:
    """Asserts that the server still serves other calls."""
    Writer(server.address, f"{run.name}-other", 1).save()


@pytest.mark.parametrize(
    "replace", sampled(ANYWHERE, every=2), ids=lambda f: f.__name__
)
def test_a_special_file_in_place_of_a_data_file_is_never_read(
    server: ServerProcess, run: store.Run, saved: Saved, replace: Replace
) -> None:
    uid = run.open(3).info.uid
    replace(saved.file(0), server)

    with grpc.insecure_channel(server.address) as channel, corrupt("chunk 0"):
        request = api.ReadChunksRequest(
            name=f"{saved.name.resource}/checkpoints/3", uid=uid, chunk=[0]
        )
        list(ChunkServiceStub(channel).ReadChunks(request, timeout=30))
    with corrupt():
        run.restore(3)
    direct = store.connect(server.address, direct=server.root.as_uri())
    with direct, corrupt("chunk 0"):
        direct.run(run.name).restore(3)
    found = run.verify(3)
    assert {"missing"} <= {damage.kind for damage in found.damages}
    assert not any("secret" in damage.message for damage in found.damages)
    arguments = ["--store", server.address, "verify", f"{run.name}@3"]
    assert 1 == CliRunner().invoke(storectl, arguments).exit_code
    check_alive(server, run)


@pytest.mark.parametrize(
    "replace", sampled(ANYWHERE, every=2), ids=lambda f: f.__name__
)
def test_chunks_of_a_replaced_data_file_are_not_reused(
    server: ServerProcess, run: store.Run, saved: Saved, replace: Replace
) -> None:
    replace(saved.file(0), server)

    writer = Writer(server.address, run.name, 4, chunks=CHUNKS)
    writer.begin(base=f"{saved.name.resource}/checkpoints/3")

    assert [] == writer.find(sums(*range(CHUNKS)))


@pytest.mark.parametrize(
    "replace", sampled(ANYWHERE, every=2), ids=lambda f: f.__name__
)
def test_a_special_file_in_place_of_a_direct_file_is_not_acknowledged(
    server: ServerProcess, replace: Replace
) -> None:
    placer = Placer(server.address, server.root)
    replace(placer.put(0, 1), server)

    with rejected("INVALID_CHUNK", match=r"missing|shorter"):
        placer.report(placer.table(0, 1))
    assert [] == placer.writer.find(sums(0, 1, 2))


@pytest.mark.parametrize(
    "replace", sampled(ANYWHERE, every=2), ids=lambda f: f.__name__
)
def test_a_special_file_in_place_of_a_node_file_damages_the_key_space(
    server: ServerProcess, run: store.Run, saved: Saved, replace: Replace
) -> None:
    (file, _), *_ = node_ranges(saved)
    replace(file, server)

    assert not run.verify(3).ok
    check_alive(server, run)


@pytest.mark.parametrize("replace", IN_ITS_PLACE, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "what", sampled(["slot", "manifest", "key space", "file table"], every=4)
)
def test_a_special_file_in_place_of_a_record_is_corrupt(
    server: ServerProcess, run: store.Run, saved: Saved, what: str, replace: Replace
) -> None:
    record, places = saved.record, saved.places
    file = {
        "slot": places.checkpoint(3),
        "manifest": places.manifest(record.upload, record.manifest_digest),
        "key space": places.key_space(record.upload, record.attempt) + "manifest.ocdbt",
        "file table": places.file_table(record.upload, record.files_digest),
    }[what]
    replace(server.root / file, server)

    if what in ("slot", "manifest"):
        with corrupt():
            run.verify(3)
    else:
        try:
            assert not run.verify(3).ok
        except store.DataLossError as e:
            assert "CORRUPT_DATA" == e.reason
    check_alive(server, run)


# No list shows a directory: the table is missing, and was never acknowledged.
@pytest.mark.parametrize(
    "replace",
    [one for one in IN_ITS_PLACE if one is not directory],
    ids=lambda f: f.__name__,
)
def test_a_special_file_in_place_of_a_chunk_table_is_corrupt(
    server: ServerProcess, run: store.Run, replace: Replace
) -> None:
    writer = Writer(server.address, run.name, 1)
    writer.begin()
    writer.write(frame(0, 1, 2))
    (table,) = (server.root / f"data/{run.name}/staging").glob("*/0/*")
    replace(table, server)

    with continued(writer, server.root) as other:
        with corrupt():
            writer.finish(sums(0, 1, 2))
        check_alive(other, run)


@pytest.mark.slow
def test_many_fifos_do_not_block_other_calls(
    server: ServerProcess, run: store.Run
) -> None:
    writer = Writer(server.address, run.name, 1)
    writer.begin()
    for number in range(40):
        writer.write(frame(number % 3))
    tables = list((server.root / f"data/{run.name}/staging").glob("*/0/*"))
    files = list((server.root / f"data/{run.name}/pool").glob("*/*"))
    for file in (*tables, *files):
        fifo(file, server)

    with continued(writer, server.root) as other:
        with corrupt():
            writer.finish(sums(0, 1, 2))
        check_alive(other, run)


@pytest.mark.parametrize("replace", [linked_directory, linked_pool])
def test_nothing_is_written_through_a_link(
    server: ServerProcess, run: store.Run, replace: Replace
) -> None:
    writer = Writer(server.address, run.name, 1)
    writer.begin()
    writer.write(frame(0))
    (file,) = (server.root / f"data/{run.name}/pool").glob("*/*")
    replace(file, server)
    aside = file.resolve().parent
    before = sorted(aside.iterdir())

    with corrupt("symbolic link"):
        writer.write(frame(1))
    assert before == sorted(aside.iterdir())


def test_a_direct_save_writes_nothing_through_a_link(
    server: ServerProcess, run: store.Run, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    pool = server.root / f"data/{run.name}/pool"
    pool.parent.mkdir(parents=True)
    pool.symlink_to(outside)

    direct = store.connect(server.address, direct=server.root.as_uri())
    with direct, pytest.raises(store.DataLossError, match="symbolic link"):
        direct.run(run.name).save(1, {"x": np.arange(7)}).result()
    assert [] == list(outside.iterdir())


@pytest.mark.parametrize("replace", [linked_directory, linked_pool])
def test_collection_deletes_nothing_behind_a_link(
    server: ServerProcess,
    client: store.Client,
    run: store.Run,
    saved: Saved,
    replace: Replace,
) -> None:
    file = saved.file(0)
    replace(file, server)
    behind = file.resolve()
    run.delete(3, purge_delay=timedelta(0))

    list(client.collect(run.name, grace=timedelta(0)))

    assert behind.exists()


async def test_a_deletion_removes_a_link_and_not_its_target(tmp_path: Path) -> None:
    behind = tmp_path / "behind" / "file"
    behind.parent.mkdir()
    behind.touch()
    pool = tmp_path / "store" / "data/n/r/pool"
    pool.mkdir(parents=True)
    (pool / "upload").symlink_to(behind.parent)

    bucket = await TensorStoreBucket.open((tmp_path / "store").as_uri())
    with pytest.raises(CorruptDataError, match="symbolic link"):
        await bucket.delete("data/n/r/pool/upload/file")
    await bucket.delete_below("data/n/r/pool/upload/")

    assert behind.exists()
    assert [] == list(pool.iterdir())


def test_the_root_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    with store.connect((tmp_path / "root").as_uri()) as client:
        run = client.run("tests/linked")
        run.save(1, {"x": np.arange(7)}).result()

        assert np.array_equal(np.arange(7), run.restore(1)["x"])
        assert run.verify(1).ok


def test_a_restored_data_file_is_read_again(
    server: ServerProcess, run: store.Run, saved: Saved
) -> None:
    file = saved.file(0)
    data = file.read_bytes()
    fifo(file, server)
    with corrupt():
        run.restore(3)
    file.unlink()
    file.write_bytes(data)

    assert b"".join(map(stored, range(CHUNKS))) == data
    assert run.verify(3).ok
