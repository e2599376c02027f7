"""Trees that jax's own array serialization saved are read as steps."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.array_serialization import pytree_serialization
from jax.export import register_namedtuple_serialization

from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats import jax_arrays
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client._items.values import unpack_containers
from storesvc_client._pytree.containers import nest
from storesvc_client.errors import DataLossError, NotFoundError
from tests.support.foreign_reading import as_bytes, read_region, read_tree


class Moments(NamedTuple):
    """A node that jax saves by its registered name."""

    mu: Any
    nu: Any


register_namedtuple_serialization(Moments, serialized_name="tests.foreign.Moments")

TREE = {
    "b": {
        "dict": {},
        "list": [jnp.ones((), jnp.bfloat16), None, ()],
        "tuple": (jnp.zeros((0, 2)), jnp.arange(12).reshape(4, 3)),
        "a/b.c": jnp.array([True, False]),
    },
    "zeros": jnp.zeros((2, 3), jnp.float8_e4m3fn),
}


def opened(folder: Path, step: int = 0) -> ForeignStep:
    return jax_arrays.open_root(LocalLocation(folder)).open(step)


def nested(step: ForeignStep) -> Any:
    """Returns the tree of a step as a restore without ``like=`` would."""
    leaves = [
        (
            tuple(
                int(part) if kind == "i" else part.replace("%2F", "/")
                for part, kind in zip(row.key.split("/"), row.path_kinds, strict=True)
            ),
            row.path_kinds,
            read_tree(step)[row.key],
        )
        for row in step.tree.leaves
    ]
    return nest(leaves, unpack_containers(step.tree.structure))


def test_a_saved_tree_is_a_step_with_its_containers(tmp_path: Path) -> None:
    pytree_serialization.save(TREE, tmp_path / "run-40")
    step = opened(tmp_path, 40)
    is_none = {"is_leaf": lambda x: x is None}
    tree = nested(step)
    structures = [str(jax.tree.structure(x, **is_none)) for x in (TREE, tree)]
    assert structures[0] == structures[1]
    expected = dict(enumerate(jax.tree.leaves(TREE)))
    got = dict(enumerate(jax.tree.leaves(tree)))
    assert as_bytes(expected) == as_bytes(got)  # type: ignore[arg-type]


def test_a_folder_is_step_0_and_its_regions_are_read(tmp_path: Path) -> None:
    pytree_serialization.save(TREE, tmp_path)
    assert [0] == list(jax_arrays.open_root(LocalLocation(tmp_path)).steps())
    got = read_region(opened(tmp_path), "b/tuple/1", ((1, 3), (0, 2)))
    assert [[3, 4], [6, 7]] == got.tolist()


def test_children_of_custom_nodes_are_numbered(tmp_path: Path) -> None:
    pytree_serialization.save({"opt": Moments(jnp.ones(2), jnp.zeros(2))}, tmp_path)
    rows = opened(tmp_path).tree.leaves
    assert [("opt/0", "kf"), ("opt/1", "kf")] == [(r.key, r.path_kinds) for r in rows]


def test_a_tree_that_is_one_array_has_the_empty_key(tmp_path: Path) -> None:
    pytree_serialization.save(jnp.arange(3), tmp_path)
    assert as_bytes({"": jnp.arange(3)}) == as_bytes(read_tree(opened(tmp_path)))


def test_a_folder_without_structure_is_no_step(tmp_path: Path) -> None:
    pytree_serialization.save(TREE, tmp_path)
    (tmp_path / "pytreedef.json").unlink()
    with pytest.raises(NotFoundError, match=r"pytreedef\.json.*got array_store/"):
        opened(tmp_path)


def test_an_array_of_another_shape_is_damage(tmp_path: Path) -> None:
    pytree_serialization.save({"w": jnp.ones((2, 3))}, tmp_path)
    path = tmp_path / "pytreedef.json"
    path.write_text(path.read_text().replace("[2, 3]", "[3, 2]"))
    with pytest.raises(DataLossError, match=r"'w': expected \(3, 2\) float32, got \(2"):
        opened(tmp_path)


def test_a_missing_array_is_damage(tmp_path: Path) -> None:
    pytree_serialization.save({"w": jnp.ones(2)}, tmp_path / "run-1")
    pytree_serialization.save({"v": None, "w": jnp.ones(2)}, tmp_path / "run-2")
    structure = (tmp_path / "run-2" / "pytreedef.json").read_text()
    assert [None, "Array(float32[2])"] == json.loads(structure)["__jax_leaf_ids"]
    (tmp_path / "run-1" / "pytreedef.json").write_text(structure)
    with pytest.raises(DataLossError, match="array 'w': its stored bytes"):
        opened(tmp_path, 1)


def test_a_damaged_structure_is_damage(tmp_path: Path) -> None:
    pytree_serialization.save(TREE, tmp_path)
    path = tmp_path / "pytreedef.json"
    fields = json.loads(path.read_text())
    whole = fields["__jax_pytreedef_repr"]
    for text in (whole[:40], "AAAA" + whole[4:], "/" * len(whole), whole[:-8] + "////"):
        path.write_text(json.dumps(fields | {"__jax_pytreedef_repr": text}))
        try:
            opened(tmp_path)
        except DataLossError:
            continue
