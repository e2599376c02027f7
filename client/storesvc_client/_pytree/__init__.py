"""Names, plans, matches and places the leaves of any pytree.

Imports jax, and from the client only `_chunks` and the layers below it. `_save` and
`_restore` call it, so it contains nothing about uploads, checkpoints or models.

Start with `leaves.py` (from a pytree to named leaves), then `save_plan.py` for saves,
and `restore_target.py` with `matching.py` for restores.
"""
