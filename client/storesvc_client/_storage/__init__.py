"""Reaches the root of a store, and places outside stores, without the server.

It may import `storesvc.storage`, `storesvc_client._rpc` and the layers below them.

Begin with `root.py`, which checks that a root is the one of the server, and asks it
for the credentials that it lends; `bucket.py` reads and writes data files in a bucket,
through TensorStore and `objects.py`; `outside.py` opens the places that imports and
exports name.
"""
