"""The link to the emulated bucket, and the speed that it bounds.

A request waits for the latency, then its connection transfers the bytes; the link as a
whole has no rate. So a client is bounded by what it has in flight:

    requests in flight * bytes of each / (latency + bytes of each / rate of each)

The copies and checksums of client, server and emulator are not in it.
"""

from collections.abc import Mapping
from typing import Final

from storesvc.storage.location import CONCURRENCY
from storesvc_client._restore.bucket_source import BLOCK_BYTES, READ_BYTES
from storesvc_client._save.data_files import (
    IN_FLIGHT_BYTES,
    OBJECT_BYTES,
    OBJECT_THREADS,
)

LATENCY_SECONDS: Final = 0.03
STREAM_MBPS: Final = 400
"""Megabits a second of a connection."""

_STREAM_BYTES_PER_SECOND: Final = STREAM_MBPS * 1e6 / 8


def bound(in_flight: int, request_bytes: int) -> float:
    """Returns the bytes a second that so many requests in flight transfer."""
    seconds = LATENCY_SECONDS + request_bytes / _STREAM_BYTES_PER_SECOND
    return in_flight * request_bytes / seconds


BOUNDS: Final[Mapping[str, float]] = {
    "save": bound(min(OBJECT_THREADS, IN_FLIGHT_BYTES // OBJECT_BYTES), OBJECT_BYTES),
    "restore": bound(min(CONCURRENCY, READ_BYTES // BLOCK_BYTES), BLOCK_BYTES),
}
"""Bytes a second of this store, by phase."""
