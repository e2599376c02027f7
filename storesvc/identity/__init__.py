"""Authenticates callers: client certificates, bearer tokens, this machine.

It may import `storesvc.access` and the layers below it.
"""
