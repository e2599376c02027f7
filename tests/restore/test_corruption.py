"""Damage on storage is reported by name, and never returned as data."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._restore import sources
from storesvc_client._restore.open_tree import get_reader
from storesvc_proto.v1 import bucket_pb2, tree_pb2
from tests.support import stored_records
from tests.support.examples import examples
from tests.support.saved_checkpoint import flip
from tests.support.sessions import send_through_server

TREE = {
    "embed": {"kernel": np.arange(3 * 2**20, dtype=np.float32).reshape(3, -1)},
    "bias": np.arange(7, dtype=np.int16),
    "scale": 2.5,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    with store.connect(root.as_uri()) as client:
        client.run("tests/damage").save(3, TREE)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "store"
    shutil.copytree(saved, copy)
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(params=["direct", "streamed"])
def restore(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    """Restores the newest checkpoint."""

    def restored(root: Path) -> Any:
        with store.connect(root.as_uri()) as client:
            if request.param == "streamed":
                send_through_server(client)
            return client.run("tests/damage").restore("latest")

    return restored


def data_files(root: Path) -> list[Path]:
    """Returns the data files that hold chunks, the largest first."""
    files = (root / "data/tests/damage/pool").glob("*/*")
    return sorted(files, key=lambda f: f.stat().st_size, reverse=True)


def is_whole(tree: Any) -> bool:
    return bool(
        np.array_equal(tree["embed"]["kernel"], TREE["embed"]["kernel"])  # type: ignore[index]  # TREE is of several shapes
        and np.array_equal(tree["bias"], TREE["bias"])  # type: ignore[arg-type]  # as above
        and tree["scale"] == TREE["scale"]
    )


def test_a_flipped_bit_of_a_leaf_is_data_loss_naming_leaf_and_chunk(
    root: Path, restore: Callable[[Path], Any]
) -> None:
    flip(data_files(root)[0], 5_000_000)

    with pytest.raises(
        store.DataLossError, match=r"tests/damage@3 leaf 'embed/kernel' chunk 0"
    ) as caught:
        restore(root)
    assert caught.value.reason == "CORRUPT_DATA"


@pytest.mark.slow
def test_any_flipped_bit_is_either_reported_or_harmless(
    saved: Path, root: Path, restore: Callable[[Path], Any]
) -> None:
    rng = random.Random(1)
    reported = 0
    files = [f for f in saved.rglob("*") if f.is_file()]
    count = examples(60)
    for _ in range(count):
        file = rng.choice(files)
        size = file.stat().st_size
        if not size:
            continue
        copy = root / file.relative_to(saved)
        flip(copy, rng.randrange(size), rng.randrange(8))
        try:
            assert is_whole(restore(root)), file
        except (store.DataLossError, store.PreconditionError) as e:
            assert (
                "CORRUPT_DATA" == e.reason
            )  # the second one: of the run, not of a leaf
            reported += 1
        shutil.copy(file, copy)
    assert reported > count // 6


@pytest.mark.parametrize("what", ["checkpoints", "manifests"])
def test_every_byte_of_a_record_and_a_manifest_is_guarded(
    root: Path, what: str, restore: Callable[[Path], Any]
) -> None:
    (file,) = (root / "data/tests/damage" / what).iterdir()
    original = file.read_bytes()
    for position in range(0, len(original), max(1, len(original) // examples(40))):
        flip(file, position, position % 8)
        with suppress(store.DataLossError):
            assert is_whole(restore(root)), position
        file.write_bytes(original)


@pytest.mark.parametrize("damage", ["delete", "empty", "halve"])
def test_a_missing_or_short_data_file_is_data_loss(
    root: Path, damage: str, restore: Callable[[Path], Any]
) -> None:
    file = data_files(root)[0]
    if damage == "delete":
        file.unlink()
    else:
        size = file.stat().st_size
        os.truncate(file, {"empty": 0, "halve": size // 2}[damage])

    with pytest.raises(store.DataLossError, match=r"leaf '.*' chunk 0") as e:
        restore(root)
    assert "CORRUPT_DATA" == e.value.reason


@pytest.mark.slow
def test_a_failed_stream_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    stream = sources.ServerSource._stream

    def counted(self: Any, method: Any, ordinals: Any, assembly: Any) -> None:
        begun.append(ordinals)
        stream(self, method, ordinals, assembly)

    monkeypatch.setattr(sources.ServerSource, "_stream", counted)
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/damage")
        run.save(1, {f"{n}": np.full(2**21, n, np.int64) for n in range(16)}).result()
        send_through_server(client)
        run.restore(1)
        assert sources.STREAMS == len(begun)
        begun.clear()
        places = get_reader(
            run.open(1)
        ).manifest.places  # files hold chunks in any order
        damaged = tmp_path / "data/tests/damage/pool" / places.files[places.file[0]]
        flip(damaged, int(places.offset[0]) + 99)

        with pytest.raises(store.DataLossError, match="chunk 0"):
            run.restore(1)
        # and the chunk is requested a second time
        assert [[0]] == begun[sources.STREAMS :]


def test_swapped_chunks_are_data_loss(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/damage")
        run.save(3, {"a": np.full(999, 1.0), "b": np.full(999, 2.0)}).result()
        file = data_files(tmp_path)[0]
        data = file.read_bytes()
        size = 999 * 8 + 4
        one = data.index(np.full(999, 1.0).tobytes())
        two = data.index(np.full(999, 2.0).tobytes())
        swapped = bytearray(data)
        swapped[one : one + size] = data[two : two + size]
        swapped[two : two + size] = data[one : one + size]
        file.write_bytes(swapped)

        with pytest.raises(store.DataLossError, match=r"leaf '[ab]' chunk 0"):
            run.restore(3)


def forge(root: Path, change: Callable[[tree_pb2.Manifest], None]) -> None:
    """Changes a manifest, and its checksum in the record."""
    folder = root / "data/tests/forged"
    (manifest_file,) = (folder / "manifests").iterdir()
    (record_file,) = (folder / "checkpoints").iterdir()
    manifest = tree_pb2.Manifest.FromString(manifest_file.read_bytes())
    change(manifest)
    forged = manifest.SerializeToString(deterministic=True)
    place = record_file.relative_to(root).as_posix()
    record = stored_records.read(root, place, bucket_pb2.CheckpointRecord)
    record.manifest_digest, record.manifest_bytes = digest(forged), len(forged)
    places = RunPaths(RunName("tests", "forged"))
    (root / places.manifest(record.upload, digest(forged))).write_bytes(forged)
    stored_records.write(root, place, record)


@pytest.mark.parametrize(
    ("shape", "chunk_shape"), [((9,), (9,)), ((5,), (5,)), ((2, 7), (1, 7))], ids=str
)
def test_a_manifest_that_claims_another_shape_than_its_data_is_data_loss(
    tmp_path: Path, shape: tuple[int, ...], chunk_shape: tuple[int, ...]
) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run("tests/forged").save(3, {"x": np.arange(7, dtype=np.int16)})

    def change(manifest: tree_pb2.Manifest) -> None:
        manifest.leaves.rank[:] = [len(shape)]
        manifest.leaves.shape[:] = shape
        manifest.leaves.chunk_shape[:] = chunk_shape

    forge(tmp_path, change)

    with (
        store.connect(tmp_path.as_uri()) as client,
        pytest.raises(
            store.DataLossError, match=r"manifest: .*(leaf 'x'|1 chunks|checksums)"
        ),
    ):
        client.run("tests/forged").restore(3)


@pytest.mark.parametrize("keys", [("x", "x"), ("y", "x"), ("x", "x/y")], ids=str)
def test_a_manifest_whose_keys_collide_is_data_loss(
    tmp_path: Path, keys: tuple[str, str]
) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run("tests/forged").save(3, {"x": np.zeros(7), "y": np.ones(7)})

    def change(manifest: tree_pb2.Manifest) -> None:
        manifest.leaves.key[:] = keys
        manifest.leaves.path_kinds[:] = ["k" * (1 + key.count("/")) for key in keys]

    forge(tmp_path, change)

    with (
        store.connect(tmp_path.as_uri()) as client,
        pytest.raises(store.DataLossError, match=r"manifest: leaf 'x.*(order|below)"),
    ):
        client.run("tests/forged").restore(3)


@pytest.mark.parametrize("file", ["../../../x", "/etc/passwd", "d/../x", "", "d//x"])
def test_a_manifest_with_a_path_outside_the_pool_is_data_loss(
    tmp_path: Path, file: str
) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run("tests/forged").save(3, {"x": np.zeros(7)})

    def change(manifest: tree_pb2.Manifest) -> None:
        manifest.chunks.files[:] = [file]

    forge(tmp_path, change)

    with (
        store.connect(tmp_path.as_uri()) as client,
        pytest.raises(store.DataLossError, match="manifest: data file"),
    ):
        client.run("tests/forged").restore(3)
