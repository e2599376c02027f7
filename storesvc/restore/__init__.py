"""The restore path: reads chunks once and sends them to all clients that restore.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`lifecycle`, `save`, `inspect` and `watch`.

Begin with `sender.py`; `read_scheduler.py` decides what is read next and what leaves
memory.
"""
