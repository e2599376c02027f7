"""Checkpoints that levanter wrote, and others in its layout, are read as steps.

``tests/golden/foreign/levanter`` has what three versions of levanter wrote, each with
the checksums of what it had in memory (``levanter_writer.py``). For the tests of
damage, jax's ``GlobalAsyncCheckpointManager`` writes the arrays, as it does for
levanter, with the specs that ``levanter/tensorstore_serialization.py`` builds.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.array_serialization.serialization import (
    GlobalAsyncCheckpointManager,
)

import storesvc_client as store
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats import levanter
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from tests.support.foreign_reading import (
    as_bytes,
    read_items,
    read_leaf,
    read_region,
    read_tree,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "levanter"

VERSIONS = ["1.1", "1.2.dev1644", "marin-0.2.20.dev202606180959"]
"""zarr v2 in two trees, zarr v2 in one, and OCDBT."""

GOLDEN_STEP = 12

ARRAYS = {
    "model/embeddings/weight": jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3),
    "model/layers/0/bias": jnp.zeros(5),
    "optimizer_state/1/count": jnp.array(7, jnp.int32),
    "training_key": jax.random.key_data(jax.random.key(1)),
}
METADATA = {
    "step": 100,
    "timestamp": "2026-01-02T03:04:05.678901",
    "is_temporary": False,
}


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """A node like haliax's, whose array has no name in a path."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tree_flatten(self) -> Any:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "NamedArray":
        return cls(*children)


def is_named_array(value: Any) -> bool:
    return isinstance(value, NamedArray)


@pytest.fixture(scope="module")
def manager() -> GlobalAsyncCheckpointManager:
    return GlobalAsyncCheckpointManager()


def specs(folder: Path) -> list[dict[str, Any]]:
    """Returns where levanter stores each array."""
    base = {"driver": "file", "path": str(folder)}
    return [
        {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}
        for name in ARRAYS
    ]


def write(
    manager: GlobalAsyncCheckpointManager, folder: Path, *, is_old: bool = False
) -> None:
    """Writes a step as levanter does: its arrays, then ``metadata.json``."""
    folder.mkdir(parents=True)
    arrays = list(ARRAYS.values())
    if is_old:
        manager.serialize_with_paths(arrays, [str(folder / name) for name in ARRAYS])
    else:
        manager.serialize(arrays, specs(folder), on_commit_callback=lambda: None)
    manager.wait_until_finished()
    (folder / "metadata.json").write_text(json.dumps(METADATA))


def opened(folder: Path, step: int = 100) -> ForeignStep:
    return levanter.open_root(LocalLocation(folder)).open(step)


