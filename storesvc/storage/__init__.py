"""Reads and writes buckets and directories; nothing else opens a file or a bucket.

It may import `storesvc.format`, `storesvc.errors` and the foundations next to it, never
the catalog or gRPC. The client shares this package with the service.

Begin with `bucket.py`, the protocol, and `location.py`, which parses the URI of a root;
`tensorstore_bucket.py` implements the protocol over one of two kinds of backend:
`file_backend.py` for files of this machine, `object_backends.py` for the others.
"""
