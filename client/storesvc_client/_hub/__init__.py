"""Serves checkpoints as repositories of the Hugging Face Hub: ``storectl hub``.

It is a client of the store and has no rights of its own. `snapshots.py` finds the
checkpoint that a revision names, `served_files.py` describes its files and reads ranges
of them, `ranges.py` reads the headers of a request, `streaming.py` sends bytes while
they are read, `app.py` has the addresses. Begin with `app.py`.
"""
