"""Maps calls onto the store: translate, call, translate back.

It may import `storesvc.store` and everything below it; it decides nothing.

Begin with `checkpoints.py` or `uploads.py`, one module a resource; `boundary.py` is
what all calls share, and `status.py` turns errors into statuses.
"""
