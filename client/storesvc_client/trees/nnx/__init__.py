"""Saves and rebuilds NNX models, their configs and their optimizer states.

It imports jax and flax; of the client it may import `trees.structure`, `_api` and what
lies below them, and none of the public modules of `trees`.

Begin with `recipes.py`, what a checkpoint stores of a model besides its leaves, and
`restore_model.py`, which rebuilds one; `rehearsal.py` checks at a save that the model
could be restored.
"""
