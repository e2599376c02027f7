"""Draws checkpoints, runs and leaves as SVG, and computes the statistics of leaves.

It may import `storesvc.format`, `_values`, NumPy and `errors`; it reads nothing itself.

Begin with `treemap.py`; `svg.py` has what all pictures are made of, and `Picture`, the
form that a notebook gets.
"""
