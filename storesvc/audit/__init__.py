"""The audit log: who changed, deleted or was denied what; written and read.

It may import `storesvc.auth` and the layers below it.

Start with `log.py`, which decides what is recorded and when, and writes it;
`reader.py` reads pages of it. `storesvc.format.audit_chain` has the format, and
verifies it.
"""
