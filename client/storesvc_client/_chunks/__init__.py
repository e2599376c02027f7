"""Keeps chunks in host memory: staging buffers of saves, target buffers of restores.

It may import `storesvc_client._rpc`, `storesvc_client._values` and the layers
below them; it does no I/O and does not import jax.

Begin with `slabs.py` and `staging_pool.py` for saves, and `buffer_layout.py` for
restores; `frames.py` packs chunks into messages and unpacks them.
"""
