"""Implements the public classes: `connect`, `Client`, `Run`, its groups, and `Hold`.

It may import `storesvc_client._save`, `storesvc_client._restore` and the layers below
them; it imports neither `trees` nor jax.

Begin with `client.py` and `run.py`. `groups.py` has the groups of a run
(`run.tags.set`); `loop.py` is the loop of a training job.
"""
