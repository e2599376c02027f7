"""storectl: the checkpoint store at the command line.

``storectl --help`` tells how to use it. It starts fast: what is slow to import
(gRPC, NumPy, rich, the server) is imported by the commands that need it, when
they run. Neither jax nor flax is imported by any of them.
"""

from storesvc_client.cli._main import main

__all__ = ["main"]
