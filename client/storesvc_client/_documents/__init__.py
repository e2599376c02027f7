"""Collects data that storectl and the console both show.

It may import the public client and the layers below it.

Begin with `checkpoints.py`.
"""
