"""A job that saves and restores by Orbax's manager: every process calls the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc_client import orbax


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
