"""The resources that a client's saves and restores share: connection, memory, root."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storesvc_client._chunks.staging_pool import MIN_BUDGET_BYTES, StagingPool
from storesvc_client._rpc.connection import Connection
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._storage.bucket import BucketRoot

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Default host memory for the saves of a client."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A connection to a store with the local resources of its saves and restores."""

    connection: Connection
    staging: StagingPool
    """Host memory of saves."""
    data_root: "Path | BucketRoot | None" = None
    """Root of the store if this process reads and writes data files itself; None if
    they go through the server."""

    def close(self) -> None:
        """Frees the staging memory and closes the connection; may be repeated."""
        self.staging.clear()
        self.connection.close()


def new_staging(budget_bytes: int) -> StagingPool:
    """Returns the staging pool of a client.

    Raises:
        InvalidRequestError: The budget is too small for one stream of chunks.
    """
    if budget_bytes < MIN_BUDGET_BYTES:
        raise InvalidRequestError(
            f"staging_bytes: expected at least {MIN_BUDGET_BYTES}, got {budget_bytes}"
        )
    return StagingPool(budget_bytes)
