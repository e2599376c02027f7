"""Objects that are stored as more bytes than they can have are rejected unread,
in every storage: chunks, chunks in shards, metadata, manifests and nodes."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import storesvc_client as store
from storesvc.format.checksums import crc32c
from storesvc_client._foreign.locations import open_location
from storesvc_client._foreign.zarr_arrays import (
    MAX_MANIFEST_BYTES,
    TensorStoreArray,
    longest_stored,
)
from storesvc_client.errors import DataLossError, PreconditionError
from tests.conftest import gcs_root, s3_root
from tests.foreign.orbax_checkpoints import WRITERS
from tests.foreign.own_memory import at_most
from tests.foreign.written_files import files_below, put_files

LONG: Final = 80 << 20
MAX_MEMORY_BYTES: Final = 64 << 20

LITTLE: Final[dict[str, Any]] = {"name": "bytes", "configuration": {"endian": "little"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which each chunk is a file."""
    root = tmp_path_factory.mktemp("folders") / "run" / "3"
    WRITERS["v0-files"](root, {"w": jnp.ones(4), "v": jnp.zeros(4)})
    return root.parent


def restore(url: str, **options: Any) -> Any:
    run = store.open_foreign(url, trust_uncommitted=True)
    return run.restore(**options)


def test_a_sparse_chunk_is_rejected_unread_and_the_other_leaves_are_read(
    folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders, tmp_path / "run")
    os.truncate(tmp_path / "run" / "3" / "w" / "0", 20 << 30)
    url = f"orbax:{tmp_path / 'run'}"
    with (
        at_most(MAX_MEMORY_BYTES),
        pytest.raises(DataLossError, match=r"'w', chunk '0': expected at most 1048594"),
    ):
        restore(url)
    assert [0.0] * 4 == restore(url, select="v")["v"].tolist()


@pytest.mark.emulated
@pytest.mark.parametrize("place", ["memory", "gs", "s3"])
def test_a_long_chunk_is_rejected_in_each_storage(
    folders: Path, place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    match place:
        case "gs":
            request.getfixturevalue("gcs")
            url = gcs_root()
        case "s3":
            url = s3_root(request.getfixturevalue("s3"))
        case _:
            url = f"memory://{tmp_path.name}"
    files = {**files_below(folders), "3/w/0": bytes(2 << 20)}
    put_files(files, open_location(url))
    assert [0.0] * 4 == restore(f"orbax:{url}", select="v")["v"].tolist()
    with pytest.raises(DataLossError, match="expected at most 1048594 stored bytes"):
        restore(f"orbax:{url}")


def sharded(folder: Path, **shard: Any) -> ts.TensorStore:
    """Returns an array of two chunks in one shard."""
    inner = {"chunk_shape": [2], "codecs": [LITTLE], **shard}
    codec = {"name": "sharding_indexed", "configuration": inner}
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    metadata = {"shape": [4], "data_type": "float32", "chunk_grid": grid}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    found = ts.open({**spec, "metadata": {**metadata, "codecs": [codec]}}, create=True)
    array = found.result()
    array.write(np.arange(4, dtype=np.float32)).result()
    return array


def read(array: ts.TensorStore) -> list[float]:
    into = np.zeros(2, np.float32)
    TensorStoreArray(array, row="w").read(((0, 2),), into).result(60)
    return into.tolist()


@pytest.mark.parametrize("location", ["start", "end"])
def test_a_long_chunk_in_a_shard_is_rejected(tmp_path: Path, location: str) -> None:
    """The shard itself is one of some GB."""
    array = sharded(tmp_path, index_location=location)
    assert [0.0, 1.0] == read(array)
    file = tmp_path / "c" / "0"
    entries = struct.pack("<4Q", 36, longest_stored(8) + 1, 44, 8)
    index = entries + crc32c(entries).to_bytes(4, "little")
    data = file.read_bytes()
    file.write_bytes(index + data[36:] if location == "start" else data[:-36] + index)
    with pytest.raises(DataLossError, match="bytes in a shard, got 1048586"):
        read(array)


def test_a_shard_with_an_index_that_cannot_be_checked_is_rejected(
    tmp_path: Path,
) -> None:
    big = {"name": "bytes", "configuration": {"endian": "big"}}
    inner = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1]}}
    for n, shard in enumerate(({"index_codecs": [big]}, {"codecs": [inner]})):
        array = sharded(tmp_path / str(n), **shard)
        with pytest.raises(PreconditionError, match="with one chunk in each shard"):
            TensorStoreArray(array, row="w")


def long_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.ocdbt", MAX_MANIFEST_BYTES + 1)


def long_metadata(folder: Path) -> None:
    database = ts.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    ).result()
    database.write("w/.zarray", bytes(LONG)).result()


@pytest.mark.parametrize("change", [long_manifest, long_metadata])
def test_a_database_with_a_long_document_is_rejected(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    WRITERS["v0-pytree"](tmp_path / "3", {"w": jnp.ones(4)})
    change(tmp_path / "3")
    with at_most(MAX_MEMORY_BYTES), pytest.raises(DataLossError, match="at most"):
        restore(f"orbax:{tmp_path / '3'}")


def test_a_database_with_a_long_node_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["v0-pytree"](tmp_path / "3", {"w": jnp.ones(4)})
    module = "storesvc_client._foreign.zarr_arrays.MAX_NODE_BYTES"
    monkeypatch.setattr(module, 10)
    with pytest.raises(DataLossError, match="nodes of at most 10 bytes, got more"):
        restore(f"orbax:{tmp_path / '3'}")
