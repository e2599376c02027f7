"""Defines the commands of storectl, one module a command, imported when it is called.

A command may import the modules of `storesvc_client.cli` and the public names of the
client; slow imports belong inside its function.

Begin with `ls.py`; `storesvc_client.cli.group` imports a command by the name of its
module.
"""
