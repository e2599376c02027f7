"""Keeps the records of runs, checkpoints and uploads, and the journal of changes.

It may import `storesvc.storage`, `storesvc.format` and the foundations below them.

Begin with `slots.py` and `transitions.py`, which decide what may happen to the record
of a step; `records.py` reads and writes records with conditional writes,
`catalog.py` lists and looks up runs and checkpoints, and `suggestions.py` composes the
errors of those that do not exist.
"""
