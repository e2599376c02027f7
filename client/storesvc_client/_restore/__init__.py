"""Restores checkpoints: opens them, reads their chunks, assembles leaves.

It may import `storesvc_client._pytree` and the layers below it, never
`storesvc_client._save`.

Begin with `checkpoint.py`, an open checkpoint; `assembly.py` puts chunks into buffers;
`sources.py` reads them from a server, files or a bucket, and `spread.py` from other
processes of the job.
"""
