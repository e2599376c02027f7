"""Lends credentials for the storage that are limited to a prefix, and expire.

It may import `storesvc.auth`, `storesvc.storage` and the layers below them.

Begin with `lender.py`, which obtains a credential from the provider; `boundary.py`
decides what it permits.
"""
