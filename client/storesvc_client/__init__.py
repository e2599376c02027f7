"""Save training state to a checkpoint store, and restore it.

>>> import storesvc_client as store
>>> with store.connect("memory://") as client:
...     run = client.run("docs/example")
...     run.save(0, {"weights": [1.0, 2.0]}).result().leaf_count
2
"""

from storesvc_client._client import Client, connect
from storesvc_client._run import Run
from storesvc_client._save import Save
from storesvc_client._values import Checkpoint, LeafInfo, RunInfo, ServerInfo
from storesvc_client.errors import (
    AlreadyExistsError,
    ConflictError,
    DataLossError,
    InvalidRequestError,
    LimitError,
    MismatchError,
    NotFoundError,
    PreconditionError,
    StoreError,
    UnavailableError,
    UnsupportedLeafError,
)

__all__ = [
    "AlreadyExistsError",
    "Checkpoint",
    "Client",
    "ConflictError",
    "DataLossError",
    "InvalidRequestError",
    "LeafInfo",
    "LimitError",
    "MismatchError",
    "NotFoundError",
    "PreconditionError",
    "Run",
    "RunInfo",
    "Save",
    "ServerInfo",
    "StoreError",
    "UnavailableError",
    "UnsupportedLeafError",
    "connect",
]
