"""Defines the values that the client returns, and checks those that users pass.

It may import `storesvc.format` and `storesvc_client.errors`, and nothing else of the
client.

Begin with `values.py` (checkpoints, leaves, runs), `policies.py` (retention) and
`durations.py`; `arguments.py` checks labels, metrics and single arguments.
"""
