"""Authenticates callers, and reads the policy file that says who may do what.

It may import `storesvc.access`, `storesvc.quota`, `storesvc.lending` and the layers
below them.

Start with `authenticator.py`; `policy_document.py` parses the policy.
"""
