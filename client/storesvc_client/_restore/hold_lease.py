"""Leases on checkpoints: what is read meanwhile is not purged."""

import logging
import threading
import time
import uuid
from datetime import UTC, datetime
from platform import node
from types import TracebackType
from typing import Final, Self

from storesvc.format.names import CheckpointName
from storesvc_client._rpc.connection import Connection
from storesvc_client._values.arguments import checked_text
from storesvc_client._values.durations import Deadline, DurationLike, duration_message
from storesvc_client._values.resource_names import received
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    StoreError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub

_RENEWALS_A_TTL: Final = 3
_CALL_SECONDS: Final = 10.0
"""Of a renewal, and of the end: small calls, which others follow."""
_ENDING_REASONS: Final = frozenset({"HOLD_EXPIRED", "HOLD_NOT_FOUND"})

_log = logging.getLogger(__name__)


class Lease:
    """A hold of the server, renewed by a thread until it is ended.

    The thread goes on through all that may pass, and ends where the server says that
    there is nothing left to renew (``HOLD_NOT_FOUND``, ``HOLD_EXPIRED``), or where the
    client was closed. A process that ends without ending its lease leaves it to expire.
    """

    def __init__(
        self,
        connection: Connection,
        checkpoint: CheckpointName,
        *,
        uid: str = "",
        owner: str | None = None,
        ttl: DurationLike | None = None,
    ) -> None:
        """Takes a lease.

        Args:
            connection: To the store.
            checkpoint: What to hold.
            uid: The very one of this uid, also where it was deleted; "": any.
            owner: Who holds it, for people; None: this machine.
            ttl: How long it lasts after each renewal; None: as the server says.

        Raises:
            NotFoundError: There is no such checkpoint, or, without a uid, it was
                deleted.
            StoreError: It could not be taken.
        """
        self._connection = connection
        self._stub = CheckpointServiceStub(connection.channel)
        request = api.CreateHoldRequest(
            parent=checkpoint.resource,
            uid=uid,
            request_id=str(uuid.uuid4()),
            owner=node() if owner is None else checked_text("owner= of a hold", owner),
        )
        if ttl is not None:
            request.ttl.CopyFrom(duration_message(ttl, "ttl= of a hold"))
        for attempt in connection.attempts("CreateHold"):
            with attempt, translated(connection.address):
                self._renewed = time.monotonic()
                self._hold = self._stub.CreateHold(
                    request, timeout=connection.timeout
                ).hold
        self._error: StoreError | None = None
        # Of the thread that has it already, too: a garbage collection within a renewal
        # may end what nobody uses any more.
        self._renewing = threading.RLock()
        self._ended = threading.Event()
        thread = threading.Thread(target=self._keep, name="storesvc-hold", daemon=True)
        thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it was ended here."""
        return self._ended.is_set()

    @property
    def checkpoint(self) -> CheckpointName:
        """What it holds, by step."""
        return received(CheckpointName.from_resource, self._hold.checkpoint)

    @property
    def uid(self) -> str:
        """The uid of what it holds."""
        return self._hold.uid

    @property
    def expire_time(self) -> datetime:
        """When it expires unless it is renewed."""
        return self._hold.expire_time.ToDatetime(UTC)

    @property
    def is_held(self) -> bool:
        """Whether it was neither ended, nor so long without a renewal that it may have
        expired."""
        ttl = self._hold.ttl.ToTimedelta().total_seconds()
        return not self._ended.is_set() and time.monotonic() - self._renewed < ttl

    @property
    def error(self) -> StoreError | None:
        """Why it may have expired, or the last renewal failed; None: it was renewed."""
        if self._error is None and not self._ended.is_set() and not self.is_held:
            return PreconditionError(
                f"the hold on {self.checkpoint} was not renewed for longer than its "
                "ttl, and may have expired; take another one",
                reason="HOLD_EXPIRED",
            )
        return self._error

    def end(self) -> None:
        """Ends it; a second time does nothing. ``error`` stays what it was.

        Where that fails it is left to expire.
        """
        # After the answer to a renewal, and before the next one; not for ever.
        has_turn = self._renewing.acquire(timeout=_CALL_SECONDS)
        try:
            if self._ended.is_set():
                return
            self._error = self.error
            self._ended.set()
        finally:
            if has_turn:
                self._renewing.release()
        request = api.DeleteHoldRequest(name=self._hold.name)
        try:
            ends = Deadline.after(self._timeout)
            self._connection.ask(self._stub.DeleteHold, request, ends)
        except StoreError as e:
            _log.warning("%s stays until it expires: %s", self._hold.name, e)

    @property
    def _timeout(self) -> float:
        return min(self._connection.timeout, _CALL_SECONDS)

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
                self._fail(e)
                if _is_ending(e):
                    return

    def _renew(self) -> None:
        request = api.RenewHoldRequest(name=self._hold.name)
        for attempt in self._connection.attempts("RenewHold"):
            with attempt, self._renewing:
                if self._ended.is_set():
                    return
                self._renew_once(request)

    def _renew_once(self, request: api.RenewHoldRequest) -> None:
        began = time.monotonic()
        try:
            with translated(self._connection.address):
                hold = self._stub.RenewHold(request, timeout=self._timeout).hold
        except UnavailableError:  # not yet an error: it is tried again
            raise
        except StoreError as e:
            self._fail(e)
            raise
        if not self._ended.is_set():
            self._hold, self._renewed, self._error = hold, began, None

    def _fail(self, error: StoreError) -> None:
        with self._renewing:
            if not self._ended.is_set():
                self._error = error


def _is_ending(e: StoreError) -> bool:
    """Whether no later renewal can succeed."""
    return e.reason in _ENDING_REASONS or isinstance(e, InvalidRequestError)
