"""What the saves and restores of one client share: connection, staging memory, root."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storesvc_client._chunks.staging_pool import MIN_BUDGET_BYTES, Staging
from storesvc_client._rpc.connection import Connection
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._storage.bucket import BucketRoot

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Host memory that saves may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A connection to a store, and what this process uses beside it."""

    connection: Connection
    staging: Staging
    """The host memory of saves."""
    data_root: "Path | BucketRoot | None" = None
    """The root of the store, where this process reads and writes data files itself;
    None: they go through the server."""

    def close(self) -> None:
        """Frees the staging memory and closes the connection; may be repeated."""
        self.staging.clear()
        self.connection.close()


def new_staging(budget_bytes: int) -> Staging:
    """Returns the staging memory of a client.

    Raises:
        InvalidRequestError: The budget is too small for one stream.
    """
    if budget_bytes < MIN_BUDGET_BYTES:
        raise InvalidRequestError(
            f"staging_bytes: expected at least {MIN_BUDGET_BYTES}, got {budget_bytes}"
        )
    return Staging(budget_bytes)
