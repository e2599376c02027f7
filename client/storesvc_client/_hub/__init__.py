"""Serves checkpoints as repositories of the Hugging Face Hub: ``storectl hub``,
and ``storectl serve --hub-port``.

It is a client of the store and has no rights of its own. `callers.py` finds the client
that reads for a request, `snapshots.py` the
checkpoint that a revision names, `served_files.py` describes its files and reads ranges
of them, `ranges.py` reads the headers of a request, `streaming.py` sends bytes while
they are read, `app.py` has the addresses. Begin with `app.py`.
"""
