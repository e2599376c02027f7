"""The watch path: streams events of checkpoints to clients that watch.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`lifecycle`, `save`, `restore` and `inspect`.

Begin with `watcher.py`; `events.py` decides which events a change of the journal
produces.
"""
