"""Maps rpcs onto the store: translate, call, translate back.

It may import `storesvc.store` and everything below it; it decides nothing.

Start with `checkpoint_service.py` or `upload_service.py`, one module a service;
`registry.py` lists the services, `methods.py` what each rpc needs, and `status.py` has
the table of errors and ends failed calls.
"""
