"""Only names that the format makes are read: no name leads out of a run's pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc.format import dtypes, ocdbt
from storesvc.format.checksums import digest
from storesvc.format.chunks import ChunkLocations
from storesvc.format.names import InvalidNameError, check_data_file
from storesvc_client.cli import main
from storesvc_proto.v1 import bucket_pb2, tree_pb2
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from tests.support import stored_records
from tests.support.contract import Writer, frame, sums
from tests.support.in_process_server import continued
from tests.support.refusals import rejected
from tests.support.saved_checkpoint import CHUNKS, Saved
from tests.support.server_process import ServerProcess


def forge_manifest(saved: Saved, change: Callable[[tree_pb2.Manifest], object]) -> None:
    """Changes the manifest of a checkpoint and its checksum in the record."""
    record = saved.record
    old = saved.root / saved.places.manifest(record.upload, record.manifest_digest)
    manifest = tree_pb2.Manifest.FromString(old.read_bytes())
    change(manifest)
    data = manifest.SerializeToString(deterministic=True)
    record.manifest_digest, record.manifest_bytes = digest(data), len(data)
    new = saved.root / saved.places.manifest(record.upload, record.manifest_digest)
    new.write_bytes(data)
    stored_records.write(saved.root, saved.places.checkpoint(record.step), record)


ID = "0123456789abcdef" * 2
HOSTILE = (
    "../../../../../secret",
    f"../{ID}",
    f"{ID}/../../../../../secret",
    f"{ID}/..",
    f"../pool/{ID}/{ID}",
    "/etc/passwd",
    f"/{ID}/{ID}",
    "",
    ".",
    f"./{ID}",
    f"{ID}/",
    f"{ID}//{ID}",
    f"{ID}/{ID}/",
    f"{ID}/{ID}\n",
    f"{ID}/{ID}\0",
    f"{ID}\\{ID}",
    f"..\\{ID}",
    f"{ID}/{ID.upper()}",
    f"{ID}/{ID}0",
    f"{ID}/{ID}/{ID}",
    ID,
    f"d/{ID[:-1]}\N{FULLWIDTH DIGIT ONE}",
    f"{ID}/" + "a" * 5000,
    "../" * 2000 + "etc/passwd",
)
"""Names of data files that only an attacker would use, to reach foreign files."""


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_that_the_format_never_makes_is_rejected(name: str) -> None:
    with pytest.raises(InvalidNameError, match="expected UPLOAD/ID"):
        check_data_file(name)


@pytest.mark.parametrize("name", [f"{ID}/{ID}", f"d/{ID}"])
def test_names_of_this_release_and_of_the_first_are_read(name: str) -> None:
    check_data_file(name)


def name_file(saved: Saved, name: str) -> None:
    def change(manifest: tree_pb2.Manifest) -> None:
        manifest.chunks.files[:] = [name]

    forge_manifest(saved, change)


@contextmanager
def corrupt() -> Iterator[None]:
    """Expects an error about corrupt data in the store."""
    with rejected("CORRUPT_DATA", store.DataLossError, match="data file"):
        yield


# The most telling ones: each costs a save, and the rule is one function.
MANIFESTS = (HOSTILE[0], HOSTILE[2], "/etc/passwd", "", ".", HOSTILE[11], HOSTILE[-1])


@pytest.mark.parametrize("name", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_with_such_a_name_is_corrupt_data_to_every_call(
    server: ServerProcess, run: store.Run, saved: Saved, name: str
) -> None:
    (server.root / "secret").write_bytes(b"secret" * 1000)
    uid = run.open(3).info.uid
    name_file(saved, name)

    with grpc.insecure_channel(server.address) as channel:
        request = api.ReadChunksRequest(
            name=f"{saved.name.resource}/checkpoints/3", uid=uid, chunk=[0]
        )
        with corrupt():
            list(ChunkServiceStub(channel).ReadChunks(request, timeout=30))
    with corrupt():
        run.verify(3)
    with corrupt():
        run.restore(3)
    arguments = ["--store", server.address, "verify", f"{run.name}@3"]
    assert 1 == CliRunner().invoke(main, arguments).exit_code

    Writer(server.address, run.name, 4, chunks=CHUNKS).save(range(CHUNKS))
    with corrupt():
        run.diff(3, 4)


@pytest.mark.parametrize("name", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_direct_restore_rejects_such_a_name(
    server: ServerProcess, run: store.Run, saved: Saved, name: str
) -> None:
    name_file(saved, name)

    direct = store.connect(server.address, direct=server.root.as_uri())
    with direct, corrupt():
        direct.run(run.name).restore(3)


def test_nothing_is_reused_from_a_base_with_such_a_name(
    server: ServerProcess, run: store.Run, saved: Saved
) -> None:
    name_file(saved, HOSTILE[0])

    writer = Writer(server.address, run.name, 4, chunks=CHUNKS)
    writer.begin(base=f"{saved.name.resource}/checkpoints/3")

    assert [] == writer.find(sums(*range(CHUNKS)))


def rename(root: Path, place: str, name: str) -> None:
    """Changes a stored table of chunks so that it names another file."""
    receipt = stored_records.read(root, place, bucket_pb2.Receipt)
    table = tree_pb2.ChunkTable.FromString(receipt.chunks)
    table.files[:] = [name]
    receipt.chunks = table.SerializeToString()
    stored_records.write(root, place, receipt)


@pytest.mark.parametrize("place", ["staging", "receipt"])
def test_a_table_of_stored_chunks_with_such_a_name_is_corrupt_data(
    server: ServerProcess, run: store.Run, place: str
) -> None:
    writer = Writer(server.address, run.name, 1)
    writer.begin()
    writer.write(frame(0, 1, 2))
    folder = server.root / f"data/{run.name}"
    if place == "staging":
        (table,) = (folder / "staging").glob("*/0/*")
    else:
        writer.finish(sums(0, 1, 2))
        (table,) = (folder / "uploads").glob("*/writers/0.binpb")
    rename(server.root, str(table.relative_to(server.root)), HOSTILE[0])

    with continued(writer, server.root), corrupt():
        writer.finish(sums(0, 1, 2)) if place == "staging" else writer.commit()


def test_a_key_space_with_such_a_name_is_reported_as_damage(
    server: ServerProcess, run: store.Run, saved: Saved
) -> None:
    """The metadata of a leaf is read from where the key space shows it."""
    record = saved.record
    node = f"{record.upload}/{ID}"
    leaf = saved.manifest.tree.leaves[0]
    length = len(dtypes.metadata_bytes(leaf.shape, leaf.chunk_shape, leaf.dtype))
    places = ChunkLocations.of_rows([("../../../../../secret", 0, length)])
    view = ocdbt.encode(
        ["x/zarr.json"], places, node_file=node, commit_time_ns=1, uuid=bytes(16)
    )
    (server.root / saved.places.pool / node).write_bytes(view.nodes)
    (saved.tree / "manifest.ocdbt").write_bytes(view.manifest)
    (server.root / "secret").write_bytes(b"secret" * 1000)

    found = run.verify(3)

    assert {"key_space"} == {damage.kind for damage in found.damages}
    assert [] == [d for d in found.damages if "secret" in d.message]


def test_a_file_table_with_such_a_name_lets_nothing_be_collected(
    server: ServerProcess, client: store.Client, run: store.Run, saved: Saved
) -> None:
    """It is damaged, so what the checkpoint needs is not known."""
    Writer(server.address, run.name, 4, chunks=CHUNKS).save(range(CHUNKS))
    secret = server.root / "data" / "secret"
    secret.write_bytes(b"secret")
    slot = saved.places.checkpoint(3)
    record = stored_records.read(server.root, slot, bucket_pb2.CheckpointRecord)
    table = bucket_pb2.FileTable(file=[HOSTILE[0]], chunk_bytes=[0])
    data = table.SerializeToString()
    record.files_digest = digest(data)
    place = saved.places.file_table(record.upload, record.files_digest)
    (server.root / place).write_bytes(data)
    stored_records.write(server.root, slot, record)
    run.delete(4)

    before = sorted((server.root / saved.places.pool).glob("*/*"))
    (reported,) = client.collect(run.name, grace=timedelta(0))

    assert "is damaged: data file" in reported.postponed
    assert secret.exists()
    assert before == sorted((server.root / saved.places.pool).glob("*/*"))
