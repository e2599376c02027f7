"""Watches the changes of checkpoints across restarts of the server.

A watch is a stream of events, each with a resume token. A broken stream is opened again
from the last token, so no event is missed or repeated.
"""

from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import Final, Protocol, cast

from storesvc_client._rpc.connection import Connection
from storesvc_client._values.arguments import is_text
from storesvc_client._values.values import Event
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

_COMMITTED: Final = api.CheckpointEvent.KIND_COMMITTED


def watch(
    connection: Connection, parent: str, since: str, *, latest_of: Iterable[str]
) -> Generator[Event]:
    """Returns an endless iterator over events.

    Args:
        connection: Connection to the store.
        parent: Resource name of the run or the namespace.
        since: "now", "latest" or a resume token.
        latest_of: Runs whose newest checkpoints "latest" yields first; iterated only
            for "latest".

    Raises:
        StoreError: As for ``Run.watch``.
    """
    name = parent.removeprefix("namespaces/").replace("/runs/", "/")
    wrong = (
        f"watch of {name}: expected since= 'now', 'latest' or the resume_token of one "
        f"of its events, got {since!r}"
    )
    if not is_text(since) or not since:
        raise InvalidRequestError(wrong)
    events = _events(connection, parent, since, latest_of)
    # Runs to the first yield, so that the watch includes all changes after this call,
    # and close() reaches the `finally` of the generator.
    try:
        next(events)
    except InvalidRequestError as e:
        if e.reason != "INVALID_RESUME_TOKEN":
            raise
        raise InvalidRequestError(wrong, reason=e.reason, metadata=e.metadata) from e
    return cast("Generator[Event]", events)


def _events(
    connection: Connection, parent: str, since: str, latest_of: Iterable[str]
) -> Generator[Event | None]:
    """Yields None once the server has started the watch, and then events."""
    stream = _Stream(connection, parent, "" if since in ("now", "latest") else since)
    try:
        stream.next()
        shown = {}
        if since == "latest":  # the stream yields later commits, too
            newest = [_newest(connection, run) for run in latest_of]
            shown = {message.uid: message for message in newest if message is not None}
        yield None
        for message in tuple(shown.values()):
            event = api.CheckpointEvent(kind=_COMMITTED, checkpoint=message)
            yield Event.from_message(event, stream.token)
        while True:
            change = stream.next()
            if change is None:
                continue
            is_new = change.kind != _COMMITTED or change.checkpoint.uid not in shown
            if is_new:
                yield Event.from_message(change, stream.token)
            else:
                del shown[change.checkpoint.uid]
    finally:
        stream.close()


class _Call(Protocol):
    """A stream of responses."""

    def __next__(self) -> api.WatchCheckpointsResponse:
        """Waits for the next response."""

    def cancel(self) -> bool:
        """Ends the call."""


class _Stream:
    """Reads ``WatchCheckpoints``; calls it again after transient errors."""

    def __init__(self, connection: Connection, parent: str, token: str) -> None:
        self.token = token
        """Resume token of the last message."""
        self._connection = connection
        self._parent = parent
        self._stub = CheckpointServiceStub(connection.channel)
        self._call: _Call | None = None

    def next(self) -> api.CheckpointEvent | None:
        """Returns the next event; None for a message with only a new token.

        Raises:
            UnavailableError: The server cannot be reached.
            DataLossError: A record is damaged; ``metadata`` has the token after it.
        """
        # An idle stream is not a stalled server: the deadline of retries starts when a
        # stream breaks, and a new stream sends its first message at once.
        if self._call is not None:
            try:
                return self._read(self._call)
            except UnavailableError:
                self.close()
        for attempt in self._connection.attempts("WatchCheckpoints"):
            with attempt:
                return self._reopened()
        raise AssertionError

    def close(self) -> None:
        """Ends the call."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _reopened(self) -> api.CheckpointEvent | None:
        request = api.WatchCheckpointsRequest(
            parent=self._parent, resume_token=self.token
        )
        with translated(self._connection.address):
            self._call = self._stub.WatchCheckpoints(request)
        try:
            return self._read(self._call)
        except BaseException:
            self.close()
            raise

    def _read(self, call: _Call) -> api.CheckpointEvent | None:
        try:
            with translated(self._connection.address):
                response = next(call, None)
        except DataLossError as e:  # the last message had a token after it
            raise DataLossError(
                f"{e}; to continue after it, watch since the error's resume_token",
                reason=e.reason,
                metadata={**e.metadata, "resume_token": self.token},
            ) from e
        if response is None:
            raise UnavailableError(
                f"store {self._connection.address} ended a watch; try again"
            )
        self.token = response.resume_token
        return response.event if response.HasField("event") else None


def _newest(connection: Connection, run: str) -> api.Checkpoint | None:
    """Returns the newest checkpoint of a run; None if it has none."""
    stub = CheckpointServiceStub(connection.channel)
    request = api.GetCheckpointRequest(name=f"{run}/checkpoints/latest")
    with suppress(NotFoundError):
        for attempt in connection.attempts("GetCheckpoint"):
            with attempt, translated(connection.address):
                return stub.GetCheckpoint(
                    request, timeout=connection.timeout
                ).checkpoint
    return None
