"""Pages: each function takes a visit and returns a page; it imports no web framework.
`app.py` names the module of each address.

A page has a template for people, a document for ``?json``, and the storectl command
that prints the same. Begin with `runs.py`.
"""
