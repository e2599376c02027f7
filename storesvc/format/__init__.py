"""Defines the contents of a store's bucket, as code: names, keys, tables, paths.

The service and the client share it. Everything here takes values and returns values: no
I/O, no clock, no randomness. ``proto/storesvc/v1/bucket.proto`` and ``tree.proto``
specify the format. It imports nothing of ours but `storesvc_proto`.

Begin with `layout.py`, the paths of all objects, and `manifests.py`.
"""
