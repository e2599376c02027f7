"""Restores checkpoints: opens them, reads their chunks, assembles leaves.

It may import `storesvc_client._pytree` and the layers below it, never
`storesvc_client._save`.

Begin with `checkpoint.py`, an open checkpoint; `assembly.py` puts chunks into buffers,
and the modules named `*_source.py` read chunks from a server, files, a bucket or other
processes of the job.
"""
