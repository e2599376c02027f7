"""Every leaf of a checkpoint that Orbax wrote is read as it was saved."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import whole
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats.orbax_step import open_root
from storesvc_client._foreign.locations import open_location
from storesvc_client._items.values import unpack_containers
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb
from tests.foreign.orbax_checkpoints import WRITERS, arrays, nnx_state, tree_for
from tests.support.foreign_reading import read_items


def read(path: Path, step: int | None = None) -> ForeignStep:
    """Returns a step of a folder, the newest one by default."""
    root = open_root(open_location(path))
    return root.open(root.steps()[-1] if step is None else step)


def contents(step: ForeignStep) -> dict[str, tuple[Any, ...]]:
    """Returns kind, dtype, shape and bytes of each leaf and item."""
    found = {}
    for leaf, array in zip(step.tree.leaves, step.arrays, strict=True):
        into = np.full(leaf.shape, 1, DTYPES[leaf.dtype])
        array.read(whole(leaf.shape), into).result()
        found[leaf.key] = (leaf.kind, leaf.dtype, leaf.shape, into.tobytes())
    return found


def of_tree(tree: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields what ``contents`` should return for a tree."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = prefix + "/".join(
            str(getattr(part, "name", getattr(part, "key", getattr(part, "idx", ""))))
            for part in path
        )
        yield key, _row(leaf)


def _row(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, str):
        data = leaf.encode()
        return pb.LEAF_KIND_TEXT, "uint8", (len(data),), data
    kind = pb.LEAF_KIND_ARRAY
    if isinstance(leaf, np.ndarray):
        kind = pb.LEAF_KIND_HOST_ARRAY
    elif isinstance(leaf, int | float):
        kind = pb.LEAF_KIND_PYTHON_SCALAR
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind, leaf = pb.LEAF_KIND_PRNG_KEY, jax.random.key_data(leaf)
    host = np.asarray(leaf)
    return kind, host.dtype.name, host.shape, host.tobytes()


@pytest.mark.parametrize("writer", WRITERS)
def test_every_leaf_of_every_writer_is_equal_as_bytes(
    writer: str, written: Callable[[str], Path]
) -> None:
    step = read(written(writer))
    prefix = "items/" if writer == "v0-composite" else ""
    found = contents(step)
    assert dict(of_tree(tree_for(writer), prefix)) == {
        key: row
        for key, row in found.items()
        if key.startswith(prefix) and not key.startswith("%item")
    }
    leaf = step.tree.leaves[step.tree.by_key[f"{prefix}layers/1/w"]]
    assert "k" * bool(prefix) + "kik" == leaf.path_kinds
    assert (16, 8) == leaf.chunk_shape
    assert leaf.sharding is not None
    assert (("x",), ("y",)) == leaf.sharding.spec
    assert (4, 2) == leaf.sharding.axis_sizes


@pytest.mark.parametrize("writer", ["v0-pytree", "v1-save"])
def test_empty_containers_are_in_the_document(
    writer: str, written: Callable[[str], Path]
) -> None:
    found = unpack_containers(read(written(writer)).tree.structure)
    empties = [each for each in found if each.key.startswith("empty/")]
    assert [("none", 0), ("{}", 1), ("[]", 2), ("()", 3)] == [
        (each.what, each.path[-1])
        for each in sorted(empties, key=lambda each: each.key)
    ]
    assert "opt/1" in {each.key for each in found}  # an EmptyState of optax


def test_a_manager_has_steps_metrics_and_metadata(
    written: Callable[[str], Path],
) -> None:
    path = written("v0-manager")
    root = open_root(open_location(path))
    assert [5, 100] == list(root.steps())
    step = root.open(5)
    assert {"loss": 0.5} == dict(step.metrics)
    assert {"who": "a test"} == json.loads(step.labels["orbax.custom_metadata"])
    assert step.create_time is not None
    assert step.create_time.isoformat() < step.labels["orbax.commit_time"]
    assert f"{path.as_uri()}/ckpt_000005" == step.url
    assert read(path, 5).digest == step.digest != root.open(100).digest
    assert [0] == list(open_root(open_location(path / "ckpt_000005")).steps())


def test_other_items_of_a_step_are_items(written: Callable[[str], Path]) -> None:
    step = read(written("v0-composite"))
    found = contents(step)
    assert "ema/w" in found
    kind, _, _, data = found["%item/model-config"]
    assert (pb.LEAF_KIND_JSON, {"layers": [1, 2]}) == (kind, json.loads(data))
    assert "model_config" == step.labels["orbax.item.model-config"]
    kind, _, _, data = found["%item/iter/0"]
    saved = written("v0-composite") / "3/iter/process_0-of-1.json"
    assert (pb.LEAF_KIND_BYTES, saved.read_bytes()) == (kind, data)


def test_json_items_of_version_1_are_json(tmp_path: Path) -> None:
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="model_config")
    config = {"layers": [1, None], "name": "übung"}
    options = v1.options.CheckpointablesOptions(registry=registry)
    with v1.Context(checkpointables_options=options):
        v1.save_checkpointables(
            tmp_path / "7", {"state": {"w": np.ones(2)}, "model_config": config}
        )
    step = read(tmp_path)
    assert {"model-config": config} == read_items(step)


def test_a_state_of_nnx_has_its_variables(tmp_path: Path) -> None:
    WRITERS["v0-standard"](tmp_path / "nnx", nnx_state())
    assert {"bias/value", "kernel/value"} == set(contents(read(tmp_path / "nnx")))


def test_a_part_of_an_array_is_read_into_a_strided_destination(
    written: Callable[[str], Path],
) -> None:
    step = read(written("v0-pytree"))
    row = step.tree.by_key["layers/1/w"]
    into = np.zeros((40, 20), np.float32)[5:25, ::2]
    step.arrays[row].read(((10, 30), (3, 13)), into).result()
    expected = np.asarray(arrays()["layers"][1]["w"])[10:30, 3:13]
    np.testing.assert_array_equal(expected, into)


def test_steps_that_are_being_written_are_left_out(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(written("v0-manager"), root)
    shutil.copytree(
        root / "ckpt_000100", root / "ckpt_000200.orbax-checkpoint-tmp-1795543497"
    )
    (root / "notes").mkdir()
    assert [5, 100] == list(open_root(open_location(root)).steps())
    with pytest.raises(NotFoundError, match="expected a finished step 200, got none"):
        read(root, 200)


def test_two_folders_of_one_step_are_rejected(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-manager"), tmp_path / "run")
    shutil.copytree(tmp_path / "run/ckpt_000100", tmp_path / "run/100")
    with pytest.raises(PreconditionError, match=r"got 100 and ckpt_000100; move one"):
        read(tmp_path / "run", 100)


def test_two_arrays_of_one_joined_name_are_rejected_by_both_names(
    tmp_path: Path,
) -> None:
    tree = {"a": {"b": np.zeros(2)}, "a.b": np.ones(2)}
    WRITERS["v0-pytree"](tmp_path / "step", tree)
    with pytest.raises(PreconditionError, match=r"got 'a/b' and 'a\.b', both stored"):
        read(tmp_path / "step")


def test_a_missing_chunk_is_an_error_and_not_zeros(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-files"), tmp_path / "step")
    (tmp_path / "step/layers.1.w/2.1").unlink()
    with pytest.raises(DataLossError, match=r"leaf 'layers/1/w': its stored bytes are"):
        contents(read(tmp_path / "step"))


def test_a_lost_data_file_is_an_error(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-pytree"), tmp_path / "step")
    for file in (tmp_path / "step").rglob("d/*"):
        file.unlink()
    with pytest.raises(DataLossError, match="stored bytes are missing or damaged"):
        contents(read(tmp_path / "step"))


def test_a_link_among_the_data_that_leaves_the_folder_is_rejected(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-files"), tmp_path / "step")
    (tmp_path / "elsewhere").write_bytes(b"secret")
    chunk = tmp_path / "step/layers.1.w/2.1"
    chunk.unlink()
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataLossError, match=r"got a symbolic link to .*/elsewhere"):
        read(tmp_path / "step")


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda fields: [],
    "no entries": lambda fields: {"tree_metadata": None},
    "other types": lambda fields: _with(fields, value_type="os.system"),
    "a number as key": lambda fields: _with(fields, key=3),
    "a type of key": lambda fields: _with(fields, key_type=7),
    "a flag": lambda fields: {**fields, "use_ocdbt": "yes"},
    "an absent array": lambda fields: _with(fields, key="elsewhere"),
    "upwards": lambda fields: {**_with(fields, key="../.."), "use_ocdbt": False},
    "absolute": lambda fields: {**_with(fields, key="/etc"), "use_ocdbt": False},
    "no index": lambda fields: _with(fields, key="01", key_type=1),
}


def _with(fields: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Returns metadata whose first array has other keys or another type."""
    text, row = next(iter(fields["tree_metadata"].items()))
    key = {**row["key_metadata"][0], **changed}
    value = {"value_type": changed.get("value_type", "jax.Array")}
    row = {"key_metadata": [key], "value_metadata": value}
    return {**fields, "tree_metadata": {text: row}}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_that_contradicts_itself_is_rejected(
    name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-pytree"), tmp_path / "step")
    file = tmp_path / "step/_METADATA"
    file.write_text(json.dumps(HOSTILE[name](json.loads(file.read_text()))))
    with pytest.raises((DataLossError, PreconditionError)):
        read(tmp_path / "step")


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (1, "1e999"),
        (1, "0"),
        pytest.param(9000, "9" * 4000, marks=pytest.mark.slow),
        (100_000, "2"),
        (100, "1"),
    ],
    ids=["infinite", "none", "product of hours", "many", "more than any array has"],
)
def test_a_mesh_that_cannot_be_is_rejected_at_once(
    count: int, size: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-pytree"), tmp_path / "step")
    names = json.dumps([*map(str, range(count))])
    sharding = (
        f'{{"sharding_type": "NamedSharding", "axis_names": {names}, '
        f'"shape": [{", ".join([size] * count)}], "partition_spec": []}}'
    )
    (tmp_path / "step/_sharding").write_text(json.dumps({"dw==": sharding}))
    with pytest.raises(DataLossError, match="_sharding: expected") as raised:
        read(tmp_path / "step")
    assert len(str(raised.value)) < 1500


def test_metrics_that_no_float_holds_are_left_out(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-manager"), tmp_path / "run")
    file = tmp_path / "run/ckpt_000005/_CHECKPOINT_METADATA"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "metrics": {"loss": 10**400}}))
    shutil.rmtree(tmp_path / "run/ckpt_000005/metrics", ignore_errors=True)
    assert {} == dict(read(tmp_path / "run", 5).metrics)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\0", '{"a": 1e999'],
    ids=range(6),
)
def test_metadata_that_is_no_json_is_rejected(
    text: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-pytree"), tmp_path / "step")
    for name in ("_METADATA", "_sharding", "_CHECKPOINT_METADATA"):
        path = tmp_path / "step" / name
        before = path.read_text()
        path.write_text(text)
        with pytest.raises(DataLossError, match=f"{name}: expected JSON"):
            read(tmp_path / "step")
        path.write_text(before)


def test_a_folder_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "something").mkdir()
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotFoundError, match="expected checkpoints of Orbax"):
            open_root(open_location(path))
