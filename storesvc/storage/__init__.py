"""Reads and writes buckets and directories; nothing else opens a file or a bucket.

It may import `storesvc.format`, `storesvc.errors` and the foundations next to it, never
the catalog or gRPC. The client shares this package with the service.

Begin with `bucket.py`, the protocol, and `location.py`, which parses the URI of a root;
`object_bucket.py` implements the protocol; `file_bucket.py` has the backend for files
of this machine, `remote.py` what GCS and S3 need.
"""
