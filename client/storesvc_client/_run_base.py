"""What every part of a run knows: its name, and how to reach its store."""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from storesvc.format.names import CheckpointName, InvalidNameError, RunName, Which
from storesvc_client._channel import Connection
from storesvc_client._pages import pages
from storesvc_client._retrying import patiently
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

T = TypeVar("T", bound=Message)


class RunBase:
    """A run, and a connection to its store."""

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
            raise InvalidRequestError(str(e)) from e

    def _ask(self, method: Callable[..., T], request: Message) -> T:
        """The answer to a request that may be repeated, for its id tells it."""
        for attempt in patiently():
            with attempt:
                return self._connection.call(method, request)
        raise AssertionError

    def _pages(self, method: Callable[..., T], request: Any) -> Iterator[T]:
        """The pages of a list; damaged rows end it, after the last one."""
        return pages(partial(self._ask, method), request)
