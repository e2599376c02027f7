"""Runs a store as a process: ports, TLS, health, background collection, shutdown.

It may import everything of the service, and nothing of the service imports it.

Start with `process.py`, which `storectl serve` runs, or with `embedded.py`, a server
inside the client's process; both start `app.py`.
"""
