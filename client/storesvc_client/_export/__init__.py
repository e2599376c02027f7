"""Writes checkpoints in the formats of other projects, without their code and jax.

A format is one module, which decides names, documents and sizes, and writes them.
Elements are read in batches of bounded size, and every chunk is verified.

May import: ``_chunks``, ``_values``, ``storesvc.format``. ``_restore`` imports it, as
an export is a method of an open checkpoint. Begin with ``exporting.py``.
"""
