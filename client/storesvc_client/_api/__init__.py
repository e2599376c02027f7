"""Implements the public classes: `connect`, `Client`, `Run` and `Hold`.

It may import `storesvc_client._save`, `storesvc_client._restore` and what lies below
them; it imports neither `trees` nor jax.

Begin with `client.py` and `run.py`; the other modules are the parts of a run by topic.
"""
