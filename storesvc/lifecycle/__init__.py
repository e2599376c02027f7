"""The lifecycle of committed checkpoints: update, delete, purge, tag, hold.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`save`, `restore`, `inspect` and `watch`.

Begin with `checkpoints.py`; `references.py` finds what keeps a checkpoint from being
purged, and `record_update.py` has the compare-and-swap loop of all updates.
"""
