"""Lists of the server, read page by page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from storesvc_client.errors import DataLossError
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
