"""The save path: begins uploads, receives their chunks, commits them as checkpoints.

It may import `storesvc.catalog` and the layers below it, and none of the packages
`lifecycle`, `restore`, `inspect` and `watch`.

Begin with `uploads.py` (begin, keep alive, abort), then `receiver.py` (chunks to data
files), `receipts.py` (finish) and `commit.py`, which makes the checkpoint exist.
"""
