"""Decides which checkpoints of a run its retention policy keeps, and deletes the rest.

It may import `storesvc.lifecycle`, `storesvc.catalog` and the layers below them.

Start with `policy.py`, which evaluates a policy; `validation.py` rejects invalid
policies, and `enforcement.py` applies one to a run.
"""
