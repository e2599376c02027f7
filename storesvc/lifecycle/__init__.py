"""The lifecycle of committed checkpoints: update, delete, purge, tag, hold.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`save`, `restore`, `inspect` and `watch`.

Begin with `checkpoints.py`; `holds.py` finds what keeps a checkpoint from being
purged.
"""
