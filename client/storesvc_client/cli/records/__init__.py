"""Lists of runs, checkpoints and leaves: their fields, conditions and orders.

Begin with `fields.py`.
"""
