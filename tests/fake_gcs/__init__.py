"""An emulator of Google Cloud Storage: its JSON API in memory, with faults.

    with FakeGcs(buckets=["b1"]) as gcs:
        gcs.fault(r"POST /upload.*manifest", Status(503), times=2)
        ...  # clients of gcs.url

Every request is atomic, and every read sees the last write. It speaks what
TensorStore's ``gcs`` driver, gcsfs and google-cloud-storage speak; the XML API it does
not know.

| module | holds |
|---|---|
| contents, objects, listing | what is stored, and when it may change: no I/O |
| messages, multipart | requests and answers as values |
| parameters, resources, uploads, batches, tokens, json_api | what requests mean |
| faults, outcomes, log, control | what tests do to it |
| http, server, emulator | the wire |
"""

from tests.fake_gcs.emulator import FakeGcs
from tests.fake_gcs.faults import (
    ALWAYS,
    Corrupt,
    Delay,
    Late,
    Lost,
    Mute,
    Reset,
    Stall,
    Status,
    Truncate,
)
from tests.fake_gcs.log import Logged
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
    "Stall",
    "Status",
    "Tokens",
    "Truncate",
]
