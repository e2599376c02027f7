"""A store written in each version of the format stays readable.

``tests/golden/v1`` and ``v2`` were written once, by
``python -m tests.format.test_golden``, and so was ``items``, by a job of two processes,
once checkpoints had items; they must never be written again. A new format adds a folder
next to them.
"""

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_proto.v1 import bucket_pb2
from storesvc_proto.v1 import tree_pb2 as pb
from tests.support import stored_records
from tests.support.contract import Writer, frame
from tests.support.jax_job import run_job
from tests.support.server_process import ServerProcess

HERE = Path(__file__).parents[1] / "golden"


def the_tree() -> dict[str, Any]:
    """Contents of the checkpoint."""
    return {
        "a": {
            "params": {
                "layers": [
                    {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)},
                    {"kernel": np.arange(4).astype(ml_dtypes.bfloat16)},
                ],
                "odd/name %": np.array([1, -2, 7], ml_dtypes.int4),
            },
            "rng": jax.random.key(7),
            "step": 1234,
            "empty": np.zeros((3, 0), np.complex64),
        },
        "b": {7: np.float16(-0.0)},
    }


def values_of_all_kinds() -> dict[str, Any]:
    """Contents of the tree of the store ``items``."""
    return {
        "text": "é\n",
        "bytes": b"\x00\xff",
        "large": 2**64,
        "small": -(2**63) - 1,
        "none": ["", b""],
        "w": np.arange(3, dtype=np.float32),
    }


def items_of(process: int) -> dict[str, Any]:
    """Items of the store ``items``, as a process passes them."""
    return {
        "config": {"b": [1, -0.0, None, True, "é"], "a": 10**30},
        "notes": "é\n",
        "tokenizer": b"\x00\xff",
        "empty": "",
        "data": store.PerProcess({"at": 10**process}),
    }


