"""Decides which checkpoints of a run its retention policy keeps, and deletes the rest.

It may import `storesvc.lifecycle`, `storesvc.catalog` and the layers below them.

Start with `policy.py`, which checks and evaluates a policy; `enforcement.py` applies
one to a run.
"""
