"""Decides which checkpoints of a run its retention policy keeps, and deletes the rest.

It may import `storesvc.lifecycle`, `storesvc.catalog` and what lies below them.

Begin with `policy.py`, which evaluates a policy; `validation.py` rejects invalid
policies, and `enforcement.py` applies one to a run.
"""
