"""Saves and rebuilds NNX models, their configs and their optimizer states.

Imports jax and flax, and from the client `trees.structure`, `_api` and the layers below
them, but none of the public modules of `trees`.

Start with `recipes.py`, the document that a checkpoint stores about a model, and
`restore_plans.py`, which plans how to rebuild a model from it. `saved_models.py` saves
and restores; `rehearsal.py` checks at save time that the model can be restored.
"""
