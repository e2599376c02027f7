"""Defines the values that the client returns, and checks those that users pass.

It may import `storesvc.format`, `_views` and `storesvc_client.errors`, and nothing else
of the client.

Begin with `models.py` (checkpoints, leaves, runs) and `policies.py` (retention);
`options.py` has the requests of saves and restores, and `arguments.py` checks labels,
metrics and single arguments.
"""
