"""Limits per principal and namespace: rates, streams, uploads, stored bytes.

It may import `storesvc.auth` and the layers below it.

Start with `quotas.py`.
"""
