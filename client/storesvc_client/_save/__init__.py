"""Saves trees in the background: snapshot, send, commit.

It may import `storesvc_client._pytree` and the layers below it, never
`storesvc_client._restore`.

Begin with `saver.py`, the queue of a run's saves; `snapshot.py` copies a tree to the
host, and `upload.py` stores its chunks, through the server (`chunk_streams.py`) or
directly (`direct.py`), and commits them.
"""
