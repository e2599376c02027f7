"""What lies in a store's bucket, as code: names, keys, tables, places.

Shared by the service and the client. Everything here takes values and returns
values: no I/O, no clock, no randomness. The words of the format are in
``proto/storesvc/v1/bucket.proto`` and ``tree.proto``. It imports nothing of ours but
`storesvc_proto`. Begin with `layout.py` (where everything lies) and `manifests.py`.
"""
