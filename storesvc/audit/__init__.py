"""The audit log: who changed, deleted or was denied what.

It may import `storesvc.access` and the layers below it.
"""
