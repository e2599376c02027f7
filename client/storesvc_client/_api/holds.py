"""Holds: they keep a checkpoint from being purged while it is read."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from storesvc.format.names import HoldName, InvalidNameError, Which
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._rpc.run_stub import OnDamage, RunStub
from storesvc_client._session import Session
from storesvc_client._values.arguments import DurationLike
from storesvc_client._values.notebook import listed
from storesvc_client._values.values import HoldInfo
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


class Holds:
    """The holds of a run; ``run.holds``.

    Restores and reads hold their checkpoint by themselves. Create a hold for a
    checkpoint that is read again and again.

    >>> with run.holds.create("best", ttl=3600) as hold:
    ...     state = hold.open().restore(like=state)
    """

    def __init__(self, session: Session, stub: RunStub) -> None:
        self._session = session
        self._stub = stub

    def __repr__(self) -> str:
        return f"<Holds of {self._stub.name}>"

    def create(
        self,
        which: Which = "latest",
        *,
        owner: str | None = None,
        ttl: DurationLike = timedelta(minutes=10),
    ) -> "Hold":
        """Keeps a checkpoint from being purged until the returned hold is closed.

        Args:
            which: A step, "latest" or a tag.
            owner: Name of the holder, for people; None: the name of this machine.
            ttl: How long the hold outlives this process, a ``timedelta`` or seconds.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            InvalidRequestError: The owner or the ttl is out of range.
        """
        checkpoint = self._stub.checkpoint_name(which)
        lease = Lease(self._stub.connection, checkpoint, owner=owner, ttl=ttl)
        try:
            return Hold(self._session, lease)
        except BaseException:
            lease.end()
            raise

    def release(self, hold: str) -> None:
        """Ends a hold, of any process; a hold that does not exist is no error.

        Args:
            hold: ``HoldInfo.id``.

        Raises:
            InvalidRequestError: It is no id of a hold.
        """
        try:
            name = HoldName(self._stub.name, hold)
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self._stub.name}: {e}") from e
        request = api.DeleteHoldRequest(name=name.resource)
        self._stub.ask(self._stub.service.DeleteHold, request)

    @listed("hold")
    def list(self, *, on_damage: OnDamage = None) -> Iterator[HoldInfo]:
        """Yields the holds, including holds of restores and expired holds.

        Args:
            on_damage: Called with a ``DataLossError`` for each hold whose record is
                damaged; None raises the error in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next hold is damaged.
        """
        request = api.ListHoldsRequest(parent=self._stub.name.resource)
        method = self._stub.service.ListHolds
        found = self._stub.rows(method, request, lambda page: page.holds, on_damage)
        yield from map(HoldInfo.from_message, found)


class Hold:
    """A hold on a checkpoint; returned by ``run.holds.create``.

    A thread renews it until it is closed. The checkpoint can be deleted in the
    meantime; it is not purged, and can be read through the hold.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        from storesvc_client._restore.checkpoint import open_checkpoint

        self._lease = lease
        self._opened = open_checkpoint(
            session, lease.checkpoint, uid=lease.uid, held_by=lease
        )
        self.checkpoint = self._opened.info
        """The held checkpoint as it was when the hold was created."""

    def __repr__(self) -> str:
        return f"<Hold on {self._opened.name} until {self.expire_time.isoformat()}>"

    @property
    def expire_time(self) -> datetime:
        """Time at which the hold expires unless it is renewed, in UTC."""
        return self._lease.expire_time

    def open(self) -> "OpenCheckpoint":
        """Returns the checkpoint for several reads, even after it was deleted.

        Raises:
            InvalidRequestError: The hold is closed.
            PreconditionError: It was not renewed in time, and may have expired.
            StoreError: The last renewal failed.
        """
        if self._lease.has_ended:
            raise InvalidRequestError(
                f"the hold on {self._opened.name} is closed; take another one"
            )
        self.check()
        return self._opened

    def check(self) -> None:
        """Raises an error if the hold may have expired.

        Raises:
            PreconditionError: It was not renewed in time.
            StoreError: The last renewal failed.
        """
        error = self._lease.error
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the hold; a second call does nothing.

        Raises:
            StoreError: The last renewal failed.
        """
        self._lease.end()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the error that ends the block is the one to see
            self._lease.end()
