"""Looks up the rows of a list concurrently, until the list is full."""

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