def checksums(leaves: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what ``leaves.json`` has of each leaf."""
    return [
        {
            "name": name,
            "dtype": leaf.dtype.name,
            "shape": [*leaf.shape],
            "sha256": hashlib.sha256(leaf.tobytes()).hexdigest(),
        }
        for name, leaf in sorted(leaves.items())
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_bit_that_levanter_wrote_is_read_in_place_and_imported(
    version: str, run: store.Run
) -> None:
    expected = json.loads((GOLDEN / version / "leaves.json").read_text())
    step = opened(GOLDEN / version, GOLDEN_STEP)
    assert expected == checksums(read_tree(step))
    metadata = json.loads(read_items(step)["metadata"])
    assert GOLDEN_STEP == metadata["step"]

    foreign = store.open_foreign(f"levanter:{GOLDEN / version}")
    assert [GOLDEN_STEP] == list(foreign.steps())
    (done,) = run.import_from(foreign)
    assert GOLDEN_STEP == done.checkpoint.step
    copy = run.open(GOLDEN_STEP)
    leaves = {leaf.key: array for leaf, array in copy.read(copy.leaves)}
    assert expected == checksums(leaves)
    assert run.verify(GOLDEN_STEP).ok


@pytest.mark.parametrize("version", VERSIONS)
def test_an_equinox_model_and_its_optimizer_take_what_levanter_wrote(
    version: str, run: store.Run
) -> None:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):  # type: ignore[misc,name-defined]  # maybe not installed
        embeddings: Any
        layers: list[Any]
        scale: jax.Array
        dotted: dict[str, Any]

    rows = json.loads((GOLDEN / version / "leaves.json").read_text())
    kinds = {row["name"]: row for row in rows}

    def make(name: str) -> jax.Array:
        row = kinds[f"model/{name}"]
        return jnp.zeros(row["shape"], row["dtype"])

    layers = [eqx.nn.Linear(*size, key=jax.random.key(0)) for size in ((8, 4), (4, 3))]
    weight = NamedArray(make("layers/0/weight"))
    model = Model(
        embeddings=NamedArray(make("embeddings")),
        layers=[eqx.tree_at(lambda x: x.weight, layers[0], weight), layers[1]],
        scale=make("scale"),
        dotted={"lora": {"a": make("dotted/lora/a")}},
    )
    optimizer = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
    key = jnp.zeros(2, jnp.uint32)
    state: dict[str, Any] = {"model": model, "opt_state": optimizer}
    state |= {"step": jnp.int32(0), "training_key": key}
    if version == "1.1":
        state = {"model": model, "training_state": (optimizer, key)}
    foreign = store.open_foreign(f"levanter:{GOLDEN / version}")
    run.import_from(foreign)

    # as in docs/migration.md
    arrays = eqx.filter(state, eqx.is_array)
    like = jax.tree.map(
        lambda x: x.array if is_named_array(x) else x, arrays, is_leaf=is_named_array
    )
    for place in (foreign, run):
        found = place.restore(GOLDEN_STEP, like=like)
        found_leaves = jax.tree.leaves(found)
        back = jax.tree.unflatten(jax.tree.structure(arrays), found_leaves)
        whole = eqx.combine(back, state)

        structures: list[Any] = [jax.tree.structure(tree) for tree in (state, whole)]
        assert structures[0] == structures[1]
        named = {leaf.key: np.asarray(leaf.value) for leaf in named_leaves(found)[0]}
        assert rows == checksums(named)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_region_across_the_shards_that_levanter_wrote_is_read(version: str) -> None:
    step = opened(GOLDEN / version, GOLDEN_STEP)
    whole = read_leaf(step, "model/embeddings")
    assert (16, 8) == whole.shape
    got = read_region(step, "model/embeddings", ((3, 9), (2, 7)))
    assert whole[3:9, 2:7].tobytes() == got.tobytes()


@pytest.mark.parametrize("is_old", [False, True])
def test_each_layout_is_a_step(tmp_path: Path, manager: Any, is_old: bool) -> None:
    write(manager, tmp_path / "step-100", is_old=is_old)
    step = opened(tmp_path)
    assert [100] == list(levanter.open_root(LocalLocation(tmp_path)).steps())
    assert as_bytes(ARRAYS) == as_bytes(read_tree(step))
    assert METADATA == json.loads(read_items(step)["metadata"])
    got = read_region(step, "model/embeddings/weight", ((1, 3), (1, 2)))
    assert [[4.0], [7.0]] == got.tolist()


def test_the_folder_of_a_step_is_a_location(tmp_path: Path, manager: Any) -> None:
    write(manager, tmp_path / "step-100")
    root = levanter.open_root(LocalLocation(tmp_path / "step-100"))
    assert [100] == list(root.steps())


def test_a_step_without_metadata_is_unfinished(tmp_path: Path, manager: Any) -> None:
    write(manager, tmp_path / "step-100")
    (tmp_path / "step-100" / "metadata.json").unlink()
    assert [] == list(levanter.open_root(LocalLocation(tmp_path)).steps())
    with pytest.raises(NotFoundError, match="no finished step 100"):
        opened(tmp_path)


def test_two_folders_that_state_one_step_are_rejected(
    tmp_path: Path, manager: Any
) -> None:
    write(manager, tmp_path / "step-100")
    write(manager, tmp_path / "copy")
    with pytest.raises(PreconditionError, match="'copy' and 'step-100'"):
        opened(tmp_path)


def test_a_lost_chunk_is_damage_and_not_zeros(tmp_path: Path, manager: Any) -> None:
    write(manager, tmp_path / "step-100", is_old=True)
    (tmp_path / "step-100" / "model/embeddings/weight" / "0.0").unlink()
    with pytest.raises(DataLossError, match="array 'model/embeddings/weight'"):
        read_tree(opened(tmp_path))


def test_a_lost_data_file_is_damage(tmp_path: Path, manager: Any) -> None:
    write(manager, tmp_path / "step-100")
    for file in (tmp_path / "step-100" / "d").iterdir():
        file.unlink()
    with pytest.raises(DataLossError, match="step-100"):
        opened(tmp_path)


def test_an_array_that_is_also_a_container_is_rejected(
    tmp_path: Path, manager: Any
) -> None:
    folder = tmp_path / "step-100"
    write(manager, folder)
    base = {"driver": "file", "path": str(folder)}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": "model/layers"},
    }
    manager.serialize([jnp.ones(2)], [spec], on_commit_callback=lambda: None)
    manager.wait_until_finished()
    message = "'model/layers' is also a container, of array 'model/layers/0/bias'"
    with pytest.raises(PreconditionError, match=message):
        opened(tmp_path)
