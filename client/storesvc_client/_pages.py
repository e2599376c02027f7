"""Lists, page by page."""

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from storesvc_client.errors import DataLossError
from storesvc_proto.v1.errors_pb2 import DamagedRecord

T = TypeVar("T")

_REASON: Final = "CORRUPT_DATA"


def pages(ask: Callable[[Any], T], request: Any) -> Iterator[T]:
    """Yields the pages of a list.

    Args:
        ask: Returns the answer to a request.
        request: For the first page.

    Raises:
        DataLossError: After the last page: some rows are missing, whose records are
            damaged.
    """
    damaged: list[DamagedRecord] = []
    while True:
        page: Any = ask(request)
        damaged += page.damaged
        yield page
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    if damaged:
        others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise DataLossError(
            f"the list is not whole{others}: {damaged[0].message}",
            reason=_REASON,
            metadata={"damaged": ",".join(record.name for record in damaged)},
        )
