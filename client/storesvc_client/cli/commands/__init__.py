"""Defines the commands of storectl; `COMMANDS` in `group.py` names the module of each,
which is imported when the command is called.

A command may import the modules of `storesvc_client.cli` and the public names of the
client; slow imports belong inside its function. Begin with `look.py`.
"""
