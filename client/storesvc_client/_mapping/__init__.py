"""Mappings: rules that make the tree that is wanted from the tree that is stored.

Pure: no jax, no storage. It imports the format, values and errors. Begin with
``rules.py``, the document; ``planning.py`` applies it to a tree.
"""
