"""Checkpoints that the installed eformer and EasyDeL write are read as steps."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._foreign.formats import eformer
from storesvc_client._foreign.locations import LocalLocation
from tests.easydel.eformer_writer import write
from tests.easydel.scenarios import SCENARIOS, stepper
from tests.support.eformer_parts import check_steps
from tests.support.foreign_reading import as_bytes


def test_each_writer_of_eformer_makes_a_step(tmp_path: Path) -> None:
    write(tmp_path)
    check_steps(eformer.open_root(LocalLocation(tmp_path)))


def named(prefix: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by the names that EasyDeL gives them, without the
    field "value" of their boxes."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [
            str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))))
            for k in path
        ]
        found["/".join([prefix, *parts]).removesuffix("/value")] = np.asarray(leaf)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bfloat16", "tied-embeddings", "accumulated-gradients"]
)
def test_every_bit_of_a_state_that_easydel_saves_is_read_and_imported(
    name: str, tmp_path: Path, run: store.Run
) -> None:
    scenario = SCENARIOS[name]
    state = scenario.state(scenario.dims)
    state, _ = stepper(state)(state)
    state.save_state(tmp_path / "run-3", step=3)
    expected = named("model", state.graphstate) | named("tx", state.opt_state)

    old = store.open_foreign(f"eformer:{tmp_path}")
    assert [3] == list(old.steps())
    run.import_from(old)
    for opened in (old.open(3), run.open(3)):
        found = {
            leaf.key.removesuffix("/value"): array
            for leaf, array in opened.read(opened.leaves)
        }
        assert as_bytes(expected) == as_bytes(found)
    assert run.verify(3).ok
