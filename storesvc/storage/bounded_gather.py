"""Runs many small calls of the bucket, a bounded number at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

AT_ONCE: Final = 128
"""Small objects that one call reads or writes concurrently."""

S = TypeVar("S")
T = TypeVar("T")


async def each(
    look: Callable[[S], Awaitable[T]], things: Iterable[S], *, at_once: int = AT_ONCE
) -> list[T]:
    """Returns the result of `look` for each item, in the order of the items.

    Args:
        look: Called once for each item.
        things: The items.
        at_once: Maximum concurrent calls.
    """
    slots = asyncio.Semaphore(at_once)

    async def bounded(thing: S) -> T:
        async with slots:
            return await look(thing)

    return await asyncio.gather(*map(bounded, things))
