"""Limits of namespaces and principals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRule:
    """Maximum amounts; 0: unlimited."""

    namespaces: tuple[str, ...] = ()
    """Patterns of namespaces; empty: the rule of each principal."""
    stored_bytes: int = 0
    """Bytes that the checkpoints of a namespace store."""
    stored_bytes_soft: int = 0
    """Stored bytes above which the server warns."""
    streams: int = 0
    """Streams at a time, except watches."""
    watches: int = 0
    """Watches at a time."""
    uploads: int = 0
    """Uploads that were begun and have not ended."""
    bytes_in_flight: int = 0
    """Bytes of chunks in memory of the server."""
    requests_per_second: int = 0
    """Calls that begin in a second."""
