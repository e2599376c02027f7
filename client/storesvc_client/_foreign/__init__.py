"""Reads checkpoints that other projects wrote, without their code and without jax.

A format is a module of ``formats``, which finds the steps below a URL and describes one
of them as a ``ForeignStep``. What a mount and an import do with it is here. Nothing is
ever unpickled, and no class that a file names is imported.

May import: ``_export`` for the names of dtypes, ``_pytree`` inside functions,
``_restore``, ``_save``, ``_values``, ``storesvc.format``. Begin with
``foreign_step.py``.
"""
