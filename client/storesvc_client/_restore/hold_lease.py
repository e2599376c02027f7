"""Leases on checkpoints: holds that protect a checkpoint from purging."""

import logging
import threading
import time
import uuid
from datetime import UTC, datetime
from platform import node
from typing import Final, Self

from storesvc.format.names import CheckpointName
from storesvc_client._rpc.connection import Connection
from storesvc_client._values.arguments import (
    Deadline,
    DurationLike,
    checked_text,
    duration_message,
    parse_received,
)
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    StoreError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

_RENEWALS_PER_TTL: Final = 3
_CALL_SECONDS: Final = 10.0
"""Timeout of a renewal and of a deletion."""
_ENDING_REASONS: Final = frozenset({"HOLD_EXPIRED", "HOLD_NOT_FOUND"})
"""Error reasons after which no renewal can succeed."""

_log = logging.getLogger("storesvc_client")


class Lease:
    """A hold on the server, renewed by a background thread until it is ended.

    The thread retries after transient errors. It ends when the server reports that the
    hold is gone (``HOLD_NOT_FOUND``, ``HOLD_EXPIRED``) or the client is closed. If the
    process ends without calling ``end``, the hold expires.
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
        """Creates the hold.

        Args:
            uid: Uid of exactly the checkpoint to hold, even if it is deleted; "" holds
                the current one.
            owner: Owner shown to users; None is the name of this machine.
            ttl: Time to live after each renewal; None is the server's default.

        Raises:
            NotFoundError: The checkpoint does not exist or, without a uid, is deleted.
            StoreError: The hold could not be created.
        """
        self._connection = connection
        self._stub = connection.checkpoints
        request = api.CreateHoldRequest(
            parent=checkpoint.resource,
            uid=uid,
            request_id=str(uuid.uuid4()),
            owner=node() if owner is None else checked_text("owner= of a hold", owner),
        )
        if ttl is not None:
            request.ttl.CopyFrom(duration_message(ttl, "ttl= of a hold"))
        for attempt in connection.attempts("CreateHold"):
            with attempt, translate_rpc_errors(connection.address):
                # before the call, so that it never seems held for longer than it is
                self._renewed = time.monotonic()
                self._hold = self._stub.CreateHold(
                    request, timeout=connection.timeout
                ).hold
        self._error: StoreError | None = None
        # Reentrant: a Python garbage collection during a renewal may end a lease in
        # the same thread.
        self._renewing = threading.RLock()
        self._ended = threading.Event()
        thread = threading.Thread(target=self._run, name="storesvc-hold", daemon=True)
        thread.start()

    @property
    def has_ended(self) -> bool:
        """True after ``end`` was called."""
        return self._ended.is_set()

    @property
    def name(self) -> str:
        """Name of the hold, as the server has it."""
        return self._hold.name

    @property
    def checkpoint(self) -> CheckpointName:
        return parse_received(CheckpointName.from_resource, self._hold.checkpoint)

    @property
    def uid(self) -> str:
        return self._hold.uid

    @property
    def expire_time(self) -> datetime:
        """Expiry time, unless renewed."""
        return self._hold.expire_time.ToDatetime(UTC)

    @property
    def is_held(self) -> bool:
        """True until the lease is ended or may have expired."""
        ttl = self._hold.ttl.ToTimedelta().total_seconds()
        return not self._ended.is_set() and time.monotonic() - self._renewed < ttl

    @property
    def error(self) -> StoreError | None:
        """Error of the last renewal, or an expiry; None while the lease is held."""
        if self._error is None and not self._ended.is_set() and not self.is_held:
            return PreconditionError(
                f"the hold on {self.checkpoint} was not renewed for longer than its "
                "ttl, and may have expired; take another one",
                reason="HOLD_EXPIRED",
            )
        return self._error

    def end(self) -> None:
        """Ends the lease; repeated calls do nothing. ``error`` keeps its value.

        If the hold cannot be deleted, it expires.
        """
        # 1. Wait for a renewal in flight and block the next one, but not without limit:
        # its error would replace the one that the lease ends with.
        is_locked = self._renewing.acquire(timeout=_CALL_SECONDS)
        try:
            if self._ended.is_set():
                return
            self._error = self.error
            self._ended.set()
        finally:
            if is_locked:
                self._renewing.release()
        # 2. Only then delete the hold.
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

    def __exit__(self, *_: object) -> None:
        self.end()

    def _run(self) -> None:
        interval = self._hold.ttl.ToTimedelta().total_seconds() / _RENEWALS_PER_TTL
        while not self._ended.wait(interval):
            try:
                self._renew()
            except StoreError as e:
                self._fail(e)
                if e.reason in _ENDING_REASONS or isinstance(e, InvalidRequestError):
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
            with translate_rpc_errors(self._connection.address):
                hold = self._stub.RenewHold(request, timeout=self._timeout).hold
        except UnavailableError:  # transient: the caller retries
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
