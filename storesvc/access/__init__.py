"""Authorization: principals, permissions, and the policy that connects them.

It decides, and reads no file, token or certificate: `storesvc.identity` does. It may
import `storesvc.errors` and `storesvc.format`.

Start with `policy.py`, which decides, and `call.py`, through which other layers ask.
"""
