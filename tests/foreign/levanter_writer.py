"""Writes a checkpoint with levanter's own code: ``python levanter_writer.py FOLDER``
renews a folder of ``tests/golden/foreign/levanter``, which are named by version.

levanter pins its own jax, so each version runs in an environment of its own, outside
the checkout. These three load, each with what its package forgets to require:

- ``levanter==1.1 jax==0.4.20 jaxlib==0.4.20``, other packages as of 2024-03-15
  (``uv pip install --exclude-newer 2024-03-15``): zarr v2, the model and the state of
  the training as two trees
- ``levanter==1.2.dev1644 gitpython chex``: zarr v2, one tree
- ``marin-levanter==0.2.20.dev202606180959 gitpython``: OCDBT, zarr3

``leaves.json``, next to the step, has what was in memory: the names come from jax's
paths, the checksums from the arrays. No code of storesvc runs.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax.util import is_named_array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter import checkpoint

STEP = 12


class Model(eqx.Module):
    """A model with each kind of leaf that every version saves: 1.1 fails at None, and
    later ones leave out integers that are not trained."""

    embeddings: Any
    layers: list[Any]
    scale: jax.Array
    dotted: dict[str, jax.Array]


def model() -> Model:
    """Returns a model; its embeddings are sharded over four devices."""
    vocab, embed, mlp = hax.Axis("vocab", 16), hax.Axis("embed", 8), hax.Axis("mlp", 4)
    devices = np.array(jax.devices()).reshape(4)
    spread = NamedSharding(Mesh(devices, ("data",)), PartitionSpec("data", None))
    table = jnp.asarray(np.linspace(-3, 3, 128).reshape(16, 8), jnp.bfloat16)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    return Model(
        embeddings=hax.named(jax.device_put(table, spread), (vocab, embed)),
        layers=[
            hax.nn.Linear.init(embed, mlp, key=keys[0]),
            eqx.nn.Linear(4, 3, key=keys[1]),
        ],
        scale=jnp.zeros(6, jnp.float16),  # levanter's zarr leaves out chunks of zeros
        dotted={"lora.a": jnp.asarray([0.5, -0.0, np.nan], jnp.float32)},
    )


def leaves(tree: Any) -> list[dict[str, Any]]:
    """Returns name, dtype, shape and SHA-256 of each array of a tree."""
    found = []
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named_array)
    for path, leaf in paths:
        names = [
            str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))))
            for k in path
        ]
        array = np.asarray(leaf.array if is_named_array(leaf) else leaf)
        found.append(
            {
                # levanter joins the parts of a path by "." and splits it there
                "name": "/".join(names).replace(".", "/"),
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
        )
    return sorted(found, key=lambda row: str(row["name"]))


def write(root: Path) -> None:
    """Writes the step and ``leaves.json``."""
    folder = str(root / f"step-{STEP}")
    key = jax.random.PRNGKey(5)
    optimizer = optax.adam(1e-3)  # its update takes the parameters as the gradients
    try:
        from levanter.trainer_state import TrainerState
    except ImportError:  # 1.1
        whole = model()
        _, state = optimizer.update(whole, optimizer.init(whole))
        tree: Any = {"model": whole, "training_state": (state, key)}
        checkpoint.save_checkpoint(whole, (state, key), STEP, folder)
    else:
        trainer = TrainerState.init(optimizer, model(), key=key)
        _, state = optimizer.update(trainer.trainable_model, trainer.opt_state)
        trainer = eqx.tree_at(
            lambda t: (t.step, t.opt_state), trainer, (jnp.asarray(STEP), state)
        )
        tree = trainer.saveable_state  # what Checkpointer.save_checkpoint saves
        checkpoint.save_checkpoint(tree, STEP, folder, is_temporary=False)
    (root / "leaves.json").write_text(json.dumps(leaves(tree), indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
