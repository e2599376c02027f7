"""A channel that outlives its certificates.

gRPC's own keeps the certificates that it was made with, and stubs keep their channel.
This one dials anew when a call begins and the files have changed since; calls under way
go on over the channel that they began on, which ends with the last of them.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

from storesvc_client._rpc.tls import Tls
from storesvc_client.errors import InvalidRequestError

_log = logging.getLogger(__name__)


class RenewedChannel(grpc.Channel):
    """Channels to one target, one after another."""

    def __init__(
        self, tls: Tls, dial: Callable[[grpc.ChannelCredentials], grpc.Channel]
    ) -> None:
        """Dials.

        Args:
            tls: The files.
            dial: Returns a channel with what they hold.

        Raises:
            InvalidRequestError: They cannot be used.
        """
        self._tls = tls
        self._dial = dial
        self._renewing = threading.Lock()
        self._is_open = True
        self._state = tls.state()
        self._channel = dial(tls.credentials())

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Returns a method, for callers that do nothing but call it; so do the next."""
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._method("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._method("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See ``unary_unary``."""
        return self._method("stream_stream", arguments, options)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - as gRPC has it
    ) -> None:
        """Tells of the channel of the moment, and of no other."""
        self._current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Ends ``subscribe``."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Ends the channel of the moment; calls end with it."""
        with self._renewing:
            self._is_open = False
            self._channel.close()

    def _method(self, kind: str, arguments: Any, options: Any) -> Callable[..., Any]:
        def call(*request: Any, **how: Any) -> Any:
            method = getattr(self._current(), kind)(*arguments, **options)
            return method(*request, **how)

        return call

    def _current(self) -> grpc.Channel:
        with self._renewing:
            state = self._tls.state()
            if state != self._state and self._is_open:
                try:
                    credentials = self._tls.credentials()
                except InvalidRequestError as e:
                    _log.warning("certificates stay as they were read before: %s", e)
                else:
                    # Who is not referred to any more, by no call either, is closed.
                    self._channel = self._dial(credentials)
                self._state = state
            return self._channel
