"""Writes checkpoints with eformer: ``python -m tests.easydel.eformer_writer FOLDER``
renews ``tests/golden/foreign/eformer``."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eformer.serialization import AsyncCheckpointManager, Checkpointer
from eformer.serialization.checkpointer import _write_checkpoint_metadata

from tests.support import eformer_parts as parts


def write(root: Path) -> None:
    """Writes a step with each writer of eformer."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    model = _nested({key: jnp.asarray(x) for key, x in parts.MODEL.items()})
    moments = {"count": jnp.asarray(parts.COUNT), "mu": model}
    checkpointer = Checkpointer(str(root), None, [])
    for prefix, tree in (("model", model), ("tx", (moments, {"name": "adam"}))):
        checkpointer.save_checkpoint(
            tree,
            f"run-{parts.STRUCTURED_STEP}",
            mesh=mesh,
            step=parts.STRUCTURED_STEP,
            prefix=prefix,
            structured=True,
        )
    # Checkpointer.save_checkpoint(structured=False) of eformer 0.0.99.12 fails.
    for step, name in ((parts.UNPREFIXED_STEP, ""), (parts.SAFETENSORS_STEP, "/model")):
        folder = root / f"run-{step}"
        folder.mkdir(parents=True)
        manager = AsyncCheckpointManager(
            use_tensorstore=not name, enable_validation=False, verbose=False
        )
        path = f"{folder}{name}.safetensors" if name else str(folder)
        manager.save_tree(model, path, mesh=mesh)
        _write_checkpoint_metadata(str(folder), step=step, is_temporary=False)


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *above, last = key.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
