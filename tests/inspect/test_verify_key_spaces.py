"""Verification reports differences of the key space and of the file table."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import storesvc_client as store
from storesvc.format import dtypes
from storesvc.format.checksums import digest
from storesvc.format.names import RunName
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.contract import CHUNK
from tests.support.saved_checkpoint import (
    CHUNKS,
    Saved,
    flip,
    found_in,
    node_ranges,
    of_chunks,
)
from tests.support.server_process import ServerProcess

# --- a damaged key space ----------------------------------------------------------


@pytest.mark.parametrize("damage", ["delete", "flip", "cut"])
@pytest.mark.parametrize("what", ["root", "node"])
def test_a_damaged_key_space_is_reported_once_a_leaf(
    run: store.Run, saved: Saved, what: str, damage: str
) -> None:
    file, where = saved.tree / "manifest.ocdbt", slice(0, 20)
    if what == "node":
        file, where = node_ranges(saved)[0]
    match damage:
        case "delete":
            file.unlink()
        case "flip":
            flip(file, where.start + 9)
        case "cut":
            os.truncate(file, where.start + 9)

    found = run.verify(3)

    assert ("x", (), "key_space") in found_in(found)
    assert "key space of the checkpoint is missing or damaged" in (
        next(d.message for d in found.damages if d.index == ())
    )
    assert CHUNKS == found.chunk_count
    # other values in the same file are reported too, by their own names
    assert all(kind == "missing" for _, index, kind in found_in(found) if index)


def test_a_key_space_that_shows_a_chunk_elsewhere_is_reported(
    run: store.Run, saved: Saved
) -> None:
    saved.show(dtypes.chunk_key("x", (2,)), b"other")

    found = run.verify(3)

    assert of_chunks("key_space", 2) == found_in(found)
    assert "got 5 bytes at" in found.damages[0].message


def test_a_key_space_without_a_chunk_is_reported(run: store.Run, saved: Saved) -> None:
    saved.show(dtypes.chunk_key("x", (1,)), None)

    assert of_chunks("key_space", 1) == found_in(run.verify(3))


def test_a_key_space_that_shows_a_leaf_that_was_never_saved_is_reported(
    run: store.Run, saved: Saved
) -> None:
    saved.show("x/c/99", b"new")
    saved.show("alien", b"new")

    assert [("alien", (), "key_space"), ("x", (), "key_space")] == found_in(
        run.verify(3)
    )


@pytest.mark.parametrize("other", ["nothing", "shorter", "of another shape"])
def test_metadata_that_describes_something_else_is_reported(
    run: store.Run, saved: Saved, other: str
) -> None:
    true = dtypes.metadata_bytes((CHUNKS * CHUNK,), (CHUNK,), "uint8")
    value = {"nothing": None, "shorter": b"{}"}.get(other, true.replace(b"50", b"51"))
    saved.show(dtypes.metadata_key("x"), value)

    found = run.verify(3)

    assert [("x", (), "key_space")] == found_in(found)
    assert "zarr.json" in found.damages[0].message


def test_a_damaged_chunk_is_reported_once_by_its_first_cause(
    run: store.Run, saved: Saved
) -> None:
    saved.change(2, lambda stored: stored.reverse())
    saved.show(dtypes.chunk_key("x", (2,)), b"other")

    assert of_chunks("checksum", 2) == found_in(run.verify(3))


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_data_file_is_reported_or_harmless(
    server: ServerProcess, run: store.Run
) -> None:
    tree = {f"leaf-{n}": np.full(150 * (n + 1), n, np.uint8) for n in range(5)}
    run.save(3, tree).result()
    saved = Saved(server.root, RunName.parse(run.name))
    manifest = saved.manifest
    chunks = [(saved.file(n), saved.range(n)) for n in range(manifest.tree.chunk_count)]
    nodes = node_ranges(saved)
    files = [f for f in (saved.folder / "pool").rglob("*") if f.is_file()]
    rng = random.Random(7)
    counts = {"chunk": 0, "node": 0, "key_space": 0, "harmless": 0}
    targets = [
        (file, rng.randrange(file.stat().st_size))
        for file in files * (80 // len(files))
    ]
    targets += [(f, rng.randrange(where.start, where.stop)) for f, where in nodes * 25]
    for file, position in targets:
        original = file.read_bytes()
        flip(file, position, rng.randrange(8))

        found = run.verify(3)

        hit = [n for n, (f, w) in enumerate(chunks) if f == file and is_in(position, w)]
        if hit:
            assert [(f"leaf-{hit[0]}", (0,), "checksum")] == found_in(found)
            counts["chunk"] += 1
        elif any(f == file and is_in(position, where) for f, where in nodes):
            assert [(f"leaf-{n}", (), "key_space") for n in range(5)] == found_in(found)
            counts["node"] += 1
        elif found.ok:  # bytes of nodes that an earlier write replaced
            assert is_shown_by_tensorstore(saved, tree)
            counts["harmless"] += 1
        else:
            assert [(1, "key_space")] == [(len(found_in(found)), found_in(found)[0][2])]
            counts["key_space"] += 1
        file.write_bytes(original)
    assert run.verify(3).ok
    assert len(targets) >= 100
    assert all(n >= 5 for name, n in counts.items() if name != "harmless"), counts


def is_in(position: int, where: slice) -> bool:
    return bool(where.start <= position < where.stop)


def is_shown_by_tensorstore(saved: Saved, tree: dict[str, Any]) -> bool:
    spec = {
        "driver": "ocdbt",
        "base": f"file://{saved.root / saved.places.pool}",
        "manifest": f"file://{saved.tree}/",
    }
    return all(
        np.array_equal(
            value,
            ts.open({"driver": "zarr3", "kvstore": {**spec, "path": f"{key}/"}})
            .result()
            .read()
            .result(),
        )
        for key, value in tree.items()
    )


# --- the file table ---------------------------------------------------------------


def file_table(saved: Saved) -> Path:
    record = saved.record
    return saved.root / saved.places.file_table(record.upload, record.files_digest)


@pytest.mark.parametrize("damage", ["delete", "flip", "cut", "empty"])
def test_a_damaged_file_table_is_reported(
    run: store.Run, saved: Saved, damage: str
) -> None:
    place = file_table(saved)
    match damage:
        case "delete":
            place.unlink()
        case "flip":
            flip(place, place.stat().st_size // 2)
        case "cut":
            os.truncate(place, place.stat().st_size - 1)
        case "empty":
            place.write_bytes(b"")

    found = run.verify(3)

    assert [("", (), "file_table")] == found_in(found)
    wanted = "it is missing" if damage == "delete" else "expected bytes with the digest"
    assert found.damages[0].message.startswith(f"the file table: {wanted}")
    assert CHUNKS == found.chunk_count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.file.append("x"), "it cannot be read"),
        (lambda table: table.Clear(), "got nothing"),
        (lambda table: table.chunk_bytes.__setitem__(0, 7), "got 7 bytes"),
    ],
    ids=["uneven", "no file", "other bytes"],
)
def test_a_file_table_that_contradicts_the_chunks_is_reported(
    run: store.Run, saved: Saved, change: Callable[[pb.FileTable], object], message: str
) -> None:
    table = pb.FileTable.FromString(file_table(saved).read_bytes())
    change(table)
    record = saved.record
    data = table.SerializeToString(deterministic=True)
    record.files_digest = digest(data)
    saved.put(record)
    file_table(saved).write_bytes(data)

    found = run.verify(3)

    assert [("", (), "file_table")] == found_in(found)
    assert message in found.damages[0].message
