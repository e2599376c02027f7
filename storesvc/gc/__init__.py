"""Collects the garbage of a run: expires leases, applies retention, deletes objects.

It may import `storesvc.retention`, the packages of the save and lifecycle paths, and
what lies below them; only `storesvc.store` and the server start it.

Begin with `collector.py`, one pass over a run; `mark.py` decides what is garbage from
what `run_state.py` read, and `sweep.py` deletes it.
"""
