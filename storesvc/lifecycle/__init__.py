"""Updates, deletes, purges, tags and holds committed checkpoints.

It may import `storesvc.catalog` and what lies below it, and none of the packages
`save`, `restore`, `inspect` and `watch`.

Begin with `checkpoints.py`; `references.py` finds what keeps a checkpoint from being
purged.
"""
