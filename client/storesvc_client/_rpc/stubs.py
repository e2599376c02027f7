"""Calls the methods of a store on one run, checks the names of its checkpoints, and
reads lists of the server page by page.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from google.protobuf.message import Message

from storesvc.format.names import CheckpointName, InvalidNameError, RunName, Which
from storesvc_client._rpc.connection import Connection
from storesvc_client._values.arguments import NEVER, Deadline, parse_received
from storesvc_client.errors import DataLossError, InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.errors_pb2 import DamagedRecord

T = TypeVar("T")

OnDamage: TypeAlias = Callable[[DataLossError], object] | None
"""Called for each row that cannot be read because its record is corrupt; None raises
the error and ends the list."""

FOLLOWING: Final = 1000
"""Page size after the first page: the first is small so that its rows arrive soon; the
others are large because each may start with a list request to the storage."""

_REASON: Final = "CORRUPT_DATA"


def rows(
    ask: Callable[[Any], Any],
    request: Any,
    rows_of: Callable[[Any], Sequence[T]],
    on_damage: OnDamage,
) -> Iterator[T]:
    """Yields the rows of a list in the server's order.

    Args:
        ask: Sends a request and returns the response.
        request: Request of the first page; changed for the following ones.
        rows_of: Returns the rows of a response.
        on_damage: See ``OnDamage``.

    Raises:
        DataLossError: The record of the next row is corrupt.
    """
    while True:
        page = ask(request)
        yield from _in_order(rows_of(page), page.damaged, on_damage)
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise DataLossError(
                "the server sent a list page whose next page is itself; connect to "
                "another server",
                reason=_REASON,
            )
        request.page_token = page.next_page_token
        request.page_size = FOLLOWING


def _in_order(
    found: Sequence[T], damaged: Sequence[DamagedRecord], on_damage: OnDamage
) -> Iterator[T]:
    at = 0
    for record in damaged:
        yield from found[at : record.position]
        at = record.position
        error = DataLossError(
            record.message, reason=_REASON, metadata={"name": record.name}
        )
        if on_damage is None:
            raise error
        on_damage(error)
    yield from found[at:]


M = TypeVar("M", bound=Message)
R = TypeVar("R")


class RunStub:
    """One run and the connection to its store."""

    def __init__(self, connection: Connection, name: RunName) -> None:
        self.name = name
        self.connection = connection
        self.service = CheckpointServiceStub(connection.channel)

    def checkpoint_name(self, which: Which) -> CheckpointName:
        """Returns the name of a checkpoint, which "latest" and tags leave open.

        Raises:
            InvalidRequestError: It is neither a step nor the name of a tag.
        """
        try:
            if isinstance(which, str):
                return CheckpointName(self.name, which)
            if isinstance(which, bool):
                raise TypeError
            return CheckpointName(self.name, operator.index(which))
        except TypeError as e:
            raise InvalidRequestError(
                f"{self.name}: expected a step (int), 'latest' or a tag, got {which!r}"
            ) from e
        except InvalidNameError as e:
            raise InvalidRequestError(str(e)) from None

    def step_name(self, which: Which, deadline: Deadline = NEVER) -> CheckpointName:
        """Returns the name of a checkpoint by step; resolves "latest" and tags.

        Raises:
            NotFoundError: There is no such checkpoint.
            UnavailableError: The server does not answer before the deadline.
        """
        name = self.checkpoint_name(which)
        if isinstance(name.which, int):
            return name
        request = api.GetCheckpointRequest(name=name.resource)
        ask = self.connection.ask
        found = ask(self.service.GetCheckpoint, request, deadline).checkpoint
        return parse_received(CheckpointName.from_resource, found.name)

    def ask(self, method: Callable[..., M], request: Message) -> M:
        """Returns the response to an idempotent request; retries transient errors."""
        return self.connection.ask(method, request)

    def rows(
        self,
        method: Callable[..., M],
        request: Any,
        rows_of: Callable[[M], Sequence[R]],
        on_damage: OnDamage,
    ) -> Iterator[R]:
        """Yields the rows of a list call, page by page."""
        return rows(partial(self.ask, method), request, rows_of, on_damage)
