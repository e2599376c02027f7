"""Shows values to people: texts, and tables of notebooks.

It may import `storesvc_client.errors`, and nothing else of the client; it knows the
values that it shows by their annotations only.

Begin with `texts.py`, which the command line, notebooks and the console share.
"""
