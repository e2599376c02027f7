"""Reaches the root of a store, and places outside stores, without the server.

It may import `storesvc.storage`, `storesvc_client._rpc` and the layers below them.

Begin with `root.py`, which checks that a root is the one of the server; `bucket.py`
reads and writes data files in a bucket, through `objects.py` or, with lent
credentials, `lending.py`; `roots.py` opens the places that imports and exports
name.
"""
