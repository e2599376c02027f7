"""``CheckpointManager`` in a job of several processes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc_client import orbax
from tests.support.jax_job import run_job


def saves_and_restores(target: str) -> dict[str, Any]:
    """Returns what a process restores of a sharded tree and a JSON item, and the steps
    that it sees while and after they are saved."""
    split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    made = jax.jit(lambda: jnp.arange(16.0), out_shardings=split)()
    state = {"w": made, "step": 3}
    args = ocp.args
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with orbax.CheckpointManager(target, options=options) as manager:
        saved = [
            manager.save(
                step,
                args=args.Composite(
                    state=args.StandardSave(state), meta=args.JsonSave({"at": step})
                ),
            )
            for step in (1, 2, 3)
        ]
        manager.wait_until_finished()
        steps = manager.all_steps()
        found = manager.restore(
            None,
            args=args.Composite(
                state=args.StandardRestore(state), meta=args.JsonRestore()
            ),
        )
        return {
            "saved": saved,
            "steps": steps,
            "read": manager.all_steps(read=True),
            "latest": manager.latest_step(),
            "meta": found.meta,
            "step": found.state["step"],
            "is_split": found.state["w"].sharding.is_equivalent_to(split, 1),
            "shards": [
                [shard.index[0].start or 0, np.asarray(shard.data).tolist()]
                for shard in found.state["w"].addressable_shards
            ],
        }


@pytest.mark.slow
def test_two_processes_save_and_restore_one_step(tmp_path: Path) -> None:
    target = f"{(tmp_path / 'store').as_uri()}#prod/llama"

    found = run_job(
        "tests.orbax.test_jobs:saves_and_restores", 2, devices=2, target=target
    )

    for each in found:
        assert each["saved"] == [True] * 3
        assert each["steps"] == each["read"] == [2, 3]
        assert (each["latest"], each["meta"], each["step"]) == (3, {"at": 3}, 3)
        assert each["is_split"]
    shards = sorted(shard for each in found for shard in each["shards"])
    assert shards == [
        [start, [float(start + i) for i in range(4)]] for start in (0, 4, 8, 12)
    ]
