"""Writes what docs/migration.md starts from: a run of each other project.

Orbax and safetensors write their own. The run of EasyDeL is the one in
``tests/golden/foreign``; the step of levanter is written as ``test_levanter.py``
explains.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental.array_serialization.serialization import (
    GlobalAsyncCheckpointManager,
)
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"


def write_old_checkpoints(folder: Path) -> None:
    """Writes the folders ``llama``, ``easydel``, ``levanter`` and ``hf``."""
    _orbax(folder / "llama")
    shutil.copytree(GOLDEN / "eformer", folder / "easydel")
    _levanter(folder / "levanter" / "step-100")
    _safetensors(folder / "hf")


def _orbax(root: Path) -> None:
    params = {"embed": jnp.ones((64, 8)), "layers": [{"kernel": jnp.ones((8, 8))}]}
    opt = optax.adam(1e-3).init(params)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: -metrics["loss"])
    with ocp.CheckpointManager(root, options=options) as manager:
        for step, loss in (200, 2.08), (300, 2.11):
            state = {"params": params, "opt": opt, "rng": jax.random.key(0)}
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave({**state, "step": jnp.int32(step)}),
                    config=ocp.args.JsonSave({"layers": 1}),
                ),
                metrics={"loss": loss},
            )
        manager.wait_until_finished()


def _levanter(step: Path) -> None:
    arrays = {
        "model/embeddings/weight": jnp.ones((64, 8)),
        "model/layers/0/kernel": jnp.ones((8, 8)),
        "training_key": jax.random.key_data(jax.random.key(0)),
    }
    base = {"driver": "file", "path": str(step)}
    specs = [
        {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}
        for name in arrays
    ]
    step.mkdir(parents=True)
    manager = GlobalAsyncCheckpointManager()
    manager.serialize(list(arrays.values()), specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    metadata = {"step": 100, "timestamp": "2026-11-24T07:00:00", "is_temporary": False}
    (step / "metadata.json").write_text(json.dumps(metadata))


def _safetensors(folder: Path) -> None:
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": np.ones((64, 8), np.float16),
        "model.layers.0.mlp.up_proj.weight": np.ones((16, 8), np.float16),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 8}')
