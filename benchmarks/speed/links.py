"""The link to the emulated bucket, and the speed that it bounds.

A request waits for the latency, then its connection transfers the bytes; the link as a
whole has no rate. A save is judged by the time that a fixed number of connections take
for its bytes at their full rate, and one round trip:

    latency + bytes / (connections * rate of each)

A restore is bounded by what it has in flight:

    requests in flight * bytes of each / (latency + bytes of each / rate of each)

The copies and checksums of client, server and emulator are not in them, nor are the
requests of a save that wait for one another; ``python -m benchmarks requests``
counts those.
"""

from collections.abc import Mapping
from typing import Final

from storesvc.storage.location import CONCURRENCY
from storesvc_client._restore.sources import BUCKET_BLOCK_BYTES, BUCKET_READ_BYTES

LATENCY_SECONDS: Final = 0.03
STREAM_MBPS: Final = 400
"""Megabits a second of a connection."""

SAVE_CONNECTIONS: Final = 15
"""Connections by which a save is judged: as many objects as the client had in flight
when the bar was set. Fixed, because a client with fewer would meet a lower bound."""

_STREAM_BYTES_PER_SECOND: Final = STREAM_MBPS * 1e6 / 8


def bound(in_flight: int, request_bytes: int) -> float:
    """Returns the bytes a second that so many requests in flight transfer."""
    seconds = LATENCY_SECONDS + request_bytes / _STREAM_BYTES_PER_SECOND
    return in_flight * request_bytes / seconds


def save_bound_seconds(size_bytes: float) -> float:
    """Returns the least seconds of a save of so many bytes."""
    rate = SAVE_CONNECTIONS * _STREAM_BYTES_PER_SECOND
    return LATENCY_SECONDS + size_bytes / rate


def bounds(size_bytes: float) -> Mapping[str, float]:
    """Returns the bytes a second of this store for a state of a size, by phase."""
    in_flight = min(CONCURRENCY, BUCKET_READ_BYTES // BUCKET_BLOCK_BYTES)
    return {
        "save": size_bytes / save_bound_seconds(size_bytes),
        "restore": bound(in_flight, BUCKET_BLOCK_BYTES),
    }
