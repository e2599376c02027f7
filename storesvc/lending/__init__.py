"""Lends credentials for the storage that are limited to a prefix, and expire.

It may import `storesvc.access`, `storesvc.storage` and the layers below them.

Begin with `lender.py`; `boundary.py` decides what a credential permits, and `gcs.py`
and `s3.py` obtain it from the provider.
"""
