"""The base of a run's classes: its name and its connection."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from storesvc.format.names import CheckpointName, InvalidNameError, RunName, Which
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.paging import OnDamage, rows
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client._values.resource_names import received
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

T = TypeVar("T", bound=Message)
R = TypeVar("R")


class RunBase:
    """A run and the connection to its store."""

    def __init__(self, connection: Connection, name: RunName) -> None:
        self.name = str(name)
        """``namespace/run``."""
        self._name = name
        self._connection = connection
        self._stub = CheckpointServiceStub(connection.channel)

    def __repr__(self) -> str:
        return f"<Run {self.name} of {self._connection.address}>"

    def _checkpoint_name(self, which: Which) -> CheckpointName:
        try:
            if isinstance(which, str):
                return CheckpointName(self._name, which)
            if isinstance(which, bool):
                raise TypeError
            return CheckpointName(self._name, operator.index(which))
        except TypeError as e:
            raise InvalidRequestError(
                f"{self.name}: expected a step (int), 'latest' or a tag, got {which!r}"
            ) from e
        except InvalidNameError as e:
            raise InvalidRequestError(str(e)) from None

    def _fixed_name(self, which: Which, deadline: Deadline = NEVER) -> CheckpointName:
        """Returns the name of a checkpoint with its step; resolves tags."""
        name = self._checkpoint_name(which)
        if isinstance(name.which, int):
            return name
        request = api.GetCheckpointRequest(name=name.resource)
        ask = self._connection.ask
        found = ask(self._stub.GetCheckpoint, request, deadline).checkpoint
        return received(CheckpointName.from_resource, found.name)

    def _ask(self, method: Callable[..., T], request: Message) -> T:
        """Sends a request that only reads or carries a request id, with retries."""
        return self._connection.ask(method, request)

    def _rows(
        self,
        method: Callable[..., T],
        request: Any,
        rows_of: Callable[[T], Sequence[R]],
        on_damage: OnDamage,
    ) -> Iterator[R]:
        """Yields the rows of a list, page by page."""
        return rows(partial(self._ask, method), request, rows_of, on_damage)
