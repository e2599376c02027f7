"""Many small looks at the bucket, several at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from storesvc.catalog.records import or_damage
from storesvc.errors import CorruptDataError

AT_ONCE: Final = 128
"""Small objects that one call reads or writes at a time."""

S = TypeVar("S")
T = TypeVar("T")


async def each(
    look: Callable[[S], Awaitable[T]], things: Iterable[S], *, at_once: int = AT_ONCE
) -> list[T]:
    """Returns what was found at each thing, in their order.

    Args:
        look: At one thing.
        things: To look at.
        at_once: How many at a time.
    """
    turns = asyncio.Semaphore(at_once)

    async def bounded(thing: S) -> T:
        async with turns:
            return await look(thing)

    return await asyncio.gather(*map(bounded, things))


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
