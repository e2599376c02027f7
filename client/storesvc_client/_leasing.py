"""Leases on checkpoints: what is read meanwhile is not purged."""

import logging
import threading
import uuid
from datetime import UTC, datetime, timedelta
from platform import node
from types import TracebackType
from typing import Final, Self

from google.protobuf.duration_pb2 import Duration

from storesvc.format.names import CheckpointName
from storesvc_client._channel import Connection
from storesvc_client._retrying import patiently
from storesvc_client.errors import (
    ConflictError,
    LimitError,
    StoreError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

_RENEWALS_A_TTL: Final = 3
_PASSING: Final = (ConflictError, LimitError, UnavailableError)
"""What a later renewal may not meet again."""

_log = logging.getLogger(__name__)


class Lease:
    """A hold of the server, renewed by a thread until it is ended.

    A process that ends without ending it leaves it to expire.
    """

    def __init__(
        self,
        connection: Connection,
        checkpoint: CheckpointName,
        *,
        owner: str | None = None,
        ttl: timedelta | None = None,
    ) -> None:
        """Takes a lease.

        Args:
            connection: To the store.
            checkpoint: What to hold.
            owner: Who holds it, for people; None: this machine.
            ttl: How long it lasts after each renewal; None: as the server says.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            StoreError: It could not be taken.
        """
        self._connection = connection
        self._stub = CheckpointServiceStub(connection.channel)
        request = api.CreateHoldRequest(
            parent=checkpoint.resource,
            request_id=str(uuid.uuid4()),
            owner=node() if owner is None else owner,
        )
        if ttl is not None:
            request.ttl.CopyFrom(duration_message(ttl))
        for attempt in patiently():
            with attempt, translated(connection.address):
                self._hold = self._stub.CreateHold(
                    request, timeout=connection.timeout
                ).hold
        self._error: StoreError | None = None
        self._ended = threading.Event()
        thread = threading.Thread(target=self._keep, name="storesvc-hold", daemon=True)
        thread.start()

    @property
    def checkpoint(self) -> CheckpointName:
        """What it holds, by step."""
        return CheckpointName.from_resource(self._hold.checkpoint)

    @property
    def uid(self) -> str:
        """The uid of what it holds."""
        return self._hold.uid

    @property
    def expire_time(self) -> datetime:
        """When it expires unless it is renewed."""
        return self._hold.expire_time.ToDatetime(UTC)

    @property
    def error(self) -> StoreError | None:
        """Why the last renewal failed; None: it did not."""
        return self._error

    def end(self) -> None:
        """Ends it; a second time does nothing.

        Where that fails it is left to expire.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        request = api.DeleteHoldRequest(name=self._hold.name)
        try:
            with translated(self._connection.address):
                self._stub.DeleteHold(request, timeout=self._connection.timeout)
        except StoreError as e:
            _log.warning("%s stays until it expires: %s", self._hold.name, e)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _keep(self) -> None:
        interval = self._hold.ttl.ToTimedelta().total_seconds() / _RENEWALS_A_TTL
        while not self._ended.wait(interval):
            try:
                self._renew()
            except StoreError as e:
                self._error = e
                if not isinstance(e, _PASSING):
                    return

    def _renew(self) -> None:
        request = api.RenewHoldRequest(name=self._hold.name)
        for attempt in patiently():
            with attempt, translated(self._connection.address):
                self._hold = self._stub.RenewHold(
                    request, timeout=self._connection.timeout
                ).hold
        self._error = None


def duration_message(length: timedelta) -> Duration:
    """Returns a length of time as the contract holds it."""
    message = Duration()
    message.FromTimedelta(length)
    return message
