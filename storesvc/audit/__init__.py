"""The audit log: who changed, deleted or was denied what.

It may import `storesvc.access` and the layers below it.

Start with `observer.py`, which decides what is recorded and when;
`storesvc.format.audit_chain` has the format, and verifies it.
"""
