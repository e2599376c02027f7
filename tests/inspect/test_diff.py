"""Diffs: the differences between two checkpoints, by leaf, without reading data."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc.inspect.rules import CONTENT, Difference, differences
from storesvc_client.cli import main
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import tree_pb2
from tests.format.test_golden import HERE as GOLDEN
from tests.format.test_golden import the_tree
from tests.support import stored_records
from tests.support.contract import Writer
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess

TREE = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers": [np.full((3, 5), n, np.int16) for n in range(3)],
    "nothing": np.zeros((0, 3)),
    "rng": jax.random.key(0),
    "scale": 2.5,
}


def saved(run: store.Run, before: Any, after: Any) -> store.Diff:
    """Saves two trees and returns their differences."""
    run.save(1, before).result()
    run.save(2, after).result()
    return run.diff(1, 2)


def kinds(diff: store.Diff) -> dict[str, str]:
    return {leaf.key: leaf.kind for leaf in diff.differences}


# --- through a server -------------------------------------------------------------


def test_the_same_tree_saved_twice_does_not_differ(run: store.Run) -> None:
    copy = jax.tree.map(lambda x: x, TREE)

    diff = saved(run, TREE, copy)

    assert diff.is_same
    assert (1, 2, 7, ()) == (
        diff.base.step,
        diff.checkpoint.step,
        diff.same_leaf_count,
        diff.differences,
    )


def test_a_checkpoint_does_not_differ_from_itself(run: store.Run) -> None:
    run.save(1, TREE).result()

    assert run.diff(1).is_same
    assert run.diff("latest", "latest").is_same


def test_each_kind_of_difference_is_reported_in_order_of_keys(run: store.Run) -> None:
    before = {
        "content": np.arange(6),
        "dtype": np.zeros(3, np.float32),
        "gone": np.zeros((2, 2), np.int8),
        "same": np.ones(4),
        "shape": np.zeros((2, 3)),
    }
    after = {
        "content": np.arange(6)[::-1].copy(),
        "dtype": np.zeros(3, np.int32),  # the very same bytes
        "new": jnp.zeros(2, jnp.bfloat16),
        "same": np.ones(4),
        "shape": np.zeros((3, 2)),  # the very same bytes
    }

    diff = saved(run, before, after)

    assert not diff.is_same
    assert 1 == diff.same_leaf_count
    assert [
        ("content", "content", "int64", (6,), "int64", (6,), 1),
        ("dtype", "dtype", "float32", (3,), "int32", (3,), 0),
        ("gone", "removed", "int8", (2, 2), None, None, 0),
        ("new", "added", None, None, "bfloat16", (2,), 0),
        ("shape", "shape", "float64", (2, 3), "float64", (3, 2), 0),
    ] == [
        (
            leaf.key,
            leaf.kind,
            leaf.base_dtype,
            leaf.base_shape,
            leaf.dtype,
            leaf.shape,
            leaf.changed_chunk_count,
        )
        for leaf in diff.differences
    ]
    assert [1] * 5 == [leaf.chunk_count for leaf in diff.differences]


def test_scalars_are_compared_too(run: store.Run) -> None:
    diff = saved(run, {"a": 1, "b": 1, "c": True}, {"a": 2, "b": 1.0, "c": True})

    assert {"a": "content", "b": "dtype"} == kinds(diff)
    assert ((), ()) == (diff.differences[0].base_shape, diff.differences[0].shape)


@pytest.mark.parametrize("other", ["rbg", "unsafe_rbg"])
def test_keys_of_another_implementation_differ_in_dtype(
    run: store.Run, other: str
) -> None:
    keys = {"keys": jax.random.split(jax.random.key(0, impl="threefry2x32"), 3)}
    others = {"keys": jax.random.split(jax.random.key(0, impl=other), 3)}

    (leaf,) = saved(run, keys, others).differences

    assert "dtype" == leaf.kind
    assert ("key<threefry2x32>", (3,)) == (leaf.base_dtype, leaf.base_shape)
    assert (f"key<{other}>", (3,)) == (leaf.dtype, leaf.shape)


def test_only_the_changed_chunks_are_counted(
    server: ServerProcess, run: store.Run
) -> None:
    Writer(server.address, run.name, 1, chunks=4).save(range(4))
    large = np.zeros(3 * 2**20)  # more bytes than a chunk may have
    run.save(2, {"x": large}).result()
    large[-1] = 1
    run.save(3, {"x": large}).result()

    (leaf,) = run.diff(2, 3).differences

    assert "content" == leaf.kind
    assert 1 == leaf.changed_chunk_count < leaf.chunk_count
    assert {"x": "shape"} == kinds(run.diff(1, 2))


def test_a_leaf_that_was_saved_in_other_chunks_is_not_known_to_differ(
    server: ServerProcess, run: store.Run
) -> None:
    Writer(server.address, run.name, 1, chunks=3).save(range(3))
    ours = np.repeat(np.arange(3, dtype=np.uint8), 1000)
    run.save(2, {"x": ours}).result()

    (leaf,) = run.diff(1, 2).differences

    assert ("unknown", 0, 1) == (leaf.kind, leaf.changed_chunk_count, leaf.chunk_count)


def test_checkpoints_of_two_runs_are_compared(client: store.Client) -> None:
    one, other = client.run("tests/diff-one"), client.run("elsewhere/diff-other")
    one.save(5, TREE).result()
    other.save(7, TREE | {"scale": 3.5}).result()

    diff = one.diff(5, of=other)

    assert {"scale": "content"} == kinds(diff)
    assert ("tests/diff-one", 5) == (diff.base.run, diff.base.step)
    assert ("elsewhere/diff-other", 7) == (diff.checkpoint.run, diff.checkpoint.step)


def test_a_run_of_another_client_is_rejected(
    client: store.Client, server_address: str
) -> None:
    with (
        store.connect(server_address) as stranger,
        pytest.raises(store.InvalidRequestError, match="of the same client"),
    ):
        client.run("tests/mine").diff(1, of=stranger.run("tests/theirs"))


def test_a_checkpoint_of_the_first_release_holds_what_is_saved_today(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / "v1", root)
    with store.connect(root.as_uri()) as client:
        client.upgrade()  # a store of that release is only read
        run = client.run("golden/run")
        run.save(2000, the_tree()).result()

        assert run.diff(1234, 2000).is_same


def test_what_does_not_exist_cannot_be_compared(client: store.Client) -> None:
    run = client.run("tests/diff-known")
    run.save(1, {"x": 1}).result()

    with rejected("RUN_NOT_FOUND", store.NotFoundError):
        run.diff(1, of=client.run("tests/diff-unknown"))
    for base, which in ((1, 2), (2, 1)):
        with rejected(
            "CHECKPOINT_NOT_FOUND", store.NotFoundError, match="diff-known@2"
        ):
            run.diff(base, which)
    with pytest.raises(store.NotFoundError):
        run.diff(1, "no-such-tag")
    with pytest.raises(store.InvalidRequestError):
        run.diff(-1)


def test_a_deleted_checkpoint_is_not_compared(
    server: ServerProcess, run: store.Run
) -> None:
    saved(run, {"x": 1}, {"x": 2})
    folder = server.root / "data" / run.name / "checkpoints"
    slot = min(folder.iterdir())
    place = slot.relative_to(server.root).as_posix()
    record = stored_records.read(server.root, place, pb.CheckpointRecord)
    record.state = pb.CheckpointRecord.STATE_DELETED
    stored_records.write(server.root, place, record)

    with rejected("CHECKPOINT_DELETED", store.NotFoundError):
        run.diff(1, 2)


def test_a_damaged_manifest_is_data_loss(server: ServerProcess, run: store.Run) -> None:
    run.save(1, {"x": 1}).result()
    (file,) = (server.root / "data" / run.name / "manifests").iterdir()
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(store.DataLossError, match="manifest"):
        run.diff(1)


@pytest.mark.slow
def test_more_differences_than_a_message_holds_are_all_reported(run: store.Run) -> None:
    leaves = 1203
    diff = saved(
        run,
        {f"leaf-{n:04}": np.int32(n) for n in range(leaves)},
        {f"leaf-{n:04}": np.int32(-n) for n in range(leaves)},
    )

    assert [f"leaf-{n:04}" for n in range(1, leaves)] == list(kinds(diff))
    assert 1 == diff.same_leaf_count


# --- the deciding code ------------------------------------------------------------


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A manifest of a few leaves of few chunks of few contents."""
    keys = sorted(draw(st.sets(st.sampled_from("abcdef"))))
    leaves = tuple(
        Leaf(
            key=key,
            path_kinds="k",
            kind=tree_pb2.LEAF_KIND_HOST_ARRAY,
            dtype=draw(st.sampled_from(["int8", "uint8"])),
            shape=(draw(st.integers(0, 4)),),
            chunk_shape=(draw(st.integers(1, 2)),),
        )
        for key in keys
    )
    tree = Tree(leaves)
    rows = tree.chunk_count
    contents = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    digests = np.zeros((rows, 16), np.uint8)
    digests[:, 15] = contents
    zeros = np.zeros(rows, np.int64)
    sums = Sums(
        ordinal=np.arange(rows), crc32c=np.zeros(rows, np.uint32), digests=digests
    )
    places = ChunkLocations(files=(), file=zeros, offset=zeros, length=zeros)
    return Manifest(tree, sums, places)


