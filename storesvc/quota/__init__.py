"""Limits per principal and namespace: rates, streams, bytes.

It may import `storesvc.access` and the layers below it.
"""
