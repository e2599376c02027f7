"""A step that shares nine tenths of its bytes with the one before it adds a tenth to
the store when a run is imported, in whatever way its project has stored it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import storesvc_client as store
from tests.foreign.orbax_checkpoints import mesh
from tests.support.command_line import document, printed

LEAVES: Final = 10
LEAF_BYTES: Final = 256 << 10
SLACK_BYTES: Final = 4096
"""What a step stores besides its chunks that changed."""

STEPS: Final = (1, 2)


def state_of(step: int) -> dict[str, Any]:
    """Returns ten arrays that cannot be compressed; each step changes the first."""
    numbers = np.random.default_rng(0).integers(0, 2**62, (LEAVES, LEAF_BYTES // 8))
    return {f"w{k}": numbers[k] + (step if k == 0 else 0) for k in range(LEAVES)}


def _orbax(**options: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        handler = ocp.PyTreeCheckpointHandler(**options)
        with ocp.Checkpointer(handler) as checkpointer:
            for step in STEPS:
                checkpointer.save(folder / str(step), state_of(step))

    return write


def _manager(folder: Path) -> None:
    with ocp.CheckpointManager(folder) as manager:
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave(state_of(step)))
            manager.wait_until_finished()


def _safetensors(folder: Path) -> None:
    for step in STEPS:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        save_file(state_of(step), folder / f"checkpoint-{step}" / "model.safetensors")


WRITERS: Final[Mapping[str, tuple[str, Callable[[Path], None]]]] = {
    "manager": ("orbax", _manager),
    "zarr3": ("orbax", _orbax(use_zarr3=True)),
    "a folder for each array": ("orbax", _orbax(use_ocdbt=False)),
    "uncompressed": ("orbax", _orbax(use_compression=False)),
    "safetensors": ("safetensors", _safetensors),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_second_step_stores_a_tenth(writer: str, tmp_path: Path) -> None:
    scheme, write = WRITERS[writer]
    write(tmp_path / "run")
    root = (tmp_path / "store").as_uri()

    first, second = document(
        root, "import", f"{scheme}:{tmp_path / 'run'}", "a/b", "--create"
    )

    whole = LEAVES * LEAF_BYTES
    assert whole <= first["sent_bytes"] <= whole + SLACK_BYTES
    assert whole // 10 <= second["sent_bytes"] <= whole // 10 + SLACK_BYTES
    assert whole * 9 // 10 <= second["reused_bytes"]
    with store.connect(root) as client:
        run = client.run("a/b")
        own = run.checkpoint(2).own_bytes
        assert whole // 10 <= own <= whole // 10 + SLACK_BYTES
        state = state_of(2)
        for leaf, array in run.open(2).read(state):
            assert state[leaf.key].tobytes() == array.tobytes()


def test_storectl_prints_what_each_step_stores(tmp_path: Path) -> None:
    _manager(tmp_path / "run")
    root = (tmp_path / "store").as_uri()

    text = printed(root, "import", f"orbax:{tmp_path / 'run'}", "a/b", "--create")

    assert [
        "a/b@1: 2.5 MiB, 2.5 MiB stored, source has no checksums",
        "a/b@2: 2.5 MiB, 256.0 KiB stored, source has no checksums",
    ] == text.splitlines()


@pytest.mark.slow
def test_of_a_sharded_array_the_shards_that_changed_are_stored(tmp_path: Path) -> None:
    """Shows that the unit is the chunk: what Orbax wrote for one device, or several
    of them if they are smaller than 4 MiB."""
    spread = NamedSharding(mesh(), PartitionSpec(("x", "y")))
    numbers = np.random.default_rng(0).integers(0, 2**30, (8192, 1024), np.int32)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in STEPS:
            changed = numbers.copy()
            changed[:8] += step  # within the first shard
            tree = {"w": jax.device_put(changed, spread)}
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    root = (tmp_path / "store").as_uri()

    first, second = document(
        root, "import", f"orbax:{tmp_path / 'run'}", "a/b", "--create"
    )

    shard = numbers.nbytes // 8
    assert numbers.nbytes <= first["sent_bytes"] <= numbers.nbytes + SLACK_BYTES
    assert shard <= second["sent_bytes"] <= shard + SLACK_BYTES
