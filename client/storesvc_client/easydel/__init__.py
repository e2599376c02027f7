"""Saves and restores models: an ``EasyDeLState``, or a module alone.

A restore needs code that a checkpoint does not contain: the model as a class or a
factory, and the optimizer. Both run abstractly, so arrays are created only from their
shards, on the devices where they stay. The saved structure of the model is compared
with that code, and a difference is rejected by name.

``StoreCheckpoints`` lets EasyDeL's own trainers save to a run and resume from it.
EasyDeL itself is never imported: its classes come as arguments. Begin with
``trainer.py``.

Example:
    with store.connect("ckpt.example:7070") as client:
        run = client.run("prod/llama-8b")
        save_state(run, state, metrics={"loss": 2.31})
        state = restore_state(run, model=make_model, tx=tx, mesh=mesh, rules=rules)
"""

from storesvc_client.easydel.trainer import StoreCheckpoints
from storesvc_client.trees.easydel import restore_state
from storesvc_client.trees.nnx.saved_models import restore_model, save_model, save_state

__all__ = [
    "StoreCheckpoints",
    "restore_model",
    "restore_state",
    "save_model",
    "save_state",
]
