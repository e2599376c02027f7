"""Looks up the rows of a list concurrently, until the list is full.

A damaged record is a row, too: the list shows its error and continues.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from storesvc.errors import CorruptDataError
from storesvc.storage.hedged_calls import AT_ONCE, each

S = TypeVar("S")
T = TypeVar("T")


async def rows(
    look: Callable[[S], Awaitable[T | None]], names: Sequence[S], *, limit: int
) -> list[tuple[S, T | CorruptDataError]]:
    """Returns rows in the order of their names: each name with its record, or with the
    error of a damaged one.

    Args:
        look: Looks up one name; None means that it is no row.
        names: The names; only as many are looked up as the limit needs.
        limit: Maximum number of rows.
    """
    found: list[tuple[S, T | CorruptDataError]] = []
    count = limit  # usually each name is a row
    while names and len(found) < limit:
        batch, names = names[:count], names[count:]
        looks = await each(lambda name: or_damage(look(name)), batch)
        seen = zip(batch, looks, strict=True)
        found += [(name, one) for name, one in seen if one is not None]
        count = max(limit - len(found), AT_ONCE)
    return found[:limit]


async def or_damage(reading: Awaitable[T]) -> T | CorruptDataError:
    """Returns the result of a read, or its error if the data are damaged, so that a
    list continues with the next row."""
    try:
        return await reading
    except CorruptDataError as e:
        return e


def sound(found: T | CorruptDataError) -> T:
    """Returns a row of a list; raises the error of a damaged one.

    Raises:
        CorruptDataError: The row is damaged.
    """
    if isinstance(found, CorruptDataError):
        raise found
    return found
