"""Lists, page by page, and row by row."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from storesvc_client.errors import DataLossError
from storesvc_proto.v1.errors_pb2 import DamagedRecord

T = TypeVar("T")

OnDamage: TypeAlias = Callable[[DataLossError], object] | None
"""Called for each row that cannot be told, because its record is damaged; None: the
list ends there, and raises it."""

FOLLOWING: Final = 1000
"""Rows of each page after the first: who wants a few gets them soon, and who wants all
waits for few answers, each of which may begin with a list of the storage's."""

_REASON: Final = "CORRUPT_DATA"


def rows(
    ask: Callable[[Any], Any],
    request: Any,
    rows_of: Callable[[Any], Sequence[T]],
    on_damage: OnDamage,
) -> Iterator[T]:
    """Yields the rows of a list, in its order.

    Args:
        ask: Returns the answer to a request.
        request: For the first page.
        rows_of: The rows of an answer.
        on_damage: What to do where one is damaged.

    Raises:
        DataLossError: The record of the next row is damaged.
    """
    while True:
        page = ask(request)
        yield from _in_order(rows_of(page), page.damaged, on_damage)
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token:
            raise DataLossError(
                "the server sent a page of a list that refers to itself; ask another "
                "server",
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
