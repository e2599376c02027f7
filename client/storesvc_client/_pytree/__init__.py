"""Names, plans, matches and places the leaves of any pytree.

It imports jax, and of the client `_chunks` and what lies below it; `_save` and
`_restore` call it, so it knows nothing of uploads, checkpoints or models.

Begin with `leaves.py` (from a pytree to named leaves), then `save_plan.py` for saves,
and `restore_target.py` with `matching.py` and `placement.py` for restores.
"""
