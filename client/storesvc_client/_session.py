"""The resources that a client's saves and restores share: connection, memory, root."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storesvc_client._chunks.memory import MIN_BUDGET_BYTES, BlockPool, StagingPool
from storesvc_client._rpc.connection import Connection
from storesvc_client._telemetry.events import Telemetry
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._storage.bucket import BucketRoot
    from storesvc_client._storage.root import LentBucket

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Default host memory for the saves of a client."""

DEFAULT_RESTORE_POOL_BYTES: Final = 4 << 30
"""Default memory of earlier restores that a client keeps for the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A connection to a store with the local resources of its saves and restores."""

    connection: Connection
    staging: StagingPool
    """Host memory of saves."""
    blocks: BlockPool
    """Host memory of restores."""
    telemetry: Telemetry
    """Receives the reports of saves and restores."""
    data_root: "Path | BucketRoot | LentBucket | None" = None
    """Root of the store if this process reads and writes data files itself, with
    credentials of its own or lent ones; None if they go through the server."""

    def close(self) -> None:
        """Frees the memory and closes the connection; may be repeated."""
        self.staging.clear()
        self.blocks.clear()
        self.connection.close()


def new_staging(budget_bytes: int) -> StagingPool:
    """Returns the staging pool of a client.

    Raises:
        InvalidRequestError: The budget is too small for one stream of chunks.
    """
    _check_bytes("staging_bytes", budget_bytes, least=MIN_BUDGET_BYTES)
    return StagingPool(budget_bytes)


def new_blocks(limit_bytes: int) -> BlockPool:
    """Returns the block pool of a client.

    Raises:
        InvalidRequestError: The limit is no number of bytes.
    """
    _check_bytes("restore_pool_bytes", limit_bytes, least=0)
    return BlockPool(limit_bytes)


def _check_bytes(option: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:  # True is an int, too
        raise InvalidRequestError(
            f"connect: {option}=: expected a whole number of bytes, at least {least}, "
            f"got {value!r}"
        )
