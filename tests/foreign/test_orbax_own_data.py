"""The checkpoints that Orbax's package ships for its own tests are read, or rejected
by name where the metadata or the data of a tree is missing."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import storesvc_client as store
from tests.foreign.orbax_checkpoints import shipped_trees

TREES = dict(shipped_trees())
if not TREES:
    pytest.skip("this release of Orbax ships none", allow_module_level=True)


@pytest.mark.parametrize("name", [n for n in TREES if (TREES[n] / "d").exists()])
def test_a_tree_of_the_package_is_read_as_orbax_reads_it(name: str) -> None:
    run = store.open_foreign(f"orbax:{TREES[name]}")
    if not (TREES[name] / "_METADATA").exists():
        with pytest.raises(store.PreconditionError, match="expected a file _METADATA"):
            run.open()
        return
    restored = run.restore()
    as_array = ocp.RestoreArgs(restore_type=np.ndarray)
    how = jax.tree.map(lambda _: as_array, restored)
    expected = ocp.PyTreeCheckpointer().restore(TREES[name], restore_args=how)
    shapes = [jax.tree.structure(tree) for tree in (expected, restored)]
    assert shapes[:1] == shapes[1:]
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(restored), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", [n for n in TREES if not (TREES[n] / "d").exists()])
def test_a_tree_of_the_package_without_its_data_is_damage(name: str) -> None:
    with pytest.raises(store.DataLossError, match="missing or damaged"):
        store.open_foreign(f"orbax:{TREES[name]}").restore()