def contents_of(manifest: Manifest, row: int) -> list[int]:
    first = manifest.tree.first_chunk
    contents: list[int] = manifest.sums.digests[
        first[row] : first[row + 1], 15
    ].tolist()
    return contents


def expected(before: Manifest, after: Manifest, key: str) -> tuple[str, int] | None:
    """Returns the kind of a difference as the contract defines it, for one leaf."""
    one, other = before.tree.by_key.get(key), after.tree.by_key.get(key)
    if one is None:
        return "KIND_ADDED", 0
    if other is None:
        return "KIND_REMOVED", 0
    old, new = before.tree.leaves[one], after.tree.leaves[other]
    if old.shape != new.shape:
        return "KIND_SHAPE", 0
    if old.dtype != new.dtype:
        return "KIND_DTYPE", 0
    if old.shape != (0,) and old.chunk_shape != new.chunk_shape:
        return "KIND_UNKNOWN", 0
    pairs = zip(contents_of(before, one), contents_of(after, other), strict=True)
    changed = sum(a != b for a, b in pairs)
    return ("KIND_CONTENT", changed) if changed else None


def kind_of(difference: Difference) -> tuple[str, int]:
    name = api.LeafDifference.Kind.Name(difference.kind)
    return name, difference.changed_chunks


@given(manifests(), manifests())
def test_differences_are_those_of_each_leaf_by_itself(
    before: Manifest, after: Manifest
) -> None:
    keys = sorted(before.tree.by_key | after.tree.by_key)
    wanted = {key: expected(before, after, key) for key in keys}

    found = differences(before, after)

    assert {key: kind for key, kind in wanted.items() if kind} == {
        difference.leaf.key: kind_of(difference) for difference in found
    }
    assert sorted(d.leaf.key for d in found) == [d.leaf.key for d in found]