def test_a_store_with_items_is_restored(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / "items", root)
    with store.connect(root.as_uri()) as client:
        run = client.run("golden/run")
        back, items = run.restore(7), run.items(7)
        damages = run.verify(7).damages

        assert items_of(0) == {
            **{name: items[name] for name in items if name != "data"},
            "data": store.PerProcess(items.per_process("data")[0]),
        }
        assert [{"at": 1}, {"at": 10}] == items.per_process("data")
        assert b'{"a":1' + b"0" * 30 + ',"b":[1,-0.0,null,true,"é"]}'.encode() == (
            items.encoded("config")
        )
    expected = values_of_all_kinds()
    assert expected.pop("w").tobytes() == back.pop("w").tobytes()
    assert expected == back
    assert () == damages


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_store_of_each_format_is_restored(tmp_path: Path, version: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / version, root)
    with store.connect(root.as_uri()) as client:
        run = client.run("golden/run")
        back = run.restore(1234)
        found = run.checkpoint(1234)

    expected = the_tree()
    assert str(jax.tree.structure(expected)) == str(jax.tree.structure(back))
    assert jax.random.key_data(expected["a"].pop("rng")).tolist() == (
        jax.random.key_data(back["a"].pop("rng")).tolist()
    )
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(back), strict=True
    ):
        assert type(one) is type(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert {"loss": 0.5} == found.metrics
    assert {"note": "é"} == found.labels


def test_all_kinds_of_records_of_version_2_are_read(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / "v2", root)
    with store.connect(root.as_uri()) as client:
        run = client.run("golden/run")
        (tag,), (hold,), (upload,) = (
            run.tags.list(),
            run.holds.list(),
            run.uploads.list(),
        )
        policy = run.retention.get()

    assert ("best", 1234) == (tag.name, tag.step)
    assert (1234, "golden") == (hold.step, hold.owner)
    assert 1235 == upload.step
    assert store.KeepLatest(3) == policy


def test_records_of_version_1_are_read_and_bound_by_writes_after_an_upgrade(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    shutil.copytree(HERE / "v2", root)
    for place in sealed_places(root):
        stored_records.downgrade(root / place)
    with store.connect(root.as_uri()) as client:
        run = client.run("golden/run")
        assert 1234 == run.restore("best")["a"]["step"]
        (hold,) = run.holds.list()
        assert "golden" == hold.owner
        assert store.KeepLatest(3) == run.retention.get()
        assert (1, 2) == client.upgrade()
        run.tags.set("best", 1234, protected=True)
        run.update(1234, labels={"note": "bound"})

    places = RunPaths(RunName("golden", "run"))
    bound = {place for place in sealed_places(root) if version_of(root / place) == 2}
    assert {places.tag("best"), places.checkpoint(1234), layout.STORE} <= bound
    assert set() < set(sealed_places(root)) - bound  # what was not written stays


def sealed_places(root: Path) -> list[str]:
    """Returns the places of a store that hold sealed records."""
    prefixes = ("store", "runs/", "journal/")
    folders = ("/checkpoints/", "/tags/", "/holds/", "/writers/", "/staging/")
    places = [file.relative_to(root).as_posix() for file in root.rglob("*.binpb")]
    return sorted(
        place
        for place in places
        if place.startswith(prefixes)
        or any(folder in place for folder in folders)
        or ("/uploads/" in place and "/tree-" not in place)
    )


def version_of(file: Path) -> int:
    """Returns the version of the format that a record was sealed in."""
    return bucket_pb2.Sealed.FromString(file.read_bytes()).format_version


def test_the_numbers_of_the_contract_never_change() -> None:
    assert {
        "key": 1,
        "path_kinds": 2,
        "kind": 3,
        "dtype": 4,
        "dtypes": 5,
        "rank": 6,
        "shape": 7,
        "chunk_shape": 8,
        "sharding": 9,
        "shardings": 10,
        "prng_impl": 11,
        "prng_impls": 12,
        "structure": 13,
    } == {f.name: f.number for f in pb.LeafTable.DESCRIPTOR.fields}
    assert {
        "LEAF_KIND_UNSPECIFIED": 0,
        "LEAF_KIND_ARRAY": 1,
        "LEAF_KIND_HOST_ARRAY": 2,
        "LEAF_KIND_HOST_SCALAR": 3,
        "LEAF_KIND_PYTHON_SCALAR": 4,
        "LEAF_KIND_PRNG_KEY": 5,
        "LEAF_KIND_TEXT": 6,
        "LEAF_KIND_JSON": 7,
        "LEAF_KIND_BYTES": 8,
        "LEAF_KIND_INTEGER": 9,
    } == dict(pb.LeafKind.items())
    assert {
        "ordinal": 1,
        "crc32c": 2,
        "digests": 3,
        "file": 4,
        "offset": 5,
        "length": 6,
        "files": 7,
    } == {f.name: f.number for f in pb.ChunkTable.DESCRIPTOR.fields}


def write(target: Path) -> None:
    """Writes a golden store, with a record of each kind."""
    assert not target.exists(), "a golden store is written once"
    scratch = tempfile.TemporaryDirectory()
    server = ServerProcess(target, Path(scratch.name))
    server.start()
    with store.connect(server.address) as client:
        run = client.run("golden/run")
        run.save(1234, the_tree(), metrics={"loss": 0.5}, labels={"note": "é"}).result()
        run.tags.set("best", 1234)
        run.retention.set(store.KeepLatest(3))
        run.holds.create(1234, ttl=timedelta(days=1), owner="golden")
    writer = Writer(server.address, "golden/run", 1235)
    writer.begin()
    writer.write(frame(0))
    server.kill()
    (target / layout.RESERVE).unlink(missing_ok=True)
    scratch.cleanup()


def save_items(target: str) -> int:
    """Saves the checkpoint of the store ``items``, as one process of a job."""
    with store.connect(target) as client:
        items = items_of(jax.process_index())
        return (
            client.run("golden/run")
            .save(7, values_of_all_kinds(), items=items)
            .result()
            .step
        )


def write_items(target: Path) -> None:
    """Writes the golden store of items."""
    assert not target.exists(), "a golden store is written once"
    scratch = tempfile.TemporaryDirectory()
    server = ServerProcess(target, Path(scratch.name))
    server.start()
    part = "tests.format.test_golden:save_items"
    run_job(part, 2, devices=1, target=server.address)
    server.kill()
    (target / layout.RESERVE).unlink(missing_ok=True)
    scratch.cleanup()


if __name__ == "__main__":
    write(HERE / "v2")
    write_items(HERE / "items")
