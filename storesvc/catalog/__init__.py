"""Keeps the records of runs, checkpoints and uploads, and the journal of changes.

It may import `storesvc.storage`, `storesvc.format` and the foundations below them.

Begin with `slots.py`, which decides what may happen to the record of a step;
`records.py` reads and writes records with conditional writes, and `catalog.py` lists
and looks up runs and checkpoints.
"""
