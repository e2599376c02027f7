"""Record updates: the compare-and-swap loop of holds, tags and checkpoints."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from storesvc.errors import ConflictError
from storesvc.storage.bucket import PreconditionError

ATTEMPTS: Final = 8
"""Attempts of one update, while other calls change the same record."""

T = TypeVar("T")


async def update_record(
    attempt: Callable[[], Awaitable[T]], *, record: str, **metadata: str
) -> T:
    """Repeats an update until its conditional write succeeds, and returns its result.

    Args:
        attempt: Reads the record, decides, and writes it on the condition that it is
            unchanged since the read. It raises ``PreconditionError`` if the record
            changed; any other error ends the update.
        record: Name of the record, for the error.
        **metadata: Metadata of the error.

    Raises:
        ConflictError: The record changed during each of ``ATTEMPTS`` attempts.
    """
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except PreconditionError:
            continue
    raise ConflictError(
        f"{record}: other calls changed it {ATTEMPTS} times in a row; try again",
        **metadata,
    )
