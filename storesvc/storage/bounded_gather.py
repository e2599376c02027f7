"""Many small looks at the bucket, several at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

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
