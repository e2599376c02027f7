"""Runs a store as a process: ports, TLS, health, background collection, shutdown.

It may import everything of the service, and nothing of the service imports it.

Begin with `process.py`, what `storectl serve` runs, or `embedded.py`, a server inside
the process of its client; both start `app.py`.
"""
