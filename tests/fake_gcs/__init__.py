"""An emulator of Google Cloud Storage: its JSON API in memory, with faults.

    with FakeGcs(buckets=["b1"]) as gcs:
        gcs.fault(r"POST /upload.*manifest", Status(503), times=2)
        ...  # clients of gcs.url

Every request is atomic, and every read sees the last write. It implements the calls
that TensorStore's ``gcs`` driver, gcsfs and google-cloud-storage send; and of the XML
API, the calls on objects that obstore sends. With `Tokens`, every request needs one,
and the token service exchanges one for another that is limited to a prefix.

| module | holds |
|---|---|
| objects | stored objects, preconditions and lists, without I/O |
| messages | requests and responses as values |
| resources, uploads, json_api | the JSON API, and what is needed of the XML API |
| tokens | tokens, their limits, and the exchange |
| faults, control | faults and log, for tests |
| http, server, emulator | HTTP and the server |
"""

from tests.fake_gcs.control import Logged
from tests.fake_gcs.emulator import FakeGcs
from tests.fake_gcs.faults import (
    ALWAYS,
    Corrupt,
    Delay,
    Late,
    Lost,
    Mute,
    Reset,
    Short,
    Stall,
    Status,
    Truncate,
)
from tests.fake_gcs.tokens import Tokens

__all__ = [
    "ALWAYS",
    "Corrupt",
    "Delay",
    "FakeGcs",
    "Late",
    "Logged",
    "Lost",
    "Mute",
    "Reset",
    "Short",
    "Stall",
    "Status",
    "Tokens",
    "Truncate",
]