@given(manifests())
def test_nothing_differs_from_itself(manifest: Manifest) -> None:
    assert [] == differences(manifest, manifest)


@given(manifests(), manifests())
def test_content_differs_both_ways(before: Manifest, after: Manifest) -> None:
    def content(found: list[Difference]) -> dict[str, int]:
        return {d.leaf.key: d.changed_chunks for d in found if d.kind == CONTENT}

    assert content(differences(before, after)) == content(differences(after, before))


# --- storectl ---------------------------------------------------------------------


def storectl(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--store", address, *arguments])


def test_storectl_diff_prints_a_table_and_its_sums(
    server_address: str, run: store.Run
) -> None:
    changed = TREE | {"scale": 3.5, "more": np.zeros(2, np.int8)}
    del changed["embed"]
    saved(run, TREE, changed)

    result = storectl(server_address, "diff", f"{run.name}@1", f"{run.name}@latest")

    assert (0, "") == (result.exit_code, result.stderr)
    assert [
        "KEY    WHAT     BEFORE        AFTER    CHUNKS",
        "embed  removed  float32[3,4]  -             1",
        "more   added    -             int8[2]       1",
        "scale  content  float64[]     same     1 of 1",
        "1 added, 1 content, 1 removed; 5 leaves the same",
    ] == result.stdout.splitlines()


def test_storectl_diff_of_the_same_says_so(server_address: str, run: store.Run) -> None:
    run.save(1, TREE).result()

    result = storectl(server_address, "diff", f"{run.name}@1", f"{run.name}@1")

    assert (0, "") == (result.exit_code, result.stderr)
    assert "no leaf differs; 7 leaves the same\n" == result.stdout


def test_storectl_diff_prints_json(server_address: str, run: store.Run) -> None:
    saved(run, TREE, TREE | {"scale": 3.5})
    paths = (f"{run.name}@1", f"{run.name}@2")

    document = json.loads(storectl(server_address, "diff", *paths, "--json").stdout)

    (leaf,) = document["differences"]
    assert [1, 2, 6] == [
        document["base"]["step"],
        document["checkpoint"]["step"],
        document["same_leaf_count"],
    ]
    assert ["scale", "content", []] == [leaf[k] for k in ("key", "kind", "shape")]


def test_storectl_diff_takes_whole_checkpoints_only() -> None:
    result = storectl("127.0.0.1:1", "diff", "prod/run@3", "prod/run@4:params/**")

    assert 2 == result.exit_code
    assert "'prod/run@4:params/**': expected a run or a checkpoint" in result.stderr
