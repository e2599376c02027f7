"""A hold on a checkpoint, for whoever reads it for long or again and again."""

from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from storesvc_client._restore.hold_lease import Lease
from storesvc_client._session import Session
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


class Hold:
    """Keeps a checkpoint from being purged; made by ``Run.hold``.

    Renewed by itself until it is closed; what it holds may be deleted meanwhile, and
    still be read.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        from storesvc_client._restore.open import open_checkpoint

        self._lease = lease
        self._opened = open_checkpoint(
            session, lease.checkpoint, uid=lease.uid, held_by=lease
        )
        self.checkpoint = self._opened.info
        """What is held, as it was when the hold was taken."""

    def __repr__(self) -> str:
        return f"<Hold on {self._opened.name} until {self.expire_time.isoformat()}>"

    @property
    def expire_time(self) -> datetime:
        """When it expires unless it is renewed."""
        return self._lease.expire_time

    def open(self) -> "OpenCheckpoint":
        """Returns the checkpoint, for several reads of it, also once it is deleted.

        Raises:
            InvalidRequestError: The hold is closed.
            PreconditionError: It was not renewed in time, and may have expired.
            StoreError: What the last renewal failed with.
        """
        if self._lease.has_ended:
            raise InvalidRequestError(
                f"the hold on {self._opened.name} is closed; take another one"
            )
        self.check()
        return self._opened

    def check(self) -> None:
        """Refuses to go on with a hold that may have expired.

        Raises:
            PreconditionError: It was not renewed in time.
            StoreError: What the last renewal failed with.
        """
        error = self._lease.error
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the hold; a second time does nothing.

        Raises:
            StoreError: What the last renewal failed with.
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
