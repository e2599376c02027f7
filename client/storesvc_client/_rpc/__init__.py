"""Calls a server: targets, channels, TLS, deadlines, retries and pages.

It may import `storesvc_client._job`, `storesvc_client._values` and the layers
below them, and starts the embedded server of `storesvc.server`.

Begin with `connection.py`, which every call goes through; `retry.py` decides which
errors are transient.
"""
