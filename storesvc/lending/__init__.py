"""Lends credentials for the storage that are limited to a prefix, and expire.

It may import `storesvc.access`, `storesvc.storage` and the layers below them.
"""
