"""Saves a Flax NNX module with its optimizer in one line, and restores both in place.

``storesvc_client.easydel`` does the same for states that are values; the checkpoints
are the same, so its ``restore_model`` reads the parameters of one for inference.

Example:
    save(run, step, model, optimizer, metrics={"loss": loss})
    start = restore_into(run, model, optimizer).step + 1
"""

from storesvc_client.trees.nnx.saved_models import restore_into, save

__all__ = ["restore_into", "save"]
