"""Maps rpcs onto the store: translate, call, translate back.

It may import `storesvc.store` and everything below it; it decides nothing.

Start with `checkpoints.py` or `uploads.py`, one module per resource; `registry.py`
lists the services, `boundary.py` ends failed calls, and `status.py` has the table of
errors.
"""
