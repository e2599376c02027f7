"""Checkpoints of Orbax become checkpoints of a run, with every leaf and its type."""

from pathlib import Path

import jax
import pytest

import storesvc_client as store
from tests.cli.test_storectl_transfers import printed
from tests.foreign.orbax_checkpoints import WRITERS, tree_for
from tests.foreign.test_mounts import assert_same


@pytest.mark.parametrize("writer", [w for w in WRITERS if "composite" not in w])
def test_a_state_of_each_writer_is_imported(
    writer: str, tmp_path: Path, run: store.Run
) -> None:
    tree = tree_for(writer)
    WRITERS[writer](tmp_path / "orbax", tree)

    done = run.import_from(f"orbax:{tmp_path / 'orbax'}")

    assert [True] * len(done) == [one.is_new for one in done]
    assert_same(tree, run.restore(like=tree))
    assert run.verify().ok


def test_storectl_imports_a_step_of_a_manager(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    tree = {"params": {"w": jax.numpy.arange(12.0)}, "step": 7}
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        for step in (100, 200):
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    root = (tmp_path / "store").as_uri()
    store.connect(root).close()

    text = printed(
        "-s", root, "import", f"orbax:{tmp_path / 'orbax'}", "a/b", "--latest"
    )

    assert text.startswith("a/b@200: ")
    with store.connect(root) as client:
        run = client.run("a/b")
        assert [200] == run.steps()
        assert_same(tree, run.restore(like=tree))
