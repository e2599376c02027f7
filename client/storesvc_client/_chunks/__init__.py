"""Keeps chunks in host memory: staging buffers of saves, target buffers of restores.

It may import `storesvc_client._rpc`, `storesvc_client._values` and the layers
below them; it does no I/O and does not import jax.

Begin with `slabs.py` for saves and `buffers.py` for restores; `memory.py` keeps the
memory of both for the next call.
"""
