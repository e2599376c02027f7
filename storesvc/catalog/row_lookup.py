"""Looks up the rows of a list, several at a time, until the list is full."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from storesvc.catalog.records import or_damage
from storesvc.errors import CorruptDataError
from storesvc.storage.bounded_gather import AT_ONCE, each

S = TypeVar("S")
T = TypeVar("T")


async def rows(
    look: Callable[[S], Awaitable[T | None]], names: Sequence[S], *, limit: int
) -> list[tuple[S, T | CorruptDataError]]:
    """Returns the rows of a list: names in their order, with what was found at each,
    or that it is damaged.

    Args:
        look: At one name; None: it is no row.
        names: To look at, no more of them than the limit needs.
        limit: At most so many rows.
    """
    found: list[tuple[S, T | CorruptDataError]] = []
    count = limit  # mostly each name is a row
    while names and len(found) < limit:
        batch, names = names[:count], names[count:]
        looks = await each(lambda name: or_damage(look(name)), batch)
        seen = zip(batch, looks, strict=True)
        found += [(name, one) for name, one in seen if one is not None]
        count = max(limit - len(found), AT_ONCE)
    return found[:limit]
