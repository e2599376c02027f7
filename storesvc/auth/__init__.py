"""Authentication and authorization: who calls, and what a caller may do.

It may import `storesvc.storage` and the layers below it. `policy.py` and `call.py`
decide, and read no file, token or certificate.

Start with `policy.py`, which decides, and `call.py`, through which other layers ask;
`authenticator.py` names the caller, and `policy_file.py` parses the configuration.
"""
