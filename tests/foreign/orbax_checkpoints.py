"""Checkpoints that Orbax itself writes, for the tests of its reader."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

MESH_SHAPE: Final = (4, 2)


def mesh() -> Mesh:
    """Returns a mesh of all devices."""
    return Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), ("x", "y"))


def arrays() -> dict[str, Any]:
    """Returns a tree of arrays only: sharded, of several types, of zeros, of rank 0."""
    spread = NamedSharding(mesh(), PartitionSpec("x", "y"))
    numbers = np.arange(64 * 16).reshape(64, 16)
    return {
        "layers": [
            {"w": jax.device_put(jnp.asarray(numbers + k, dtype), spread)}
            for k, dtype in enumerate((jnp.bfloat16, jnp.float32))
        ],
        "dots.in.keys": jnp.ones(3, jnp.float16),
        "zeros": jnp.zeros((4, 4)),
        "count": jnp.int32(7),
        "float8": jnp.ones(8, jnp.float8_e4m3fn),
        "mask": np.array([True, False]),
        "opt": optax.adam(0.1).init({"w": jnp.ones(2)}),
    }


def everything() -> dict[str, Any]:
    """Returns a tree with every kind of leaf."""
    return {
        **arrays(),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
        "step": 7,
        "lr": 0.5,
        "flag": True,
        "name": "übung",
        "empty": [None, {}, [], ()],
    }


def tree_for(writer: str) -> dict[str, Any]:
    """Returns the tree for a writer: with everything that it accepts."""
    tree = everything()
    if writer in ("v0-standard", "v0-manager"):  # StandardSave rejects texts
        del tree["name"]
    return tree


def _v0(handler: Any) -> Callable[[Path, Any], None]:
    def write(path: Path, tree: Any) -> None:
        with ocp.Checkpointer(handler()) as checkpointer:
            checkpointer.save(path, tree)

    return write


def _v0_standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _v0_manager(path: Path, tree: Any) -> None:
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"],
        step_prefix="ckpt",
        step_format_fixed_length=6,
    )
    with ocp.CheckpointManager(path, options=options) as manager:
        for step in (5, 100):
            manager.save(
                step,
                args=ocp.args.StandardSave(tree),
                metrics={"loss": 0.5},
                custom_metadata={"who": "a test"},
            )
            manager.wait_until_finished()


def _v0_composite(path: Path, tree: Any) -> None:
    """Writes what MaxText writes, with other items next to it."""
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    next(data)
    with ocp.CheckpointManager(path) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeSave(tree),
                ema=ocp.args.StandardSave({"w": jnp.ones(2)}),
                model_config=ocp.args.JsonSave({"layers": [1, 2]}),
                iter=grain.checkpoint.CheckpointSave(data),
            ),
        )


def _v1(path: Path, tree: Any) -> None:
    v1.save(path, tree)


def _v1_checkpointer(path: Path, tree: Any) -> None:
    with v1.training.Checkpointer(path) as checkpointer:
        checkpointer.save(10, tree)


WRITERS: Final[Mapping[str, Callable[[Path, Any], None]]] = MappingProxyType(
    {
        "v0-standard": _v0_standard,
        "v0-pytree": _v0(ocp.PyTreeCheckpointHandler),
        "v0-zarr3": _v0(lambda: ocp.PyTreeCheckpointHandler(use_zarr3=True)),
        "v0-files": _v0(lambda: ocp.PyTreeCheckpointHandler(use_ocdbt=False)),
        "v0-manager": _v0_manager,
        "v0-composite": _v0_composite,
        "v1-save": _v1,
        "v1-checkpointer": _v1_checkpointer,
    }
)
"""Writes a tree into a folder that does not exist."""


def nnx_state() -> nnx.State[Any, Any]:
    """Returns the state of a small model."""
    return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
