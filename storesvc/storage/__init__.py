"""Reads and writes buckets and directories; nothing else opens a file or a bucket.

It may import `storesvc.format`, `storesvc.errors` and the foundations beside it, never
the catalog or gRPC. The client shares this package with the service.

Begin with `bucket.py`, the protocol, and `location.py`, which parses the URI of a root;
`tensorstore_bucket.py` implements the protocol, with retries from `hedging.py`.
"""
