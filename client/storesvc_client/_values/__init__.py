"""Defines the values that the client returns, and checks those that users pass.

It may import `storesvc.format` and `storesvc_client.errors`, and nothing else of the
client.

Begin with `models.py` (checkpoints, leaves, runs) and `policies.py` (retention);
`arguments.py` checks labels, metrics and single arguments.
"""
