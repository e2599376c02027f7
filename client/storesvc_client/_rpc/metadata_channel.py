"""A channel that adds metadata to each call: its token, and the span it belongs to.

The metadata is asked for in the thread that begins a call, and is therefore always
current. Without a token and without OpenTelemetry there is none.

Example:
    >>> channel = MetadataChannel(channel, lambda: [("authorization", "Bearer ...")])
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import grpc

from storesvc_client._rpc.process_exit import check_process
from storesvc_client._rpc.tokens import TokenSource
from storesvc_client._values.telemetry import current_traceparent

TRACEPARENT: Final = "traceparent"
"""Name of the metadata with the span of the caller (W3C Trace Context)."""

Metadata: TypeAlias = Sequence[tuple[str, str]]


def call_metadata(source: TokenSource | None, address: str) -> Callable[[], Metadata]:
    """Returns a function that returns the metadata for a call that begins now, and
    rejects calls in a forked child.

    Args:
        source: Source of tokens; None: calls have none.
        address: Name of the store in errors.
    """
    process = os.getpid()

    def metadata() -> Metadata:
        check_process(address, process)
        found = list[tuple[str, str]]()
        if source is not None:
            found.append(("authorization", f"Bearer {source()}"))
        if span := current_traceparent():
            found.append((TRACEPARENT, span))
        return found

    return metadata


class MetadataChannel(grpc.Channel):
    """Delegates calls to a channel, each with the metadata of the time it begins."""

    def __init__(self, channel: grpc.Channel, metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Returns a callable; unlike gRPC's, it has no methods such as ``future``."""
        return self._extended(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._extended(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._extended(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._extended(self._channel.stream_stream(*arguments, **options))

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - gRPC's signature
    ) -> None:
        """Subscribes to the channel."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Ends the subscription of a callback."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def _extended(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*request: Any, **options: Any) -> Any:
            if added := self._metadata():
                options["metadata"] = (*(options.get("metadata") or ()), *added)
            return method(*request, **options)

        return call
