"""Collects the garbage of a run: expires leases, applies retention, deletes objects.

It may import `storesvc.retention`, the packages of the save and lifecycle paths, and
the layers below them; only `storesvc.store` and the server start it.

Start with `collector.py`, one pass over a run: `expiry.py` ends leases and checkpoints,
`mark.py` decides what is garbage in the state that `run_state.py` read, and the
collector deletes it.
"""
