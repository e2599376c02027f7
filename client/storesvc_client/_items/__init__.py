"""Encodes and decodes the items of a checkpoint: values and the states of iterators.

It may import `_values`.

Begin with `values.py`.
"""
