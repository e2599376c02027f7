"""The web console: pages about a store, for the browser of its user.

It is a client of the public API (``storesvc_client.connect``) and has no rights of its
own. `app.py` builds the application, the modules `..._pages.py` have its pages,
`changes.py` the changes that it offers. Begin with `app.py`.
"""
